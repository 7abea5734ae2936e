"""Which tensors of a checkpoint are linears and norms of the method, by their keys.

Keys are those of Megatron's sharded state dicts, which local and TransformerEngine's layers have in common:
a norm before a linear is stored as the linear's ``layer_norm_weight`` whichever module holds it. Experts, one
by one or grouped, are stacked along an axis under ``experts.experts``. The norm before a mixture of experts
is where a dense MLP's would be, or under its own name (TransformerEngine's layers). A kind of linear that
gets scale vectors in a later version is one more row here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map, whole_row_map

__all__ = [
    "LINEARS",
    "NORMS",
    "Dimensions",
    "LinearKind",
    "NormKind",
    "Site",
    "find_linears",
    "find_norms",
    "of_experts",
    "sites_by_norm",
]


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
    """One kind of linear.

    ``suffix``: a pattern for the end of its key without ``.weight``. ``rows`` makes the map of the whole
    weight's rows from their number. ``mixture``: part of a mixture of experts, where one norm feeds several
    linears. ``weight``: last word of its key.
    """

    site: str
    suffix: str
    fed_by_norm: bool
    has_heads: bool
    rows: Callable[[Dimensions, int], RowMap]
    mixture: bool = False
    weight: str = "weight"


@dataclass(frozen=True)
class NormKind:
    """One kind of norm that keeps its scale. ``pattern`` matches its key without ``.weight``."""

    site: str
    pattern: str


@dataclass(frozen=True)
class Site:
    """A linear of a checkpoint, all layers (and experts) of a stack together.

    ``path``: its key without the last word. ``norm``: stem of the keys of the norm before it, with ``weight``
    and ``bias`` behind; None where no norm feeds it.
    """

    kind: LinearKind
    path: str
    norm: str | None

    @property
    def weight(self) -> str:
        """Its key in a stock checkpoint."""
        return f"{self.path}.{self.kind.weight}"

    def owner(self, *, shared: bool) -> str:
        """Path of the module whose vectors scale it: its own, or that of all experts of the layer.

        Args:
            shared: Whether the routed experts of a layer have one set of vectors.
        """
        return _EXPERTS.split(self.path)[0] + ".experts" if shared and of_experts(self.path) else self.path

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


def _expert_fc1(prefix: str) -> Callable[[Dimensions, int], RowMap]:
    def rows(dimensions: Dimensions, rows: int) -> RowMap:
        dense = _fc1(dimensions, rows)
        return dataclasses.replace(dense, branches=tuple(f"{prefix}_{name}" for name in dense.branches))

    return rows


def _whole(branch: str) -> Callable[[Dimensions, int], RowMap]:
    return lambda _, rows: whole_row_map(branch, rows)


_EXPERTS = re.compile(r"\.experts\.experts\b")


def of_experts(key: str) -> bool:
    """Whether a key is that of something which every routed expert has of its own."""
    return _EXPERTS.search(key) is not None


_ROUTED = r"mlp\.experts\.experts\.(\d+\.)?"

LINEARS = (
    LinearKind("attention", r"self_attention\.linear_qkv", True, True, _qkv),
    LinearKind("mlp", r"mlp\.linear_fc1", True, False, _fc1),
    LinearKind("mlp", r"mlp\.router", True, False, _whole("router"), mixture=True),
    LinearKind("mlp", rf"{_ROUTED}linear_fc1", True, False, _expert_fc1("expert"), mixture=True),
    LinearKind("mlp", r"mlp\.shared_experts\.linear_fc1", True, False, _expert_fc1("shared"), mixture=True),
    LinearKind(
        "mlp",
        r"mlp\.shared_experts",
        True,
        False,
        _whole("shared_expert_gate"),
        mixture=True,
        weight="gate_weight",
    ),
    LinearKind("projections", r"self_attention\.linear_proj", False, False, _whole("o")),
    LinearKind("projections", r"mlp\.linear_fc2", False, False, _whole("down")),
    LinearKind("projections", rf"{_ROUTED}linear_fc2", False, False, _whole("expert_down"), mixture=True),
    LinearKind(
        "projections",
        r"mlp\.shared_experts\.linear_fc2",
        False,
        False,
        _whole("shared_down"),
        mixture=True,
    ),
)

NORMS = (
    NormKind("head", r"decoder\.final_layernorm"),
    NormKind("mtp", r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)"),
)


def find_linears(keys: Iterable[str]) -> list[Site]:
    """The linears among a model's keys."""
    keys = list(keys)
    known, found = set(keys), []
    for key in keys:
        path, _, last = key.rpartition(".")
        for kind in LINEARS:
            match = re.search(rf"\.{kind.suffix}$", path) if last == kind.weight else None
            if match:
                found.append(Site(kind, path, _norm_before(kind, path, path[: match.start()], known)))
    return found


def _norm_before(kind: LinearKind, path: str, layer: str, known: set[str]) -> str | None:
    if not kind.fed_by_norm:
        return None
    if not kind.mixture:
        return f"{path}.layer_norm_"
    own = f"{layer}.pre_mlp_layernorm."
    return own if f"{own}weight" in known else f"{layer}.mlp.linear_fc1.layer_norm_"


def sites_by_norm(sites: Iterable[Site]) -> list[list[Site]]:
    """Linears that one norm feeds together, routed experts' behind the others; any other by itself."""
    groups: dict[str, list[Site]] = {}
    for site in sorted(sites, key=lambda site: of_experts(site.path)):
        groups.setdefault(site.norm or site.weight, []).append(site)
    return list(groups.values())


def find_norms(keys: Iterable[str]) -> list[tuple[NormKind, str]]:
    """The norms of :data:`NORMS` among a model's keys, by their paths."""
    return [
        (kind, key.removesuffix(".weight"))
        for key in keys
        for kind in NORMS
        if re.fullmatch(kind.pattern + r"\.weight", key)
    ]
