"""Which tensors of a checkpoint are linears and norms of the method, by their keys.

Keys are those of Megatron's sharded state dicts. A norm that feeds one linear is mostly stored as that
linear's ``layer_norm_weight``, whichever module holds it; in hybrids of local layers, before a mixture of
experts and before latent attention it has its own name. Experts, one by one or grouped, are stacked along an
axis under ``experts.experts``. The in-projections of Mamba layers and gated delta nets are stored in parts,
one for each branch. A kind of linear that gets scale vectors in a later version is one more row here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import (
    RowMap,
    alternating_fc1_row_map,
    fc1_row_map,
    interleaved_row_map,
    qkv_row_map,
    whole_row_map,
)

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
    "rows_that_take_turns",
    "sites_by_norm",
]


@dataclass(frozen=True)
class LatentDimensions:
    """Channels of latent attention: of the latent of keys and values, and per head."""

    kv_latent: int
    rope: int
    key: int
    value: int

    @classmethod
    def of(cls, args: Any) -> LatentDimensions:
        """From the arguments in a checkpoint; an AttributeError says which one is missing."""
        return cls(args.kv_lora_rank, args.qk_pos_emb_head_dim, args.qk_head_dim, args.v_head_dim)


@dataclass(frozen=True)
class Dimensions:
    """What the rows of a model's linears depend on.

    ``groups`` of queries: None where layers differ in them, so that a weight's rows tell. ``latent``: of
    latent attention, None without it. ``turns``: as :func:`rows_that_take_turns` says.
    """

    heads: int
    groups: int | None
    head_dim: int
    gated: bool
    zero_centered: bool
    layernorm: bool
    output_gate: bool
    latent: LatentDimensions | None
    turns: int | None

    @classmethod
    def of(cls, args: Any) -> Dimensions:
        """From the arguments in a checkpoint.

        Raises:
            ScaleVecError: One of them is missing.
        """
        try:
            heads = args.num_attention_heads
            grouped = getattr(args, "group_query_attention", False)
            groups = args.num_query_groups if grouped else heads
            return cls(
                heads=heads,
                groups=None if any(getattr(args, name, None) for name in _HETEROGENEOUS) else groups,
                head_dim=getattr(args, "kv_channels", None) or args.hidden_size // heads,
                gated=_is_gated(args),
                zero_centered=bool(getattr(args, "apply_layernorm_1p", False)),
                layernorm=getattr(args, "normalization", "LayerNorm") == "LayerNorm",
                output_gate=bool(getattr(args, "attention_output_gate", False)),
                latent=LatentDimensions.of(args) if getattr(args, "multi_latent_attention", False) else None,
                turns=rows_that_take_turns(args),
            )
        except AttributeError as error:
            raise ScaleVecError(
                f"the arguments in the checkpoint lack {error.name}, so its layers are not known; save it "
                "once with Megatron's training script."
            ) from error


# Flags other than --swiglu that make an MLP of two branches.
_GATED = ("quick_geglu", "gated_linear_unit")


def _is_gated(args: Any) -> bool:
    return bool(args.swiglu) or any(getattr(args, name, False) for name in _GATED)


def rows_that_take_turns(args: Any) -> int | None:
    """How many rows of gate and of up take turns in routed experts; None where all of the gate's come first.

    Only grouped linears heed the setting, which local layers do not have.

    Args:
        args: Megatron's arguments in a checkpoint.
    """
    grouped = getattr(args, "moe_grouped_gemm", False) and getattr(args, "transformer_impl", None) != "local"
    size = getattr(args, "moe_mlp_glu_interleave_size", None)
    return int(size) if size and grouped and _is_gated(args) else None


_HETEROGENEOUS = ("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json")


@dataclass(frozen=True)
class LinearKind:
    """One kind of linear.

    ``suffix``: a pattern for the end of its path, which is its key without ``weight``. ``rows`` makes the
    map of the whole weight's rows from their number. ``norms``: stems of the keys that the norm before it
    may have, in ``{path}`` or in the ``{layer}`` around it; empty where none feeds it. ``norm_feeds_others``
    and ``norm_fits`` as in :func:`megatron_scalevec.decisions.plan_linear`. ``needs_norm``: whether it gets
    vectors only where there is a norm. ``on_latents``: whether it is of a layer whose experts see latents of
    the tokens; None where that makes no difference.
    """

    site: str
    suffix: str
    rows: Callable[[Dimensions, int], RowMap]
    norms: tuple[str, ...] = ()
    has_heads: bool = False
    norm_feeds_others: bool = False
    norm_fits: bool = True
    needs_norm: bool = False
    on_latents: bool | None = None
    weight: str = "weight"

    @property
    def fed_by_norm(self) -> bool:
        """Whether a norm feeds it."""
        return bool(self.norms)


@dataclass(frozen=True)
class NormKind:
    """One kind of norm that keeps its scale.

    ``pattern`` matches its key without ``.weight``. ``needs_sum`` as in
    :func:`megatron_scalevec.decisions.norm_keeps_scale`.
    """

    site: str
    pattern: str
    needs_sum: bool = False


@dataclass(frozen=True)
class Site:
    """A linear of a checkpoint, or a part of one that is stored by itself; all layers (and experts) of a
    stack together.

    ``path``: its key without the weight. ``norm``: stem of the keys of the norm before it, with ``weight``
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
    def whole_paths(self) -> tuple[str, ...]:
        """Paths of the modules of which a scale that all branches share may be: its own, or that of the one
        down-projection of latent attention (:mod:`megatron_scalevec.checkpoint.joined`)."""
        joined = self.path.endswith(("linear_q_down_proj", "linear_kv_down_proj"))
        return (self.path, f"{self.attention}.linear_qkv_down_proj") if joined else (self.path,)

    @property
    def attention(self) -> str:
        """Path of the module around it."""
        return self.path.rpartition(".")[0]


def _qkv(dimensions: Dimensions, rows: int) -> RowMap:
    queries = dimensions.heads * (2 if dimensions.output_gate else 1)
    groups = dimensions.groups or (rows // dimensions.head_dim - queries) // 2
    if groups <= 0 or dimensions.heads % groups:
        raise ScaleVecError(
            f"an attention weight of the checkpoint has {rows} rows, which are no whole groups of "
            f"{dimensions.heads} heads of {dimensions.head_dim} channels: it and the arguments in the "
            "checkpoint do not belong together."
        )
    return qkv_row_map(
        num_query_groups=groups,
        query_heads_per_group=dimensions.heads // groups,
        head_dim=dimensions.head_dim,
        tp_rank=0,
        tp_size=1,
        output_gate=dimensions.output_gate,
    )


def _kv_down(dimensions: Dimensions, rows: int) -> RowMap:
    latent = _latent(dimensions)
    return interleaved_row_map(1, {"kv_down": latent.kv_latent, "k_rope": latent.rope}, tp_rank=0, tp_size=1)


def _kv_up(dimensions: Dimensions, rows: int) -> RowMap:
    latent = _latent(dimensions)
    heads = {"k_up": latent.key, "v_up": latent.value}
    return interleaved_row_map(dimensions.heads, heads, tp_rank=0, tp_size=1)


def _latent(dimensions: Dimensions) -> LatentDimensions:
    if dimensions.latent is None:
        raise ScaleVecError(
            "the checkpoint holds latent attention, and the arguments in it do not say so: they do not "
            "belong together."
        )
    return dimensions.latent


def _fc1(dimensions: Dimensions, rows: int) -> RowMap:
    # In a checkpoint gate and up lie behind each other over all ranks.
    size = rows // 2 if dimensions.gated else rows
    return fc1_row_map(ffn_hidden_size=size, gated=dimensions.gated, tp_rank=0, tp_size=1)


def _expert_fc1(prefix: str) -> Callable[[Dimensions, int], RowMap]:
    def rows(dimensions: Dimensions, rows: int) -> RowMap:
        if dimensions.turns and prefix == "expert":
            block = dimensions.turns
            own = alternating_fc1_row_map(ffn_hidden_size=rows // 2, block=block, tp_rank=0, tp_size=1)
        else:
            own = _fc1(dimensions, rows)
        return dataclasses.replace(own, branches=tuple(f"{prefix}_{name}" for name in own.branches))

    return rows


def _whole(branch: str) -> Callable[[Dimensions, int], RowMap]:
    return lambda _, rows: whole_row_map(branch, rows)


_EXPERTS = re.compile(r"\.experts\.experts\b")


def of_experts(key: str) -> bool:
    """Whether a key is that of something which every routed expert has of its own."""
    return _EXPERTS.search(key) is not None


_TO_LATENTS = "fc1_latent_proj"
_ROUTED = r"mlp\.experts\.experts\.(\d+\.)?"

_BEFORE_ATTENTION = ("{path}.layer_norm_", "{layer}.input_layernorm.")
_BEFORE_MLP = ("{path}.layer_norm_", "{layer}.pre_mlp_layernorm.")
# One norm feeds several linears.
_OF_LATENTS = {"norms": ("{layer}.input_layernorm.",), "norm_feeds_others": True}
_OF_MIXTURE = {
    "norms": ("{layer}.pre_mlp_layernorm.", "{layer}.mlp.linear_fc1.layer_norm_"),
    "norm_feeds_others": True,
}


def _up_projection(latent: str, rows: Callable[[Dimensions, int], RowMap]) -> LinearKind:
    return LinearKind(
        "latent",
        rf"self_attention\.linear_{latent}_up_proj",
        rows,
        ("{path}.layer_norm_", f"{{layer}}.self_attention.{latent}_layernorm."),
        norm_fits=False,  # as convert.latent says
        needs_norm=True,
    )


def _parts(site: str, suffix: str, norms: tuple[str, ...], branches: dict[str, str]) -> list[LinearKind]:
    """An in-projection that is stored in parts; ``branches``: Megatron's name of a part to its branch."""
    return [
        LinearKind(site, suffix, _whole(branch), norms, weight=f"weight.{part}")
        for part, branch in branches.items()
    ]


LINEARS = (
    LinearKind("attention", r"self_attention\.linear_qkv", _qkv, _BEFORE_ATTENTION, has_heads=True),
    LinearKind("attention", r"self_attention\.linear_q_proj", _whole("q"), **_OF_LATENTS),
    LinearKind("attention", r"self_attention\.linear_q_down_proj", _whole("q_down"), **_OF_LATENTS),
    LinearKind("attention", r"self_attention\.linear_kv_down_proj", _kv_down, **_OF_LATENTS),
    _up_projection("q", _whole("q_up")),
    _up_projection("kv", _kv_up),
    LinearKind("mlp", r"mlp\.linear_fc1", _fc1, _BEFORE_MLP),
    LinearKind("mlp", r"mlp\.router", _whole("router"), **_OF_MIXTURE),
    LinearKind("mlp", rf"{_ROUTED}linear_fc1", _expert_fc1("expert"), **_OF_MIXTURE, on_latents=False),
    LinearKind("projections", rf"{_ROUTED}linear_fc1", _expert_fc1("expert"), on_latents=True),
    LinearKind("mlp", rf"mlp\.{_TO_LATENTS}", _whole("latent_down"), **_OF_MIXTURE),
    LinearKind("projections", r"mlp\.fc2_latent_proj", _whole("latent_up")),
    LinearKind("mlp", r"mlp\.shared_experts\.linear_fc1", _expert_fc1("shared"), **_OF_MIXTURE),
    LinearKind(
        "mlp", r"mlp\.shared_experts", _whole("shared_expert_gate"), **_OF_MIXTURE, weight="gate_weight"
    ),
    *_parts(
        "mamba",
        r"mixer\.in_proj",
        ("{path}.layer_norm_", "{layer}.norm."),
        {name: name for name in ("z", "x", "B", "C", "dt")},
    ),
    LinearKind("mamba", r"mixer\.out_proj", _whole("out"), ("{layer}.mixer.norm.",)),
    *_parts(
        "delta",
        r"self_attention\.in_proj",
        _BEFORE_ATTENTION,
        {
            "query": "delta_q",
            "key": "delta_k",
            "value": "delta_v",
            "z": "delta_z",
            "beta": "delta_b",
            "alpha": "delta_a",
        },
    ),
    LinearKind("projections", r"self_attention\.linear_proj", _whole("o")),
    LinearKind("projections", r"mlp\.linear_fc2", _whole("down")),
    LinearKind("projections", rf"{_ROUTED}linear_fc2", _whole("expert_down")),
    LinearKind("projections", r"mlp\.shared_experts\.linear_fc2", _whole("shared_down")),
)

NORMS = (
    NormKind("head", r"decoder\.final_(layer)?norm"),
    NormKind("mtp", r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)"),
    NormKind("delta", r".+\.self_attention\.out_norm", needs_sum=True),
)


def find_linears(keys: Iterable[str]) -> list[Site]:
    """The linears among a model's keys."""
    keys = list(keys)
    known, found = set(keys), []
    for key in keys:
        for kind in LINEARS:
            match = re.search(rf"\.{kind.suffix}\.{re.escape(kind.weight)}$", key)
            if match:
                path, layer = key.removesuffix(f".{kind.weight}"), key[: match.start()]
                if kind.on_latents not in (None, f"{layer}.mlp.{_TO_LATENTS}.weight" in known):
                    continue
                stems = [stem.format(path=path, layer=layer) for stem in kind.norms]
                norm = next((stem for stem in stems if f"{stem}weight" in known), None)
                if norm is not None or not kind.needs_norm:
                    found.append(Site(kind, path, norm or next(iter(stems), None)))
    return found


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
