"""A checkpoint read as the stock model that computes the same function.

Scale vectors are folded into the weights that they scale, one layer's tensor at a time, with the row maps
and the arithmetic of the training code (:mod:`megatron_scalevec.fold`). The exception are the norms on q, k
and v: they stay norms, with γ as their weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from megatron_scalevec.checkpoint.keys import WEIGHT, is_raw, raw_key, saved_execution, stock_key
from megatron_scalevec.checkpoint.store import Box, CheckpointReader, StoredTensor
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.decisions import SHARED
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fc1_row_map, fold_weight, qkv_row_map, whole_row_map
from megatron_scalevec.huggingface.blocks import Block
from megatron_scalevec.huggingface.description import Description
from megatron_scalevec.reparam import get_reparameterization

__all__ = ["FoldedCheckpoint"]

_LAYERS = "decoder.layers."
# A norm in front of a linear is part of it in TransformerEngine's layers, and local layers save it under
# that name; in front of experts TransformerEngine's layers have it as a module of its own.
_OTHER_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_NOT_THE_MODEL = ("optimizer.", "chained_", "rng_state")


class FoldedCheckpoint:
    """Stock tensors of a checkpoint, folded when they are read.

    Args:
        reader: The checkpoint.
        model: What its arguments say about the model.
    """

    def __init__(self, reader: CheckpointReader, model: Description) -> None:
        self._reader = reader
        self._model = model
        config = ScaleVecConfig.from_namespace(reader.args)
        self._live_is_folded = saved_execution(reader.args) == "optimizer"
        if config.owns_vectors and model.experts is not None:
            raise ScaleVecError(
                f"{reader.folder} has experts with scale vectors: make a stock checkpoint of it first "
                "(scalevec fold), and export that."
            )
        self._reparam = config.reparam if config.active else None
        self._row_maps = _row_maps(model)

    def claim(self, blocks: Sequence[Block]) -> tuple[list[torch.dtype], list[str]]:
        """Look for everything that reading these blocks takes.

        Returns:
            The blocks' dtypes, and the tensors of the model that none of them has asked for.

        Raises:
            ScaleVecError: The checkpoint lacks a tensor, or has another shape for it.
        """
        dtypes, claimed = [], set()
        for block in blocks:
            stored = self._find(block)
            dtypes.append(stored.dtype)
            claimed.add(stored.key)
            for name in self._vector_names(stored, block):
                claimed.update(self._vector_keys(name).values())
        guards = {stock_key(key) for key in self._reader.tensors if is_raw(key)}
        left = self._reader.tensors.keys() - claimed - guards
        return dtypes, sorted(key for key in left if not key.startswith(_NOT_THE_MODEL))

    def read(self, block: Block) -> torch.Tensor:
        """A block's tensor as the stock model has it, [*block.shape].

        Raises:
            ScaleVecError: The checkpoint lacks the tensor, or has another shape for it.
        """
        stored = self._find(block)
        tensor = self._slice(stored, block)
        vectors = {name: self._vector(name, block) for name in self._vector_names(stored, block)}
        if block.norm:
            return self._norm(tensor, next(iter(vectors.values())))
        if self._live_is_folded or all(vector is None for vector in vectors.values()):
            return tensor
        return _folded(tensor, _stem(stored), self._row_maps[block.key][1](), vectors)

    def _find(self, block: Block) -> StoredTensor:
        tensors = self._reader.tensors
        names = [block.key, *filter(None, [_OTHER_NAMES.get(block.key)])]
        if block.layer is not None:
            # Layers are stacked, or apart where they are not all of one kind.
            names = [prefix + name for name in names for prefix in (_LAYERS, f"{_LAYERS}{block.layer}.")]
        # First, because a guard lies under the stock key then.
        raw = [raw_key(name) for name in names if name.endswith(f".{WEIGHT}")]
        for key in (*raw, *names):
            if key in tensors:
                self._require_shape(tensors[key], block)
                return tensors[key]
        raise ScaleVecError(
            f"the checkpoint lacks {names[0]}, which a model of its arguments has; it is incomplete, or in a "
            "layout that this version does not read."
        )

    def _require_shape(self, stored: StoredTensor, block: Block) -> None:
        expected = self._stack(stored.key, block) + block.shape
        if stored.shape != expected:
            raise ScaleVecError(
                f"the checkpoint has {stored.key} {list(stored.shape)}, where its arguments say "
                f"{list(expected)}; nothing was written."
            )

    def _stack(self, key: str, block: Block) -> tuple[int, ...]:
        """Sizes of the axes for layers and experts in front of a tensor's own."""
        stacked = block.layer is not None and not key.startswith(f"{_LAYERS}{block.layer}.")
        layers = (self._model.layers,) if stacked else ()
        return layers if block.expert is None else (*layers, self._model.experts.number)

    def _slice(self, stored: StoredTensor, block: Block) -> torch.Tensor:
        """A stored tensor at the block's layer and expert."""
        stack = self._stack(stored.key, block)
        place = tuple(index for index in (block.layer, block.expert) if index is not None)
        place = place[len(place) - len(stack) :]
        own = stored.shape[len(stack) :]
        box = Box(place + (0,) * len(own), (1,) * len(place) + own)
        return self._reader.read(stored.key, box).view(own)

    def _vector_names(self, stored: StoredTensor, block: Block) -> list[str]:
        """Base names of the vectors that may act on a block's tensor."""
        if block.norm:
            return [f"{_stem(stored)}.gamma"]
        branches, _ = self._row_maps.get(block.key, ((), None))
        names = [("in", SHARED), *((side, branch) for side in ("in", "out") for branch in branches)]
        return [f"{_stem(stored)}.gamma_{side}_{branch}" for side, branch in names] if branches else []

    def _vector_keys(self, name: str) -> dict[str, str]:
        """The stored parts of a vector by suffix; empty where the checkpoint has no such vector."""
        if self._reparam is None:
            return {}
        parts = get_reparameterization(self._reparam).parts
        keys = {part.suffix: f"{name}_{part.suffix}" if part.suffix else name for part in parts}
        return keys if all(key in self._reader.tensors for key in keys.values()) else {}

    def _vector(self, name: str, block: Block) -> torch.Tensor | None:
        """γ, at least in float32; None where there is none of that name."""
        keys = self._vector_keys(name)
        if not keys:
            return None
        parts = {suffix: self._slice(self._reader.tensors[key], block) for suffix, key in keys.items()}
        wide = {suffix: _widened(part) for suffix, part in parts.items()}
        return get_reparameterization(self._reparam).compose(wide)

    def _norm(self, weight: torch.Tensor, gamma: torch.Tensor | None) -> torch.Tensor:
        if gamma is None and not self._model.zero_centered:
            return weight
        own = _widened(weight) + 1 if self._model.zero_centered else _widened(weight)
        return (own if gamma is None else own * gamma).to(weight.dtype)


def _stem(stored: StoredTensor) -> str:
    return stored.key.rpartition(".")[0]


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _folded(
    weight: torch.Tensor, stem: str, row_map: RowMap, vectors: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    """W_eff of a whole weight; ``vectors`` by name, None where there is none."""

    def named(side: str, branch: str) -> torch.Tensor | None:
        return vectors[f"{stem}.gamma_{side}_{branch}"]

    shared = named("in", SHARED)
    inputs = [named("in", branch) if shared is None else shared for branch in row_map.branches]
    outputs = [named("out", branch) for branch in row_map.branches]
    gamma_in = _joined(inputs, [weight.shape[1]] * len(inputs))
    gamma_out = _joined(outputs, row_map.sizes)
    if gamma_in is not None:
        gamma_in = gamma_in.view(len(inputs), -1)
    return fold_weight(weight, gamma_in, gamma_out, row_map.branch_of_row, row_map.slot_of_row)


def _joined(vectors: Sequence[torch.Tensor | None], sizes: Sequence[int]) -> torch.Tensor | None:
    """The branches' vectors one after another, ones for a branch that has none."""
    if all(vector is None for vector in vectors):
        return None
    return torch.cat([torch.ones(size) if gamma is None else gamma for gamma, size in zip(vectors, sizes)])


def _row_maps(model: Description) -> dict[str, tuple[tuple[str, ...], Callable[[], RowMap]]]:
    """Branches and rows of every linear that can carry scale vectors."""

    def qkv() -> RowMap:
        return qkv_row_map(
            num_query_groups=model.groups,
            query_heads_per_group=model.heads // model.groups,
            head_dim=model.head_dim,
            tp_rank=0,
            tp_size=1,
        )

    def fc1() -> RowMap:
        return fc1_row_map(ffn_hidden_size=model.width, gated=True, tp_rank=0, tp_size=1)

    return {
        "self_attention.linear_qkv.weight": (("q", "k", "v"), qkv),
        "self_attention.linear_proj.weight": (("o",), partial(whole_row_map, "o", model.hidden)),
        "mlp.linear_fc1.weight": (("gate", "up"), fc1),
        "mlp.linear_fc2.weight": (("down",), partial(whole_row_map, "down", model.hidden)),
    }
