"""Door 3: give a built Megatron model its scale vectors.

The flag uses the same call at the end of ``GPTModel.__init__``, where every way of building a GPT passes:
``--spec``, MTP and several of Megatron's builders ignore or rewrite layer specs, so a changed spec would
reach only some of the layers.

The work is planned on the whole model first; only a plan without objections is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp

from megatron_scalevec.checkpoint.guard import protect
from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.convert.branches import branches_at, refuse_without_effect
from megatron_scalevec.convert.hybrid import is_supported, remember_layers
from megatron_scalevec.convert.latent import complete_rope_keys
from megatron_scalevec.convert.roles import parameter_roles, plan_roles
from megatron_scalevec.convert.site import LinearSite, NormSite
from megatron_scalevec.convert.sites import find_sites
from megatron_scalevec.decisions import SHARED, norm_keeps_scale, plan_linear
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.folds import folds_of, require_an_engine
from megatron_scalevec.layers.attention import ScaleVecSelfAttention
from megatron_scalevec.layers.linear import leaf_class, scale_of_all_channels
from megatron_scalevec.layers.norm import NormHandle, head_norm, retire, scale_norm
from megatron_scalevec.pending import released
from megatron_scalevec.support import refuse_unsupported_experts
from megatron_scalevec.vectors import VectorInfo, has_vector, role_of, set_role
from megatron_scalevec.versions import megatron_version

__all__ = [
    "applied_config",
    "apply_scale_vectors",
    "branches_at",
    "forget",
    "parameter_roles",
]

_APPLIED_ATTRIBUTE = "scalevec_config"
_BORROWED_FLAG = "scalevec_set_qk_layernorm"


def applied_config(model: torch.nn.Module) -> ScaleVecConfig | None:
    """The configuration a model was given, None for a stock model. Sees through Megatron's wrappers."""
    while not hasattr(model, _APPLIED_ATTRIBUTE) and isinstance(
        getattr(model, "module", None), torch.nn.Module
    ):
        model = model.module
    return getattr(model, _APPLIED_ATTRIBUTE, None)


def forget(model: torch.nn.Module) -> None:
    """For whoever has taken the vectors out of a model again: it is a stock model now."""
    delattr(model, _APPLIED_ATTRIBUTE)


def apply_scale_vectors(model: torch.nn.Module, config: ScaleVecConfig) -> None:
    """Change a built ``GPTModel`` in place.

    Call it before the model is wrapped (``Float16Module``, DDP) and before the optimizer is built. The
    model computes the same function afterwards, except where a norm comes between (dual-norm).

    Args:
        model: A ``GPTModel`` or, from 0.18 on, ``HybridModel``, its layers of the local or the
            TransformerEngine implementation.
        config: The strategy. ``stock`` changes nothing.

    Raises:
        ScaleVecError: Some part of the model cannot carry what was asked for. The model is unchanged.
    """
    if not config.active:
        return
    if not is_supported(model):
        raise ScaleVecError(
            f"scale vectors were asked for on a {type(model).__name__}; this version builds them on "
            "GPTModel and on hybrid models of megatron-core 0.18 and later, before it is wrapped for mixed "
            "precision or data parallelism."
        )
    known = applied_config(model)
    if known is not None:
        raise ScaleVecError(
            f"the model already carries scale vectors ({known.describe()}); apply a strategy once, to a "
            "stock model."
        )
    with released(model, config):
        _convert(model, config)


def _convert(model: LanguageModule, config: ScaleVecConfig) -> None:
    if getattr(model.config, _BORROWED_FLAG, False):
        _without_borrowed_norms(model)
    remember_layers(model)
    refuse_without_effect(config, model.config)
    refuse_unsupported_experts(model.config, config, megatron_version())
    if config.weight_decay == "all" and _zero_centered(model.config):
        raise ScaleVecError(
            "--scalevec-weight-decay all would decay q/k norms, and this model stores γ − 1 (zero-centered "
            "gamma), so they would be pulled toward 1 instead of 0; use --scalevec-weight-decay split."
        )
    sites = list(find_sites(model, config))
    for site in sites:
        if site.asked_for:
            _check_start(site, config, model.config)
    roles = plan_roles(model, sites)
    # Before anything is retired: a norm may feed several linears.
    scales = {
        id(site.norm.weight): scale_of_all_channels(
            site.linear, _scale_of(site.norm, model.config), site.channels
        )
        for site in sites
        if isinstance(site, LinearSite) and site.asked_for and site.norm is not None
    }
    for site in sites:
        if site.asked_for:
            if isinstance(site, NormSite):
                _convert_norm_site(site, config, model.config)
            else:
                scale = None if site.norm is None else scales[id(site.norm.weight)]
                _convert_linear_site(site, scale, config, model.config)
    complete_rope_keys(model)
    for param, role in roles:
        if param.requires_grad and role_of(param) is None:
            set_role(param, role)
    protect(model)
    setattr(model, _APPLIED_ATTRIBUTE, config)
    if any(folds_of(model)):
        require_an_engine(model)


def _without_borrowed_norms(model: LanguageModule) -> None:
    """Take away the q/k norms that Megatron has built because an earlier model chunk set the flag for its
    own: the stock model has none."""
    for module in model.modules():
        if isinstance(module, SelfAttention):
            module.q_layernorm = module.k_layernorm = None


def _check_start(site: NormSite | LinearSite, config: ScaleVecConfig, model_config) -> None:
    """Refuse what cannot carry vectors, and a start that would change the function of a trained model."""
    if isinstance(site, LinearSite):
        site.check()
    if site.norm is None or site.norm.weight.is_meta:
        return
    scale, bias = _scale_of(site.norm, model_config), site.norm.bias
    if torch.all(scale == 1):
        return
    own_linear = isinstance(site, LinearSite)
    if not (config.has_input_scales if own_linear else config.placement is not None):
        raise ScaleVecError(
            f"the norm before {site.path} has a trained scale, which {config.strategy!r} would drop: start "
            "it from a model whose norms are at one, or use a strategy with input scales."
        )
    off = set(config.branches_off) & set(site.branches()) if own_linear else set()
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


def _zero_centered(model_config) -> bool:
    return bool(getattr(model_config, "layernorm_zero_centered_gamma", False))


def _scale_of(norm: NormHandle, model_config) -> torch.Tensor:
    """γ as it acts, whatever is stored."""
    weight = norm.weight.detach()
    return weight + 1 if _zero_centered(model_config) else weight.clone()


def _dtype(config: ScaleVecConfig) -> torch.dtype | None:
    return torch.float32 if config.vector_dtype == "fp32" else None


def _convert_norm_site(site: NormSite, config: ScaleVecConfig, model_config) -> None:
    if config.placement is None:
        retire(site.norm, _zero_centered(model_config))
        return
    # The one map that it feeds needs no scale of its own, so the scale stays at the norm.
    _own_or_kept(
        site.norm,
        VectorInfo(site.name, site.branch, "in", site.layer, "norm", config.reparam),
        "input",
        config,
        model_config,
        site.tp_group,
    )


def _own_or_kept(
    norm: NormHandle, info: VectorInfo, role, config: ScaleVecConfig, model_config, tp_group=None
):
    """Keep a norm's own parameter as the scale vector, or move its scale into a vector of ours."""
    zero_centered = _zero_centered(model_config)
    if norm_keeps_scale(config, role=role, zero_centered=zero_centered, needs_sum=tp_group is not None):
        set_role(norm.weight, role, info)
        return
    scale_norm(
        norm.owner,
        info,
        role,
        zero_centered=zero_centered,
        dtype=_dtype(config),
        tp_group=tp_group,
    )


def _convert_linear_site(
    site: LinearSite, scale: torch.Tensor | None, config: ScaleVecConfig, model_config
) -> None:
    """``scale``: γ of the norm that feeds the linear, as it was before the conversion."""
    plan = plan_linear(
        config,
        site.branches(),
        fed_by_norm=site.norm is not None,
        zero_centered=_zero_centered(model_config),
        has_heads=site.attention is not None,
        norm_feeds_others=site.norm_feeds_others,
        norm_fits=site.norm_keeps_scale,
    )
    initial = torch.ones(site.channels)
    if plan.retires_norm:
        initial = scale
        retire(site.norm, _zero_centered(model_config))
    elif site.norm is not None and not has_vector(site.norm.owner, "gamma"):
        # Not made yet for an earlier one of several linears.
        info = VectorInfo(site.name, SHARED, "in", site.layer, "norm", config.reparam)
        _own_or_kept(site.norm, info, "input", config, model_config)
    if plan.normalized:
        _normalize_heads(site, plan.normalized, config, model_config)
    if plan.has_vectors:
        site.convert(
            in_branches=plan.in_branches,
            out_branches=plan.out_branches,
            initial_gamma_in=initial,
            reparam=config.reparam,
            dtype=_dtype(config),
            in_optimizer=config.execution == "optimizer",
        )
    if plan.retires_norm:
        site.remember_norm()


def _normalize_heads(site: LinearSite, branches: Sequence[str], config: ScaleVecConfig, model_config) -> None:
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
        _own_or_kept(NormHandle(norm), info, role, config, model_config, group)
