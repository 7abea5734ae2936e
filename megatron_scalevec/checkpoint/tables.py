"""Which tensors of a checkpoint are linears and norms of the method, by their keys.

Keys are those of Megatron's sharded state dicts, which local and TransformerEngine's layers have in common:
a norm before a linear is stored as the linear's ``layer_norm_weight`` whichever module holds it. A kind of
linear that gets scale vectors in a later version is one more row here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map, whole_row_map

__all__ = ["LINEARS", "NORMS", "Dimensions", "LinearKind", "NormKind", "Site", "find_linears", "find_norms"]


@dataclass(frozen=True)
class Dimensions:
    """What the rows of a model's linears depend on."""

    heads: int
    groups: int
    head_dim: int
    gated: bool
    zero_centered: bool
    layernorm: bool
    output_gate: bool

    @classmethod
    def of(cls, args: Any) -> Dimensions:
        """From the arguments in a checkpoint.

        Raises:
            ScaleVecError: One of them is missing.
        """
        try:
            heads = args.num_attention_heads
            grouped = getattr(args, "group_query_attention", False)
            return cls(
                heads=heads,
                groups=args.num_query_groups if grouped else heads,
                head_dim=getattr(args, "kv_channels", None) or args.hidden_size // heads,
                gated=bool(args.swiglu) or any(getattr(args, name, False) for name in _GATED),
                zero_centered=bool(getattr(args, "apply_layernorm_1p", False)),
                layernorm=getattr(args, "normalization", "LayerNorm") == "LayerNorm",
                output_gate=bool(getattr(args, "attention_output_gate", False)),
            )
        except AttributeError as error:
            raise ScaleVecError(
                f"the arguments in the checkpoint lack {error.name}, so its layers are not known; save it "
                "once with Megatron's training script."
            ) from error


# Flags other than --swiglu that make an MLP of two branches.
_GATED = ("quick_geglu", "gated_linear_unit")


@dataclass(frozen=True)
class LinearKind:
    """One kind of linear. ``rows`` makes the map of the whole weight's rows from their number."""

    site: str
    suffix: str
    fed_by_norm: bool
    has_heads: bool
    rows: Callable[[Dimensions, int], RowMap]


@dataclass(frozen=True)
class NormKind:
    """One kind of norm that keeps its scale. ``pattern`` matches its key without ``.weight``."""

    site: str
    pattern: str


@dataclass(frozen=True)
class Site:
    """A linear of a checkpoint, all layers of a stack together. ``path`` is its key without ``.weight``."""

    kind: LinearKind
    path: str

    @property
    def norm(self) -> str:
        """Stem of the keys of the norm before it: with ``weight`` and ``bias`` behind."""
        return f"{self.path}.layer_norm_"

    @property
    def attention(self) -> str:
        """Path of the module around it."""
        return self.path.rpartition(".")[0]


def _qkv(dimensions: Dimensions, rows: int) -> RowMap:
    return qkv_row_map(
        num_query_groups=dimensions.groups,
        query_heads_per_group=dimensions.heads // dimensions.groups,
        head_dim=dimensions.head_dim,
        tp_rank=0,
        tp_size=1,
        output_gate=dimensions.output_gate,
    )


def _fc1(dimensions: Dimensions, rows: int) -> RowMap:
    # In a checkpoint gate and up lie behind each other over all ranks.
    size = rows // 2 if dimensions.gated else rows
    return fc1_row_map(ffn_hidden_size=size, gated=dimensions.gated, tp_rank=0, tp_size=1)


LINEARS = (
    LinearKind("attention", "self_attention.linear_qkv", True, True, _qkv),
    LinearKind("mlp", "mlp.linear_fc1", True, False, _fc1),
    LinearKind(
        "projections", "self_attention.linear_proj", False, False, lambda _, rows: whole_row_map("o", rows)
    ),
    LinearKind("projections", "mlp.linear_fc2", False, False, lambda _, rows: whole_row_map("down", rows)),
)

NORMS = (
    NormKind("head", r"decoder\.final_layernorm"),
    NormKind("mtp", r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)"),
)


def find_linears(keys: Iterable[str]) -> list[Site]:
    """The linears among a model's keys."""
    found = []
    for key in keys:
        path, _, last = key.rpartition(".")
        for kind in LINEARS:
            if last == "weight" and path.endswith(f".{kind.suffix}"):
                found.append(Site(kind, path))
    return found


def find_norms(keys: Iterable[str]) -> list[tuple[NormKind, str]]:
    """The norms of :data:`NORMS` among a model's keys, by their paths."""
    return [
        (kind, key.removesuffix(".weight"))
        for key in keys
        for kind in NORMS
        if re.fullmatch(kind.pattern + r"\.weight", key)
    ]
