"""Start values that depend on a parameter's name alone, whatever the layout.

Megatron's own initialization differs between pipeline splits, so runs with and without one could not be
compared. Scale vectors get values away from one: at one, many mistakes cancel.
"""

from __future__ import annotations

import hashlib
import re

import torch

__all__ = ["fill_by_name", "name_of_expert"]


def fill_by_name(model: torch.nn.Module, tp_rank: int, tp_size: int) -> None:
    """Overwrite every trainable parameter of a model chunk."""
    numbers = {
        name: module.layer_number - 1
        for name, module in model.named_modules()
        if hasattr(module, "layer_number") and re.search(r"layers\.\d+$", name)
    }
    offsets = {
        f"{name}.experts.": module.local_expert_indices[0]
        for name, module in model.named_modules()
        if hasattr(module, "local_expert_indices")
    }
    for module in model.modules():
        if type(module).__name__ == "GatedDeltaNet":
            _say_how_blocks_are_shared(module)
    for name, param in model.named_parameters():
        if param.requires_grad:
            key = name
            split = tp_rank, tp_size
            for path, number in numbers.items():
                if name.startswith(path + "."):
                    key = re.sub(r"layers\.\d+$", f"layers.{number}", path) + name[len(path) :]
            if key == "output_layer.weight" and model.share_embeddings_and_output_weights:
                key = "embedding.word_embeddings.weight"
            for path, offset in offsets.items():
                if name.startswith(path):
                    key = name_of_expert(key, offset)
                    split = _place_among_experts()
            # Megatron says so of its own linears alone (stride 2), and not of TransformerEngine's.
            halves = bool(model.config.gated_linear_unit) and key.endswith("linear_fc1.weight")
            with torch.no_grad():
                param.copy_(_value(key, param, *split, 2 if halves else 1))


def name_of_expert(name: str, offset: int) -> str:
    """The name of an expert's parameter with the expert's index in the whole layer.

    As ``SequentialMLP`` has it; TransformerEngine's grouped linears number their parameters instead.
    """
    grouped = re.fullmatch(r"(.*\.experts\.)(linear_fc[12]\.)(weight|gamma_[a-z_]+?)_?(\d+)(_[a-z]+)?", name)
    if grouped:
        start, linear, kind, index, part = grouped.groups()
        name = f"{start}local_experts.{index}.{linear}{kind}{part or ''}"
    return re.sub(r"(?<=local_experts\.)\d+", lambda index: str(int(index[0]) + offset), name, count=1)


def _place_among_experts() -> tuple[int, int]:
    from megatron.core import parallel_state as state

    return state.get_expert_tensor_parallel_rank(), state.get_expert_tensor_parallel_world_size()


def _say_how_blocks_are_shared(mixer: torch.nn.Module) -> None:
    """As Megatron does for Mamba: each rank holds a share of each block of a weight's rows."""
    qk, v, heads = mixer.qk_dim_local_tp, mixer.v_dim_local_tp, mixer.num_value_heads // mixer.tp_size
    mixer.in_proj.weight.partition_sizes = [qk, qk, v, v, heads, heads]
    mixer.conv1d.weight.partition_sizes = [qk, qk, v]


def _value(key: str, param: torch.nn.Parameter, tp_rank: int, tp_size: int, halves: int) -> torch.Tensor:
    dim = param.partition_dim if getattr(param, "tensor_model_parallel", False) else None
    if dim == -1:  # held whole by every rank, and only counted by every rank
        dim = None
    shape = list(param.shape)
    if dim is not None:
        shape[dim] *= tp_size
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "big")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if param.dim() > 1:
        full = 0.05 * noise
    elif key.endswith("bias"):
        full = 0.02 * noise
    else:
        full = 1 + 0.1 * noise
    if dim is None:
        return full
    sizes = getattr(param, "partition_sizes", None)
    if sizes is not None:  # Mamba: every rank holds its share of each of several blocks
        blocks = full.split([size * tp_size for size in sizes], dim=dim)
        return torch.cat([block.chunk(tp_size, dim=dim)[tp_rank] for block in blocks], dim=dim)
    # Two halves: every rank holds a share of the first (gate), then its share of the second (up).
    parts = full.chunk(halves, dim=dim)
    return torch.cat([part.chunk(tp_size, dim=dim)[tp_rank] for part in parts], dim=dim)
