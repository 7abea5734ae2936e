"""Logits of two checkpoints on the same random tokens: ``python -m megatron_scalevec.checkpoint.logits A B``.

A process of its own, because it turns CPU mode on and sets Megatron's global arguments. The models are built
in float32 on one rank with local layers, whatever the run had.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from typing import Any

__all__ = ["logits_of", "main"]

# One rank, local layers, no low precision, and nothing that is for training alone.
_SETTINGS: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    # From 0.19 on; Megatron's validation has derived the run's from its parallel sizes.
    "tensor_parallel_num_weight_shards": None,
    "gtp_weight_remat_size": 1,
    "expert_tensor_parallel_num_weight_shards": None,
    "expert_gtp_weight_remat_size": 1,
    "sequence_parallel": False,
    "data_parallel_size": 1,
    "world_size": 1,
    "rank": 0,
    "bf16": False,
    "fp16": False,
    "fp8": None,
    "fp4": None,
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "overlap_p2p_comm": False,
    "tp_comm_overlap": False,
    "mtp_num_layers": None,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_overlap": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "spec": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
_TOKENS = 32


def main(paths: list[str]) -> None:
    """Print ``{"difference": D}``, the largest difference relative to the largest logit."""
    import torch

    from megatron_scalevec import cpu

    cpu.install()
    from megatron.core import parallel_state, tensor_parallel

    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        first, second = (logits_of(path) for path in paths)
    print(json.dumps({"difference": float((first - second).abs().max() / first.abs().max())}))


def logits_of(path: str, dtype: Any = None):
    """Logits on random tokens, in float32, of shape ``[2, tokens, vocabulary]``.

    Megatron's model parallel state must be set up, for one rank, and CPU mode be on.

    Args:
        path: A checkpoint.
        dtype: Cast the model's parameters to it once they are loaded; otherwise they are float32.
    """
    import torch

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.checkpoint.keys import saved_execution
    from megatron_scalevec.checkpoint.store import CheckpointReader

    reader = CheckpointReader(path)
    args = argparse.Namespace(**{**vars(reader.args), **_SETTINGS, "params_dtype": torch.float32})
    model = _build(args)
    config = ScaleVecConfig.from_namespace(args)
    if config.active:
        apply_scale_vectors(model, dataclasses.replace(config, execution=saved_execution(args)))
    _load(model, str(reader.folder))
    model.to(dtype).eval()
    vocabulary = reader.tensors["embedding.word_embeddings.weight"].shape[0]
    length = min(_TOKENS, args.max_position_embeddings or _TOKENS)
    tokens = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(2, length)
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model(tokens, positions, mask).float()


def _build(args: argparse.Namespace):
    from megatron.training.global_vars import set_args
    from packaging.version import Version

    from megatron_scalevec import cpu
    from megatron_scalevec.versions import megatron_version

    cpu.choose_arguments(args)
    set_args(args)
    if Version(megatron_version().base_version) >= Version("0.19"):
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args
        from megatron.training.models.gpt import GPTModelBuilder

        builder = GPTModelBuilder(gpt_config_from_args(args))
        return builder.build_model(ProcessGroupCollection.use_mpu_process_groups())
    from megatron_scalevec.integration.pretrain_gpt import model_provider

    return model_provider()


def _load(model, folder: str) -> None:
    from megatron.core import dist_checkpointing

    wanted = model.sharded_state_dict()
    state = dist_checkpointing.load(wanted, folder)
    model.load_state_dict({name: state[name] for name in wanted})


if __name__ == "__main__":
    # Megatron prints while it builds; the result is the last line.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    main(sys.argv[1:])
