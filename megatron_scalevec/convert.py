"""Door 3: give a built Megatron model its scale vectors.

The flag uses the same call at the end of ``GPTModel.__init__``, where every way of building a GPT passes:
``--spec``, MTP and several of Megatron's builders ignore or rewrite layer specs, so a changed spec would
reach only some of the layers.

The work is planned on the whole model first; only a plan without objections is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.fold import RowMap, fc1_row_map, qkv_row_map
from megatron_scalevec.layers.linear import ScaleVecColumnParallelLinear
from megatron_scalevec.vectors import VectorInfo, role_of, set_role

__all__ = ["apply_scale_vectors", "applied_config", "parameter_roles"]

_APPLIED_ATTRIBUTE = "scalevec_config"


@dataclass
class _Site:
    """An Input-Norm and the linear it feeds (None for the output head, which has one branch)."""

    name: str  # attention, mlp, head
    path: str
    layer: int | None
    norm: torch.nn.Module
    linear: ColumnParallelLinear | None = None
    row_map: Callable[[], RowMap] | None = None
    asked_for: bool = field(default=True)


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
    model computes the same function afterwards, except under strategy ``none`` on a model whose norms
    were trained, which is refused.

    Args:
        model: A ``GPTModel`` with layers of the local implementation.
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
    sites = list(_find_sites(model, config))
    for site in sites:
        if site.asked_for:
            _check_start(site, config)
    roles = _plan_roles(model, sites)
    for site in sites:
        if site.asked_for:
            _convert(site, config)
    for param, role in roles:
        if param.requires_grad:
            set_role(param, role)
    setattr(model, _APPLIED_ATTRIBUTE, config)


def _find_sites(model: GPTModel, config: ScaleVecConfig) -> Iterator[_Site]:
    for path, module in model.named_modules():
        if isinstance(module, TransformerLayer):
            yield from _layer_sites(path, module, config)
    norm = getattr(model.decoder, "final_layernorm", None)
    if norm is not None and not isinstance(norm, IdentityOp):
        _check_norm("decoder.final_layernorm", norm)
        yield _Site("head", "decoder.final_layernorm", None, norm, asked_for="head" in config.sites)


def _layer_sites(path: str, layer: TransformerLayer, config: ScaleVecConfig) -> Iterator[_Site]:
    if not isinstance(layer.cross_attention, IdentityOp):
        raise _cannot(f"{path}.cross_attention", layer.cross_attention, "no cross-attention")
    attention, mlp = layer.self_attention, layer.mlp
    # Subclasses compute something else from the same weights (latent attention, experts): only the
    # classes whose row layout is known are converted.
    if type(attention) is not SelfAttention:
        raise _cannot(f"{path}.self_attention", attention, "megatron.core's SelfAttention")
    if type(mlp) is not MLP:
        raise _cannot(f"{path}.mlp", mlp, "megatron.core's dense MLP")
    for name, norm in (
        ("input_layernorm", layer.input_layernorm),
        ("pre_mlp_layernorm", layer.pre_mlp_layernorm),
    ):
        _check_norm(f"{path}.{name}", norm)
    for name, linear in (
        ("self_attention.linear_qkv", attention.linear_qkv),
        ("mlp.linear_fc1", mlp.linear_fc1),
    ):
        if type(linear) is not ColumnParallelLinear:
            raise _cannot(
                f"{path}.{name}",
                linear,
                "megatron.core's ColumnParallelLinear (--transformer-impl local)",
            )
    c = layer.config

    def qkv() -> RowMap:
        group = attention.linear_qkv.tp_group
        return qkv_row_map(
            num_query_groups=c.num_query_groups,
            query_heads_per_group=c.num_attention_heads // c.num_query_groups,
            head_dim=c.kv_channels,
            tp_rank=group.rank(),
            tp_size=group.size(),
        )

    def fc1() -> RowMap:
        group = mlp.linear_fc1.tp_group
        gated = c.gated_linear_unit
        return fc1_row_map(
            ffn_hidden_size=mlp.linear_fc1.output_size // (2 if gated else 1),
            gated=gated,
            tp_rank=group.rank(),
            tp_size=group.size(),
        )

    number = layer.layer_number
    yield _Site(
        "attention",
        f"{path}.self_attention",
        number,
        layer.input_layernorm,
        attention.linear_qkv,
        qkv,
        "attention" in config.sites,
    )
    yield _Site(
        "mlp",
        f"{path}.mlp",
        number,
        layer.pre_mlp_layernorm,
        mlp.linear_fc1,
        fc1,
        "mlp" in config.sites,
    )


def _check_norm(path: str, norm: torch.nn.Module) -> None:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, torch.nn.Parameter) or weight.dim() != 1:
        raise _cannot(path, norm, "a norm with a one-dimensional weight")


def _cannot(path: str, module: torch.nn.Module, expected: str) -> ScaleVecError:
    return ScaleVecError(
        f"{path} is a {type(module).__module__}.{type(module).__name__}, where this version builds scale "
        f"vectors on {expected} only; nothing was changed. Run without --scalevec-strategy, or with a "
        "model of that kind."
    )


def _check_start(site: _Site, config: ScaleVecConfig) -> None:
    """Refuse a start that would silently change the function of a trained model."""
    weight = site.norm.weight
    if not config.removes_norm_scale or weight.is_meta:
        return
    carried = config.has_input_scales and site.linear is not None
    # The head has one branch: wherever scale vectors exist, its γ stays in the norm.
    stays = site.linear is None and config.placement is not None
    if not carried and not stays and not torch.all(weight.detach() == 1):
        raise ScaleVecError(
            f"the norm before {site.path} has a trained scale, which {config.strategy!r} would drop: "
            "start it from a model whose norms are at one, or use a strategy with input scales."
        )


def _convert(site: _Site, config: ScaleVecConfig) -> None:
    weight = site.norm.weight
    if site.linear is None:
        if config.placement is None:
            _retire(weight)
        else:
            set_role(weight, "input", VectorInfo(site.name, "logits", "in", None, "norm"))
        return
    if config.removes_norm_scale:
        initial = weight.detach().clone()
        _retire(weight)
    else:
        set_role(weight, "input", VectorInfo(site.name, "shared", "in", site.layer, "norm"))
        initial = None
    own_input_scales = initial is not None and config.has_input_scales
    if own_input_scales or config.has_output_scales:
        ScaleVecColumnParallelLinear.convert(
            site.linear,
            config,
            site.row_map(),
            site=site.name,
            layer=site.layer,
            initial_gamma_in=initial if own_input_scales else None,
        )


def _retire(weight: torch.nn.Parameter) -> None:
    """Freeze a norm's γ at one. It stays in place: kernels, checkpoints and exporters expect it."""
    if not weight.is_meta:
        with torch.no_grad():
            weight.fill_(1)
    weight.requires_grad_(False)


def _plan_roles(model: GPTModel, sites: list[_Site]) -> list[tuple[torch.nn.Parameter, str]]:
    """Roles of every 1-D parameter that the conversion itself does not mark.

    Raises:
        ScaleVecError: A trainable 1-D parameter is of no known kind, so whether it should decay is
            unknown.
    """
    plan: dict[int, tuple[torch.nn.Parameter, str]] = {}

    def mark(param: torch.nn.Parameter | None, role: str) -> None:
        if param is not None:
            plan[id(param)] = (param, role)

    converted = {id(site.norm.weight) for site in sites if site.asked_for}
    for site in sites:
        if not site.asked_for:
            mark(site.norm.weight, "stock")
        mark(getattr(site.norm, "bias", None), "bias")
    for module in model.modules():
        if isinstance(module, SelfAttention):
            for norm in (module.q_layernorm, module.k_layernorm):
                mark(getattr(norm, "weight", None), "output")
                mark(getattr(norm, "bias", None), "bias")
            mark(getattr(module.core_attention, "softmax_offset", None), "stock")
        elif isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
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
