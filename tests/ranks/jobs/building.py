"""Models built and converted, through specs and by call."""

from __future__ import annotations

from typing import Any

import torch

from ranks.initial import fill_by_name
from ranks.jobs.comparing import _difference
from ranks.jobs.training import _start_of

__all__ = [
    "build_from_spec",
    "convert_refused",
    "convert_trained",
    "dtypes",
    "fold_by_hand",
    "latent_refused",
    "linear_in_bfloat16",
    "start_from_stock",
]


def build_from_spec(case: str) -> dict[str, Any]:
    """Build models from specs with megatron.core alone."""
    import copy

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from megatron_scalevec.specs import scalevec_layer_spec, spec_config
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    config = ScaleVecConfig(strategy="unified")
    base = get_gpt_layer_local_spec(normalization="RMSNorm")
    before = repr(base)
    norm = base.submodules.input_layernorm
    block = TransformerBlockSubmodules(layer_specs=[base, base], layer_norm=norm)
    mtp = {"mtp_num_layers": 1} if case == "mtp" else {}
    try:
        spec = {
            "block": lambda: scalevec_layer_spec(block, config),
            "module-block": lambda: scalevec_layer_spec(
                ModuleSpec(TransformerBlock, submodules=block), config
            ),
            "builder": lambda: scalevec_layer_spec(lambda model_config: block, config)(None),
            "copy": lambda: copy.deepcopy(scalevec_layer_spec(base, config)),
            "by-path": lambda: scalevec_layer_spec(
                ModuleSpec(
                    ("megatron.core.transformer.transformer_layer", "TransformerLayer"),
                    submodules=base.submodules,
                ),
                config,
            ),
            "norm": lambda: scalevec_layer_spec(norm, config),
            "linear": lambda: scalevec_layer_spec(ModuleSpec(torch.nn.Linear), config),
            "no-attention": lambda: scalevec_layer_spec(
                ModuleSpec(TransformerLayer, submodules=type(base.submodules)()), config
            ),
            "string": lambda: scalevec_layer_spec(base, "hg"),
            "twice": lambda: scalevec_layer_spec(
                scalevec_layer_spec(block, config), ScaleVecConfig(strategy="hg")
            ),
            "named": lambda: __import__("megatron_scalevec.specs", fromlist=["hg"]).hg,
            "stock": lambda: scalevec_layer_spec(base, ScaleVecConfig()),
        }.get(case, lambda: scalevec_layer_spec(scalevec_layer_spec(base, config), config))()
        if case == "by-path":  # TransformerBlock itself wants the class
            spec.module = TransformerLayer
        if case == "outside":
            from megatron.core.transformer.spec_utils import build_module

            layer = build_module(spec, config=build_gpt("llama").config, layer_number=1)
            layer(torch.zeros(4, 1, 32), attention_mask=None)
        torch.manual_seed(7)
        model = build_gpt("llama", torch.float32, spec=spec, **mtp)
        if case == "differs":
            apply_scale_vectors(model, ScaleVecConfig(strategy="hg"))
        torch.manual_seed(7)
        other = build_gpt("llama", torch.float32, spec=base, **mtp)
        if case != "stock":
            apply_scale_vectors(other, config)
    except ScaleVecError as error:
        return {"error": str(error)}
    return {
        "error": None,
        "asks": repr(spec_config(spec)),
        "base_unchanged": repr(base) == before,
        "same": _start_of([model]) == _start_of([other]),
        "audit": audit(model).table() if case != "stock" else None,
    }


def _state(model: torch.nn.Module):
    """What an observer sees of a model: classes, parameters, whether they train, attributes."""
    return (
        [(name, type(module)) for name, module in model.named_modules()],
        {
            name: (p.detach().clone(), p.requires_grad, sorted(vars(p)))
            for name, p in model.named_parameters()
        },
    )


def _same(a, b) -> bool:
    return (
        a[0] == b[0]
        and a[1].keys() == b[1].keys()
        and all(torch.equal(a[1][k][0], b[1][k][0]) and a[1][k][1:] == b[1][k][1:] for k in a[1])
    )


def convert_trained(config: dict[str, Any], kind: str = "llama") -> dict[str, Any]:
    """Convert a model whose norms have moved away from one."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import SIZES, build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt(kind)
    fill_by_name(model, 0, 1)
    tokens = torch.arange(SIZES["sequence"])[None]

    def logits():
        return model(tokens, tokens, None).detach()

    before, state = logits(), _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(**config))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    norms = [m for n, m in model.named_modules() if n.endswith(("input_layernorm", "mlp_layernorm"))]
    return {
        "difference": _difference(logits(), before),
        "norms": {float(value) for norm in norms for value in norm.weight},
    }


def start_from_stock(configs: list[dict[str, Any]], kind: str, **sizes: int) -> list[float]:
    """Load a stock model's trained weights into a converted one, as ``--finetune`` does.

    Args:
        configs: Strategies, each for a model of its own.
        kind: Of model, as of the jobs that store them.
        sizes: Megatron's parallel sizes.

    Returns:
        For each configuration the relative difference of the logits.
    """
    from megatron.core import parallel_state

    from ranks.jobs.storing import _build
    from ranks.models import SIZES, initialize_parallel

    initialize_parallel(**sizes)
    tokens = torch.arange(SIZES["sequence"])[None]
    stock, _ = _build(kind, None, "float64", sizes)
    tensor = parallel_state.get_tensor_model_parallel_rank(), sizes.get("tensor_model_parallel_size", 1)
    fill_by_name(stock, *tensor)
    expected, state = stock(tokens, tokens, None).detach(), stock.state_dict()
    differences = []
    for config in configs:
        model, _ = _build(kind, config, "float64", sizes)
        model.scalevec_starts_from_stock = True
        model.load_state_dict(state, strict=False)
        differences.append(_difference(model(tokens, tokens, None).detach(), expected))
    return differences


def convert_refused(case: str, config: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask for the impossible and look at the model afterwards."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", layernorm_zero_centered_gamma=case == "zero-centered")
    last = model.decoder.layers[-1]
    if case == "twice":
        apply_scale_vectors(model, ScaleVecConfig(strategy="dp"))
    elif case == "wrapped":

        class Wrapper(torch.nn.Module):
            def __init__(self, module):
                super().__init__()
                self.module = module

        model = Wrapper(model)
    elif case == "linear":
        last.mlp.linear_fc1.__class__ = type("Other", (type(last.mlp.linear_fc1),), {})
    elif case == "attention":
        last.self_attention.__class__ = type("Latent", (type(last.self_attention),), {})
    elif case == "unknown-vector":
        model.decoder.extra = torch.nn.Parameter(torch.ones(3))
    state = _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(**(config or {"strategy": "hg"})))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    return {"error": "", "unchanged": False}


def latent_refused(case: str) -> dict[str, Any]:
    """As :func:`convert_refused`, on a model with latent attention."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("mla")
    attention = model.decoder.layers[-1].self_attention
    if case == "cached latents":
        attention.config.cache_mla_latents = True
    elif case == "subclass":
        attention.__class__ = type("Other", (type(attention),), {})
    else:
        linear = attention.linear_kv_down_proj
        linear.__class__ = type("Other", (type(linear),), {})
    state = _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(strategy="hg"))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    return {"error": "", "unchanged": False}


def linear_in_bfloat16(reparam: str) -> dict[str, float]:
    """One converted linear in bf16 against the same computation in plain torch.

    Returns:
        The largest difference of the output and of each gradient, in units in the last place (bf16).
    """
    from reference import product, unit

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", torch.bfloat16)
    config = ScaleVecConfig(strategy="hg", placement="dual", reparam=reparam)
    apply_scale_vectors(model, config)
    fill_by_name(model, 0, 1)
    linear = model.decoder.layers[0].mlp.linear_fc1
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(24, 2, linear.input_size, generator=draw).bfloat16().requires_grad_()
    out, _ = linear(x)
    grad = torch.randn(out.shape, generator=draw).bfloat16()
    out.backward(grad)

    wide = {n: p.detach().double().requires_grad_() for n, p in linear.named_parameters()}

    def vector(name):
        if reparam == "none":
            return wide[name]
        if reparam == "product":
            return product(wide[f"{name}_beta"], wide[f"{name}_alpha"])
        return unit(wide[f"{name}_magnitude"], wide[f"{name}_direction"])

    halves = wide["weight"].chunk(2)
    w_eff = torch.cat(
        [
            half * vector(f"gamma_in_{branch}") * vector(f"gamma_out_{branch}")[:, None]
            for half, branch in zip(halves, ("gate", "up"))
        ]
    )
    plain_x = x.detach().clone().requires_grad_()
    plain_w = w_eff.detach().bfloat16().requires_grad_()
    expected = torch.nn.functional.linear(plain_x, plain_w)
    expected.backward(grad)
    w_eff.backward(plain_w.grad.double())
    found = {"output": _ulps(out, expected), "input": _ulps(x.grad, plain_x.grad)}
    for name, parameter in linear.named_parameters():
        found[name] = _ulps(parameter.grad, wide[name].grad)
    return found


def _ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest distance, in bf16 units of each entry; entries near zero in units of the largest's 2^-8."""
    a, b = a.detach().double(), b.detach().double()
    exponent = torch.floor(torch.log2(b.abs().clamp_min(b.abs().max() * 2.0**-8)))
    return float(((a - b).abs() / 2.0 ** (exponent - 7)).max())


def _converted(config: dict[str, Any], dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.models import build_gpt, initialize_parallel

    initialize_parallel()
    model = build_gpt("llama", dtype)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    return model


def fold_by_hand(config: dict[str, Any], overrides: dict[str, Any], drop: bool = False) -> float:
    """Copy W_eff and the remaining norm scales into a stock model; the difference of the logits.

    Args:
        config: The strategy.
        overrides: Of Megatron's configuration.
        drop: Copy W instead, as somebody would who forgets the vectors.
    """
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.layers.linear import FoldedLinear
    from megatron_scalevec.layers.norm import ScaledNorm
    from megatron_scalevec.vectors import compose_vector
    from ranks.models import SIZES, build_gpt, initialize_parallel

    initialize_parallel()
    stock, model = build_gpt("llama", **overrides), build_gpt("llama", **overrides)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    fill_by_name(model, 0, 1)
    with torch.no_grad():
        theirs = dict(stock.named_modules())
        for name, module in model.named_modules():
            other = theirs[name]
            for key, param in module.named_parameters(recurse=False):
                if hasattr(other, key):
                    getattr(other, key).copy_(param)
            if isinstance(module, FoldedLinear) and not drop:
                other.weight.copy_(module.folded_weight())
            elif isinstance(module, ScaledNorm):
                gamma = compose_vector(module, "gamma")
                zero_centered = model.config.layernorm_zero_centered_gamma
                other.weight.copy_(gamma - 1 if zero_centered else gamma)
                if getattr(other, "bias", None) is not None:
                    other.bias.copy_(gamma * module.bias)
        tokens = torch.arange(SIZES["sequence"])[None]
        return _difference(model(tokens, tokens, None), stock(tokens, tokens, None))


def dtypes(config: dict[str, Any]) -> set[str]:
    """Dtypes of all scale vectors of a float32 model that Megatron has cast to bf16."""
    from megatron_scalevec.vectors import vector_info

    model = _converted(config, torch.float32).bfloat16()
    vectors = [param for param in model.parameters() if vector_info(param) is not None]
    assert vectors and next(model.decoder.layers[0].mlp.parameters()).dtype is torch.bfloat16
    return {str(param.dtype).removeprefix("torch.") for param in vectors}
