"""What the ranks of the nemo-toolkit tests do; see ``tests/ranks/jobs``."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

__all__ = ["describe_recipe", "pretrain", "resolve", "send_to_slurm", "train"]


class _NoCluster(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An empty ``leptonai``: nemo_run imports it for a cloud that nobody uses here."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "leptonai":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = _anything
        return module

    def exec_module(self, module):
        pass


def _anything(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def prepare() -> None:
    """Import NeMo once for all ranks, before CPU mode hides what NeMo may look for."""
    sys.meta_path.insert(0, _NoCluster())
    from megatron_scalevec import cpu

    cpu.install()
    import nemo.collections.llm  # noqa: F401


SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": 32,
    "vocab_size": 128,
}

LOCAL = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "cross_entropy_loss_fusion": False,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
    "use_cpu_initialization": True,
    "deallocate_pipeline_outputs": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "bf16": False,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
}


def _resolved(factory: str, yaml: str, folder: str) -> Any:
    """The recipe as ``nemo llm pretrain --factory FACTORY --yaml FILE`` would run it."""
    from nemo.collections import llm
    from nemo_run.cli.lazy import LazyEntrypoint

    file = Path(folder) / "recipe.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml)
    return LazyEntrypoint(llm.pretrain, factory=factory, yaml=str(file)).resolve()


def resolve(factory: str, yaml: str, folder: str) -> dict[str, Any]:
    """Merge a YAML text into a recipe.

    Returns:
        ``spec``: what the model's configuration then holds, ``sendable``: whether a cluster's packager can
        write it, ``error``: type and text where it stops, ``said``: what the package logged before.
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("megatron_scalevec").addHandler(handler)
    try:
        recipe = _resolved(factory, yaml, folder)
    except Exception as error:
        return {"error": (type(error).__name__, str(error)), "said": said}
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    return {
        "error": None,
        "spec": str(recipe.model.config.transformer_layer_spec),
        "sendable": len(ZlibJSONSerializer().serialize(recipe.model)) > 0,
    }


def _build(recipe: Any, more: dict[str, Any]):
    import fiddle
    from megatron.core import parallel_state, tensor_parallel

    for name, value in more.items():
        setattr(recipe.model.config, name, value)
    config = fiddle.build(recipe.model.config)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return config, config.configure_model(None)


def train(factory: str, yaml: str, folder: str, steps: int = 20) -> dict[str, Any]:
    """Build a small model from a recipe as NeMo does, and train it on one batch.

    The optimizer is made by NeMo's own ``setup_megatron_optimizer``.

    Returns:
        ``losses``, ``decays`` (name to weight decay in the optimizer's group), ``config`` (class name),
        ``error``.
    """
    import fiddle
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    recipe = _resolved(factory, yaml, folder)
    result: dict[str, Any] = {"losses": [], "decays": {}, "error": None}
    try:
        config, model = _build(recipe, {**SMALL, **LOCAL})
        result["config"] = type(config).__name__
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        recipe.optim.config.bf16 = False
        recipe.optim.config.use_distributed_optimizer = False
        recipe.optim.config.params_dtype = torch.float32
        recipe.optim.config.lr = 3e-3
        module = fiddle.build(recipe.optim)
        optimizer = _optimizer_of_nemo(module, wrapped)
    except Exception as error:
        result["error"] = (type(error).__name__, str(error))
        return result
    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (4, 33))
    positions = torch.arange(32).expand(4, -1)
    mask = torch.triu(torch.ones(32, 32, dtype=torch.bool), 1)[None, None]
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = wrapped(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        result["losses"].append(loss.item())
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            result["decays"][names[id(param)]] = group["weight_decay"]
    return result


def _optimizer_of_nemo(module: Any, wrapped: Any) -> Any:
    """NeMo's optimizer over one wrapped model, without Lightning around it."""
    from nemo.lightning._strategy_lib import setup_megatron_optimizer

    class Chunks(list):
        ddp_config = wrapped.ddp_config

    class Chunk:
        pass

    chunk = Chunk()
    chunk.module = wrapped
    made = setup_megatron_optimizer(
        Chunks([chunk]),
        module.config,
        no_weight_decay_cond=module.no_weight_decay_cond,
        scale_lr_cond=module.scale_lr_cond,
        lr_mult=module.lr_mult,
    )
    return made.mcore_optimizer


class _Numbers:
    """A tokenizer of a vocabulary without words, which mock data needs nothing else of."""

    vocab_size = SMALL["vocab_size"]
    eos_id = bos_id = 0


class _FourTexts(torch.utils.data.Dataset):
    """Four sequences over and over, which a model can learn, in the place of NeMo's mock data.

    Those are noise, and NeMo 2.7.3 hands its own dataset the attention mask's flag as the seed, so without
    TransformerEngine they have no mask.
    """

    def __init__(self, tokenizer, name, length, seq_length, *_):
        self.length, self.seq_length = length, seq_length
        generator = torch.Generator().manual_seed(5)
        self.texts = torch.randint(0, tokenizer.vocab_size, (4, seq_length + 1), generator=generator)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        size = self.seq_length
        return {
            "tokens": self.texts[index % 4, :-1],
            "labels": self.texts[index % 4, 1:],
            "loss_mask": torch.ones(size),
            "position_ids": torch.arange(size),
            "attention_mask": torch.ones(1, size, size, dtype=torch.bool).triu(1),
        }

    collate_fn = staticmethod(torch.utils.data.default_collate)


def _without_devices() -> None:
    """What NeMo's logger and Lightning ask for beside what CPU mode answers."""
    from lightning.pytorch.accelerators import CUDAAccelerator
    from nemo.lightning import nemo_logger
    from nemo.lightning.io import pl as checkpoint_io

    # CPU mode makes the CPU look like a GPU, and Lightning is not to take it for one.
    CUDAAccelerator.is_available = staticmethod(lambda: False)
    # After loading, tensors are sent to the GPU that must be there.
    checkpoint_io._fix_tensors_device = lambda state: state
    nemo_logger.lcp = types.SimpleNamespace(LocalCheckpointCallback=type("LocalCheckpointCallback", (), {}))


def pretrain(factory: str, yaml: str, folder: str, steps: int, stop_after: int) -> dict[str, Any]:
    """Run a recipe as ``nemo llm pretrain`` does: Lightning's loop, NeMo's strategy, mock data, checkpoints.

    Args:
        factory, yaml: The recipe, cut down to :data:`SMALL`.
        folder: For logs and checkpoints; a run goes on from the last one there, as recipes say.
        steps: The length of the run, which schedules look at.
        stop_after: The step after which it stops, as one whose time is up.

    Returns:
        ``losses``, ``output`` (what rank 0 has printed), ``decays``, ``error``.
    """
    import contextlib
    import io

    import fiddle
    from lightning.pytorch.callbacks import Callback
    from nemo.collections.llm.gpt.data import mock

    mock._MockGPTDataset = _FourTexts
    losses: list[float] = []
    decays: dict[str, float] = {}

    class Record(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            losses.append(float(trainer.callback_metrics["reduced_train_loss"]))
            trainer.should_stop = trainer.global_step >= stop_after

        def on_train_start(self, trainer, pl_module):
            names = {id(param): name for name, param in pl_module.module.named_parameters()}
            for optimizer in trainer.optimizers:
                for group in optimizer.mcore_optimizer.param_groups:
                    for param in group["params"]:
                        decays[names.get(id(param), "?")] = group["weight_decay"]

    _without_devices()
    result: dict[str, Any] = {"losses": losses, "decays": decays, "error": None, "output": ""}
    recipe = _resolved(factory, yaml, folder)
    for name, value in {**SMALL, **LOCAL}.items():
        setattr(recipe.model.config, name, value)
    recipe.trainer.accelerator = "cpu"
    recipe.trainer.devices = 1
    recipe.trainer.num_nodes = 1
    recipe.trainer.max_steps = steps
    recipe.trainer.val_check_interval = 1000
    recipe.trainer.limit_val_batches = 0
    recipe.trainer.log_every_n_steps = 1
    recipe.trainer.callbacks = [Record()]
    recipe.trainer.plugins = None
    strategy = recipe.trainer.strategy
    strategy.tensor_model_parallel_size = strategy.pipeline_model_parallel_size = 1
    strategy.sequence_parallel = False
    strategy.ddp = "megatron"
    recipe.optim.config.bf16 = False
    recipe.optim.config.params_dtype = torch.float32
    recipe.optim.config.use_distributed_optimizer = False
    recipe.optim.config.lr = 3e-3
    recipe.optim.lr_scheduler.warmup_steps = 2
    recipe.data = mock.MockDataModule(
        seq_length=32, tokenizer=_Numbers(), micro_batch_size=2, global_batch_size=4, num_workers=0
    )
    recipe.log.log_dir = folder
    recipe.log.tensorboard = recipe.log.wandb = None
    # The last checkpoint of a run has no optimizer otherwise.
    recipe.log.ckpt.save_optim_on_train_end = True
    # Lightning's own logs go to the working directory.
    os.chdir(folder)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            fiddle.build(recipe)()
    except Exception as error:
        result["error"] = (type(error).__name__, str(error))
    result["output"] = printed.getvalue()
    return result


def send_to_slurm(argv: list[str]) -> dict[str, Any]:
    """Run ``examples/nemo/slurm.py`` up to the point where ``nemo_run`` would open its tunnel.

    Returns:
        ``spec`` of the recipe that was to be sent, ``sendable``: whether a packager can write it, and fields
        of the executor.
    """
    import runpy

    import nemo_run
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    sent: dict[str, Any] = {}

    def run(recipe, executor, name):
        sent["spec"] = str(recipe.model.config.transformer_layer_spec)
        sent["sendable"] = len(ZlibJSONSerializer().serialize(recipe)) > 0
        sent["devices"] = (recipe.trainer.num_nodes, recipe.trainer.devices)
        sent["executor"] = (executor.nodes, executor.ntasks_per_node, executor.gpus_per_node)
        sent["account"] = (executor.account, executor.partition, executor.container_image)
        sent["tunnel"] = (executor.tunnel.user, executor.tunnel.host, executor.tunnel.job_dir)

    nemo_run.run = run
    sys.argv = ["slurm.py", *argv]
    runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples/nemo/slurm.py"), run_name="__main__")
    return sent


def describe_recipe(factory: str, yaml: str, folder: str, layers: int = 2) -> dict[str, Any]:
    """Build a recipe's model of full width on the meta device, with ``layers`` layers, and audit it.

    Returns:
        ``audit`` as a dict, or ``error``.
    """
    import json

    from megatron_scalevec.audit import audit

    recipe = _resolved(factory, yaml, folder)
    try:
        more = {**LOCAL, "num_layers": layers, "init_model_with_meta_device": False}
        if getattr(recipe.model.config, "vocab_size", None) is None:
            more["vocab_size"] = 50304
        import fiddle  # noqa: F401

        with torch.device("meta"):
            _, model = _build(recipe, more)
        return {"error": None, "audit": json.loads(audit(model).to_json())}
    except Exception as error:
        return {"error": (type(error).__name__, str(error))}
