"""Door 3: give a built Megatron model its scale vectors.

The flag uses the same call at the end of ``GPTModel.__init__``, where every way of building a GPT passes:
``--spec``, MTP and several of Megatron's builders ignore or rewrite layer specs, so a changed spec would
reach only some of the layers.

The work is planned on the whole model first; only a plan without objections is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map, whole_row_map
from megatron_scalevec.layers.attention import ScaleVecSelfAttention
from megatron_scalevec.layers.linear import SHARED, leaf_class, unsharded_sizes
from megatron_scalevec.layers.norm import NormHandle, head_norm, retire, scale_norm
from megatron_scalevec.pending import released
from megatron_scalevec.vectors import VectorInfo, role_of, set_role

__all__ = [
    "applied_config",
    "apply_scale_vectors",
    "branches_at",
    "parameter_roles",
    "refuse_unknown_branches",
]

_APPLIED_ATTRIBUTE = "scalevec_config"
_BORROWED_FLAG = "scalevec_set_qk_layernorm"


@dataclass
class _NormSite:
    """An Input-Norm that feeds one map, which keeps its scale: the final norm, the norms of MTP."""

    name: str
    branch: str
    layer: int | None
    path: str
    norm: NormHandle
    asked_for: bool


@dataclass
class _LinearSite:
    """A linear with its branches, and the Input-Norm that feeds it (None: none does)."""

    name: str
    path: str
    layer: int
    norm: NormHandle | None
    linear: torch.nn.Module
    channels: int
    row_map: Callable[[], RowMap]
    asked_for: bool
    attention: SelfAttention | None = None  # set where heads can be normalized


def applied_config(model: torch.nn.Module) -> ScaleVecConfig | None:
    """The configuration a model was given, None for a stock model. Sees through Megatron's wrappers."""
    while not hasattr(model, _APPLIED_ATTRIBUTE) and isinstance(
        getattr(model, "module", None), torch.nn.Module
    ):
        model = model.module
    return getattr(model, _APPLIED_ATTRIBUTE, None)


def apply_scale_vectors(model: torch.nn.Module, config: ScaleVecConfig) -> None:
    """Change a built ``GPTModel`` in place.

    Call it before the model is wrapped (``Float16Module``, DDP) and before the optimizer is built. The
    model computes the same function afterwards, except where a norm comes between (dual-norm).

    Args:
        model: A ``GPTModel`` with layers of the local or the TransformerEngine implementation.
        config: The strategy. ``stock`` changes nothing.

    Raises:
        ScaleVecError: Some part of the model cannot carry what was asked for. The model is unchanged.
    """
    if not config.active:
        return
    if not isinstance(model, GPTModel):
        raise ScaleVecError(
            f"scale vectors were asked for on a {type(model).__name__}; this version builds them on "
            "GPTModel, before it is wrapped for mixed precision or data parallelism."
        )
    known = applied_config(model)
    if known is not None:
        raise ScaleVecError(
            f"the model already carries scale vectors ({known.describe()}); apply a strategy once, to a "
            "stock model."
        )
    with released(model, config):
        _convert(model, config)


def _convert(model: GPTModel, config: ScaleVecConfig) -> None:
    if getattr(model.config, _BORROWED_FLAG, False):
        _without_borrowed_norms(model)
    refuse_unknown_branches(config, model.config)
    if config.weight_decay == "all" and _zero_centered(model.config):
        raise ScaleVecError(
            "--scalevec-weight-decay all would decay q/k norms, and this model stores γ − 1 (zero-centered "
            "gamma), so they would be pulled toward 1 instead of 0; use --scalevec-weight-decay split."
        )
    sites = list(_find_sites(model, config))
    for site in sites:
        if site.asked_for:
            _check_start(site, config, model.config)
    roles = _plan_roles(model, sites)
    for site in sites:
        if site.asked_for:
            if isinstance(site, _NormSite):
                _convert_norm_site(site, config, model.config)
            else:
                _convert_linear_site(site, config, model.config)
    for param, role in roles:
        if param.requires_grad and role_of(param) is None:
            set_role(param, role)
    setattr(model, _APPLIED_ATTRIBUTE, config)


def _without_borrowed_norms(model: GPTModel) -> None:
    """Take away the q/k norms that Megatron has built because an earlier model chunk set the flag for its
    own: the stock model has none."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.q_layernorm = module.k_layernorm = None


def refuse_unknown_branches(config: ScaleVecConfig, model_config) -> None:
    """Refuse to leave out branches that the model does not have at the sites that were asked for.

    Raises:
        ScaleVecError: One of ``branches_off`` is none of the model's.
    """
    known = [name for names in branches_at(config, model_config).values() for name in names]
    unknown = [name for name in config.branches_off if name not in known]
    if unknown:
        raise ScaleVecError(
            f"--scalevec-branches-off {','.join(unknown)}: this model has no such branch at the sites "
            f"{', '.join(config.sites)}; its branches there are {', '.join(known)}."
        )


def branches_at(config: ScaleVecConfig, model_config) -> dict[str, list[str]]:
    """Branches of a model's linears at the sites of a strategy, in the order of their rows."""
    attention = ["q", "k", "v"]
    if getattr(model_config, "attention_output_gate", False):
        attention.insert(1, "output_gate")
    branches = {
        "attention": attention,
        "mlp": ["gate", "up"] if model_config.gated_linear_unit else ["up"],
        "projections": ["o", "down"],
    }
    return {site: names for site, names in branches.items() if site in config.sites}


# --- finding ------------------------------------------------------------------------------------------


def _find_sites(model: GPTModel, config: ScaleVecConfig) -> Iterator[_NormSite | _LinearSite]:
    of_mtp: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, MultiTokenPredictionLayer):
            of_mtp.update(id(inner) for inner in module.modules())
            for name in ("enorm", "hnorm", "final_layernorm"):
                norm = getattr(module, name, None)
                if norm is not None and not isinstance(norm, IdentityOp):
                    number = model.config.num_layers + module.layer_number
                    handle = _norm_handle(f"{path}.{name}", norm)
                    yield _NormSite("mtp", name, number, f"{path}.{name}", handle, "mtp" in config.sites)
        elif isinstance(module, TransformerLayer):
            # Layers inside the MTP block count from 1 again; here they follow the decoder's.
            offset = model.config.num_layers if id(module) in of_mtp else 0
            number = module.layer_number
            if offset and number > offset:  # some versions have added the offset themselves
                offset = 0
            yield from _layer_sites(path, module, number + offset, config)
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is not None and not isinstance(norm, IdentityOp):
        path = "decoder.final_layernorm"
        handle = _norm_handle(path, norm)
        yield _NormSite("head", "logits", None, path, handle, "head" in config.sites)


def _layer_sites(
    path: str, layer: TransformerLayer, number: int, config: ScaleVecConfig
) -> Iterator[_LinearSite]:
    if not isinstance(layer.cross_attention, IdentityOp):
        raise _cannot(f"{path}.cross_attention", layer.cross_attention, "no cross-attention")
    attention, mlp = layer.self_attention, layer.mlp
    # Subclasses compute something else from the same weights (latent attention, experts): only the
    # classes whose row layout is known are converted.
    if type(attention) is not SelfAttention:
        raise _cannot(f"{path}.self_attention", attention, "megatron.core's SelfAttention")
    if type(mlp) is not MLP:
        raise _cannot(f"{path}.mlp", mlp, "megatron.core's dense MLP")
    for name, linear, parallel in (
        ("self_attention.linear_qkv", attention.linear_qkv, "column"),
        ("self_attention.linear_proj", attention.linear_proj, "row"),
        ("mlp.linear_fc1", mlp.linear_fc1, "column"),
        ("mlp.linear_fc2", mlp.linear_fc2, "row"),
    ):
        leaf = leaf_class(linear)
        if leaf is None or leaf.parallel != parallel:
            raise _cannot(f"{path}.{name}", linear, _LINEARS[parallel])
    attention_norm = _norm_handle(f"{path}.input_layernorm", layer.input_layernorm, attention.linear_qkv)
    mlp_norm = _norm_handle(f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm, mlp.linear_fc1)
    c = layer.config

    def group_of(linear):
        return leaf_class(linear).group_of(linear)

    def qkv() -> RowMap:
        group = group_of(attention.linear_qkv)
        return qkv_row_map(
            num_query_groups=c.num_query_groups,
            query_heads_per_group=c.num_attention_heads // c.num_query_groups,
            head_dim=c.kv_channels,
            tp_rank=group.rank(),
            tp_size=group.size(),
            output_gate=bool(getattr(c, "attention_output_gate", False)),
        )

    def fc1() -> RowMap:
        group = group_of(mlp.linear_fc1)
        gated = c.gated_linear_unit
        return fc1_row_map(
            ffn_hidden_size=unsharded_sizes(mlp.linear_fc1)[0] // (2 if gated else 1),
            gated=gated,
            tp_rank=group.rank(),
            tp_size=group.size(),
        )

    yield _LinearSite(
        "attention",
        f"{path}.self_attention",
        number,
        attention_norm,
        attention.linear_qkv,
        unsharded_sizes(attention.linear_qkv)[1],
        qkv,
        "attention" in config.sites,
        attention,
    )
    yield _LinearSite(
        "mlp",
        f"{path}.mlp",
        number,
        mlp_norm,
        mlp.linear_fc1,
        unsharded_sizes(mlp.linear_fc1)[1],
        fc1,
        "mlp" in config.sites,
    )
    for branch, linear in (("o", attention.linear_proj), ("down", mlp.linear_fc2)):
        rows, columns = unsharded_sizes(linear)
        yield _LinearSite(
            "projections",
            f"{path}.{branch}",
            number,
            None,
            linear,
            columns,
            lambda branch=branch, rows=rows: whole_row_map(branch, rows),
            "projections" in config.sites,
        )


_LINEARS = {
    parallel: f"megatron.core's {' or '.join(names)} (--transformer-impl local or transformer_engine)"
    for parallel, names in {
        "column": ("ColumnParallelLinear", "TELayerNormColumnParallelLinear", "TEColumnParallelLinear"),
        "row": ("RowParallelLinear", "TERowParallelLinear"),
    }.items()
}


def _norm_handle(path: str, norm: torch.nn.Module, linear: torch.nn.Module | None = None) -> NormHandle:
    """The norm in Megatron's slot for it, or the one fused into the linear that it feeds."""
    prefix = leaf_class(linear).fused_norm if linear is not None else ""
    if prefix and not isinstance(norm, IdentityOp):
        raise _cannot(path, norm, "no norm before a linear that has one of its own")
    handle = NormHandle(linear, prefix) if prefix else NormHandle(norm)
    weight = getattr(handle.owner, f"{prefix}weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        raise _cannot(path, handle.owner, "a norm with a one-dimensional weight")
    return handle


def _cannot(path: str, module: torch.nn.Module, expected: str) -> ScaleVecError:
    return ScaleVecError(
        f"{path} is a {type(module).__module__}.{type(module).__name__}, where this version builds scale "
        f"vectors on {expected} only; nothing was changed. Run without --scalevec-strategy, or with a "
        "model of that kind."
    )


def _check_start(site: _NormSite | _LinearSite, config: ScaleVecConfig, model_config) -> None:
    """Refuse what cannot carry vectors, and a start that would change the function of a trained model."""
    if isinstance(site, _LinearSite):
        leaf_class(site.linear).require_convertible(site.path, site.linear)
    if site.norm is None or site.norm.weight.is_meta:
        return
    scale, bias = _scale_of(site.norm, model_config), site.norm.bias
    if torch.all(scale == 1):
        return
    own_linear = isinstance(site, _LinearSite)
    if not (config.has_input_scales if own_linear else config.placement is not None):
        raise ScaleVecError(
            f"the norm before {site.path} has a trained scale, which {config.strategy!r} would drop: start "
            "it from a model whose norms are at one, or use a strategy with input scales."
        )
    off = set(config.branches_off) & set(site.row_map().branches) if own_linear else set()
    if off:
        raise ScaleVecError(
            f"the norm before {site.path} has a trained scale, which --scalevec-branches-off "
            f"{','.join(sorted(off))} would drop for those branches: start from a model whose norms are at "
            "one, or leave the branches on."
        )
    if bias is not None and bool(((scale == 0) & (bias.detach() != 0)).any()):
        raise ScaleVecError(
            f"the norm before {site.path} has a trained bias on a channel whose scale is zero, which cannot "
            "be kept: the bias is scaled together with the norm's output from now on."
        )


# --- converting ---------------------------------------------------------------------------------------


def _zero_centered(model_config) -> bool:
    return bool(getattr(model_config, "layernorm_zero_centered_gamma", False))


def _scale_of(norm: NormHandle, model_config) -> torch.Tensor:
    """γ as it acts, whatever is stored."""
    weight = norm.weight.detach()
    return weight + 1 if _zero_centered(model_config) else weight.clone()


def _dtype(config: ScaleVecConfig) -> torch.dtype | None:
    return torch.float32 if config.vector_dtype == "fp32" else None


def _convert_norm_site(site: _NormSite, config: ScaleVecConfig, model_config) -> None:
    if config.placement is None:
        retire(site.norm, _zero_centered(model_config))
        return
    # The one map that it feeds needs no scale of its own, so the scale stays at the norm.
    _own_or_kept(
        site.norm.owner,
        VectorInfo(site.name, site.branch, "in", site.layer, "norm", config.reparam),
        "input",
        config,
        model_config,
    )


def _own_or_kept(norm, info: VectorInfo, role, config: ScaleVecConfig, model_config, tp_group=None):
    """Keep a norm's own parameter as the scale vector where it is one as it stands.

    It is not where the vector is stored in another form or dtype, where Megatron stores γ − 1 and decay
    would pull γ toward one, or where its gradient needs a sum that Megatron does not make.
    """
    decays_off_centre = _zero_centered(model_config) and role == "input"
    if config.plain and not decays_off_centre and tp_group is None:
        set_role(norm.weight, role, info)
        return
    scale_norm(
        norm,
        info,
        role,
        zero_centered=_zero_centered(model_config),
        dtype=_dtype(config),
        tp_group=tp_group,
    )


def _convert_linear_site(site: _LinearSite, config: ScaleVecConfig, model_config) -> None:
    row_map = site.row_map()
    on = [branch for branch in row_map.branches if branch not in config.branches_off]
    initial = torch.ones(site.channels)
    in_branches: list[str] = []
    if site.norm is None:
        in_branches = on if config.has_input_scales else []
    elif config.removes_norm_scale:
        initial = _scale_of(site.norm, model_config)
        retire(site.norm, _zero_centered(model_config))
        if config.has_input_scales:
            in_branches = [SHARED] if config.branches == "shared" else on
    else:
        info = VectorInfo(site.name, SHARED, "in", site.layer, "norm", config.reparam)
        if _zero_centered(model_config):
            # Stored as γ − 1 it would decay toward one; on the linear it is γ itself.
            initial = _scale_of(site.norm, model_config)
            retire(site.norm, True)
            in_branches = [SHARED]
        else:
            set_role(site.norm.weight, "input", info)
    out_branches = on if config.has_output_scales else []
    if config.placement == "dual-norm" and site.attention is not None:
        normalized = [branch for branch in ("q", "k", "v") if branch in on]
        _normalize_heads(site, normalized, config, model_config)
        out_branches = [branch for branch in out_branches if branch not in normalized]
    if in_branches or out_branches:
        leaf_class(site.linear).convert(
            site.linear,
            row_map,
            site=site.name,
            layer=site.layer,
            in_branches=in_branches,
            out_branches=out_branches,
            initial_gamma_in=initial,
            reparam=config.reparam,
            dtype=_dtype(config),
        )


def _normalize_heads(site: _LinearSite, branches: list[str], config: ScaleVecConfig, model_config) -> None:
    """Dual-norm: a norm over each head's channels of q, k and v, with γ_out behind it, before RoPE."""
    attention = site.attention
    for branch in branches:
        info = VectorInfo(site.name, branch, "out", site.layer, "norm", config.reparam)
        if branch == "v":
            norm = head_norm(site.norm, model_config, bias=False)
            attention.v_layernorm = norm
            attention.__class__ = ScaleVecSelfAttention
            linear = attention.linear_qkv
            role, group = config.decay_v_norm, leaf_class(linear).group_of(linear)
        else:
            slot = f"{branch}_layernorm"
            norm = getattr(attention, slot, None)
            # A model with q/k norms keeps them: one norm, not two.
            if norm is None or isinstance(norm, IdentityOp):
                norm = head_norm(site.norm, model_config, bias=True)
                setattr(attention, slot, norm)
            for name, param in norm.named_parameters(recurse=False):
                if name == "bias":
                    set_role(param, "bias")
            # Megatron sums the gradients of q/k norms by name where this is set.
            if not model_config.qk_layernorm:
                model_config.qk_layernorm = True
                setattr(model_config, _BORROWED_FLAG, True)
            role, group = "output", None
        _own_or_kept(norm, info, role, config, model_config, group)


# --- roles --------------------------------------------------------------------------------------------


def _plan_roles(model: GPTModel, sites) -> list[tuple[torch.nn.Parameter, str]]:
    """Roles of every 1-D parameter that the conversion itself does not mark.

    Raises:
        ScaleVecError: A trainable 1-D parameter is of no known kind, so whether it should decay is
            unknown.
    """
    plan: dict[int, tuple[torch.nn.Parameter, str]] = {}

    def mark(param: torch.nn.Parameter | None, role: str) -> None:
        # TransformerEngine has an empty plain tensor where a linear has no bias.
        if isinstance(param, torch.nn.Parameter):
            plan[id(param)] = (param, role)

    converted: set[int] = set()
    for site in sites:
        if site.norm is not None:
            mark(site.norm.bias, "bias")
            if site.asked_for:
                converted.add(id(site.norm.weight))
            else:
                mark(site.norm.weight, "stock")
    for module in model.modules():
        if isinstance(module, SelfAttention):
            for norm in (module.q_layernorm, module.k_layernorm):
                mark(getattr(norm, "weight", None), "output")
                mark(getattr(norm, "bias", None), "bias")
            mark(getattr(module.core_attention, "softmax_offset", None), "stock")
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)) or leaf_class(module):
            mark(module.bias, "bias")
    for name, param in model.named_parameters():
        if param.dim() != 1 or not param.requires_grad:
            continue
        if id(param) not in plan and id(param) not in converted:
            raise ScaleVecError(
                f"{name} {tuple(param.shape)} is a one-dimensional parameter of a kind this version does "
                "not know, so it cannot say whether weight decay belongs on it; nothing was changed."
            )
    return list(plan.values())


def parameter_roles(model: torch.nn.Module) -> dict[str, str]:
    """Names and roles of the model's trainable 1-D parameters, for the audit and tests.

    Raises:
        ScaleVecError: One of them has no role.
    """
    roles = {}
    for name, param in model.named_parameters():
        if param.dim() == 1 and param.requires_grad:
            role = role_of(param)
            if role is None:
                raise ScaleVecError(
                    f"{name} {tuple(param.shape)} was added after the scale vectors were and has no "
                    "weight-decay role; apply scale vectors last."
                )
            roles[name] = role
    return roles
