"""What the ranks of the Megatron-Bridge tests do; see ``tests/ranks/jobs``."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import placeholders
from conversion_jobs import (
    exported_checkpoint,
    from_hugging_face,
    recipe_of_example,
    to_hugging_face,
    two_models,
)

__all__ = [
    "example_script",
    "exported_checkpoint",
    "from_hugging_face",
    "pretrain",
    "pretrain_with_megatron",
    "recipe_of_example",
    "to_hugging_face",
    "two_models",
]


def prepare() -> None:
    """Import Bridge once for all ranks."""
    placeholders.install()
    from megatron_scalevec import cpu

    # First: Bridge imports some of what CPU mode changes by name.
    cpu.install()
    import megatron.bridge.recipes
    import megatron.bridge.training.gpt_step
    import megatron.bridge.training.pretrain  # noqa: F401


def leave_out_the_package() -> None:
    """From here on this process is one of a machine where nobody has installed the package."""
    sys.modules["megatron.scalevec"] = None


def _one_spec():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(normalization="RMSNorm")


def _without_attention():
    from megatron.core.transformer.identity_op import IdentityOp

    spec = _one_spec()
    spec.submodules.self_attention = IdentityOp
    return spec


def _strange_linear():
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class Strange(ColumnParallelLinear):
        """Whatever it does to its weight, nobody here knows it."""

        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    spec = _one_spec()
    spec.submodules.mlp.keywords["submodules"].linear_fc1 = Strange
    return spec


def _marked_already():
    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.specs import scalevec_layer_spec

    return scalevec_layer_spec(_one_spec(), ScaleVecConfig(strategy="hg"))


OWN_SPECS = {
    "one spec": _one_spec,
    "without attention": _without_attention,
    "strange linear": _strange_linear,
    "another strategy": _marked_already,
}
"""Layer specs that a recipe brings along."""


def _record(losses: list, norms: list, end: dict[str, Any], by_name: bool):
    from megatron.bridge.training.callbacks import Callback
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model
    from ranks.initial import fill_by_name

    class Record(Callback):
        def on_train_step_end(self, context):
            [loss] = context.loss_dict.values()
            losses.append(float(loss))
            norms.append(float(context.grad_norm))
            end["step"] = context.state.train_state.step

        def on_train_start(self, context):
            for chunk in unwrap_model(context.model) if by_name else ():
                fill_by_name(
                    chunk,
                    parallel_state.get_tensor_model_parallel_rank(),
                    parallel_state.get_tensor_model_parallel_world_size(),
                )
            if by_name:
                context.optimizer.reload_model_params()
            end["model"] = unwrap_model(context.model)
            end["decays"] = _decays(end["model"], context.optimizer)

    return Record()


def pretrain(
    kind: str,
    folder: str,
    yaml: str | None = None,
    overrides: tuple[str, ...] = (),
    iterations: int = 4,
    load: str | None = None,
    model: dict[str, Any] | None = None,
    apply: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
    by_name: bool = False,
    hf: str | None = None,
    layer_spec: str | None = None,
    absent: bool = False,
) -> dict[str, Any]:
    """Train a small model with Bridge's own loop.

    Args:
        kind: As in :func:`small.hf_config`.
        folder: For checkpoints and the configuration.
        yaml: Text that is merged into the recipe as its user's YAML file.
        overrides: Command-line overrides, merged after it.
        iterations: Steps, counted from the checkpoint's first.
        load: A folder to resume from.
        model, checkpoint: Fields to set before the merge.
        apply: A ``ScaleVecConfig`` to apply in Python.
        by_name: Start from values that depend on the parameters' names alone.
        hf: A folder with a Hugging Face model, whose weights the recipe loads.
        layer_spec: Name of an entry of :data:`OWN_SPECS`, the recipe's own.
        absent: The package is not installed.

    Returns:
        ``losses``, ``norms``, ``provider`` (class name), ``error`` (type and text, where the run stopped),
        ``decays`` (name to weight-decay multiplier), ``vectors`` (name to value at the end), ``audit``.
    """
    import small
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain as run
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides
    from on_cpu import patch_bridge

    from megatron_scalevec import ScaleVecConfig
    from megatron_scalevec.patching import PatchSet

    patches = PatchSet()
    patch_bridge(patches)
    if absent:
        leave_out_the_package()
    model = dict(model or {})
    if layer_spec is not None:
        model["transformer_layer_spec"] = OWN_SPECS[layer_spec]()
    container = small.recipe(kind, Path(folder), iterations, hf, **model)
    for name, value in (checkpoint or {}).items():
        setattr(container.checkpoint, name, value)
    container.checkpoint.load = load
    file = None
    if yaml is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = Path(folder) / "user.yaml"
        file.write_text(yaml)
    losses: list[float] = []
    norms: list[float] = []
    end: dict[str, Any] = {}
    result: dict[str, Any] = {"losses": losses, "norms": norms, "error": None}
    try:
        container = process_config_with_overrides(container, file and str(file), list(overrides))
        if apply is not None:
            from megatron_scalevec.bridge import apply as apply_to

            apply_to(container, ScaleVecConfig(**apply))
        run(container, forward_step, callbacks=[_record(losses, norms, end, by_name)])
    except BaseException as error:  # torch's CheckpointException is no Exception
        result["error"] = (type(error).__name__, str(error))
        if not end:
            return result
    result["provider"] = type(container.model).__name__
    result["step"] = end.get("step")
    result["decays"] = end["decays"]
    result["vectors"] = {
        name: param.detach().float().tolist()
        for chunk in end["model"]
        for name, param in chunk.named_parameters()
        if param.dim() == 1
    }
    audit = Path(folder) / "scalevec_audit.json"
    result["audit"] = audit.read_text() if audit.is_file() else None
    return result


def pretrain_with_megatron(kind: str, strategy: str, iterations: int) -> dict[str, Any]:
    """Train the model of :func:`pretrain` through the flag, in Megatron's own loop, from values by name."""
    from ranks.jobs.training import train

    argv = f"""
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
        --kv-channels 16 --ffn-hidden-size 96 --swiglu --normalization RMSNorm --norm-epsilon 1e-6
        --disable-bias-linear --position-embedding-type rope --rotary-base 10000
        --untie-embeddings-and-output-weights --seq-length 32 --max-position-embeddings 64
        --micro-batch-size 2 --global-batch-size 4 --train-iters {iterations}
        --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-iters 2
        --weight-decay 0.033 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8
        --seed 1234 --tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 99,1,0
        --attention-dropout 0 --hidden-dropout 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
        --transformer-impl local --scalevec-strategy {strategy}""".split()
    if kind in ("qwen3", "qwen3_moe"):
        argv.append("--qk-layernorm")
    if kind == "qwen3_moe":
        argv += """
            --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48 --moe-router-pre-softmax
            --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
            --moe-token-dispatcher-type alltoall""".split()
    return train(argv)


def example_script(recipe: str, kind: str, folder: str, argv: list[str], iterations: int) -> dict[str, Any]:
    """Run ``examples/bridge/pretrain.py`` with a small recipe under the name of one of Bridge's.

    Returns:
        ``audit`` as text, None for a stock run; ``saved``: the strategy in the checkpoint's run_config.
    """
    import megatron.bridge.recipes as recipes
    import small
    from on_cpu import patch_bridge

    from megatron_scalevec.patching import PatchSet

    patches = PatchSet()
    patch_bridge(patches)
    patches.set(recipes, recipe, lambda: small.recipe(kind, Path(folder), iterations))
    script = Path(__file__).resolve().parents[2] / "examples" / "bridge" / "pretrain.py"
    sys.argv = [str(script), "--recipe", recipe, *argv]
    runpy.run_path(str(script), run_name="__main__")
    audit = Path(folder) / "scalevec_audit.json"
    return {
        "audit": audit.read_text() if audit.is_file() else None,
        "saved": sorted(path.name for path in Path(folder).glob("iter_*")),
    }


def _decays(chunks: list[Any], optimizer: Any) -> dict[str, float]:
    from megatron_scalevec.audit.groups import groups_of_parameters

    groups = groups_of_parameters(chunks, optimizer)
    return {
        name: groups[id(param)][0]
        for chunk in chunks
        for name, param in chunk.named_parameters()
        if id(param) in groups
    }
