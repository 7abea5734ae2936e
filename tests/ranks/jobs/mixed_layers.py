"""Hybrid and heterogeneous models, and models of kinds that are refused."""

from __future__ import annotations

import re
from typing import Any

import torch

from ranks.initial import fill_by_name
from ranks.jobs.building import _same, _state
from ranks.jobs.comparing import _difference

__all__ = ["delta_by_definition", "mamba_by_definition", "mixed_refused", "other_model"]


def mamba_by_definition(configs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Two Mamba layers against stock ones whose weights are scaled row by row in plain torch.

    Returns:
        For each configuration the largest relative differences: ``start`` (logits before conversion against
        those after), ``logits``, and ``gradient`` over all trainable parameters.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_compare_mamba(config) for config in configs]


def _compare_mamba(config: dict[str, Any]) -> dict[str, float]:
    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.hybrids import build_hybrid
    from ranks.models import SIZES

    stock, model = build_hybrid("MM"), build_hybrid("MM")
    tokens = torch.arange(SIZES["sequence"])[None]

    def run(of, *parameters):
        if parameters:
            return torch.func.functional_call(of, parameters[0], (tokens, tokens, None))
        return of(tokens, tokens, None)

    before = run(model).detach()
    apply_scale_vectors(model, ScaleVecConfig(**config))
    result = {"start": _difference(run(model).detach(), before)}
    fill_by_name(model, 0, 1)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def vector(name):
        return _vector(leaves, name)

    composed = {}
    for name, param in stock.named_parameters():
        if re.search(r"mixer\.(conv1d|dt_bias|A_log|D)", name):
            # Megatron reads these through references of its own, which nobody can redirect.
            with torch.no_grad():
                param.copy_(leaves[name])
            leaves[name] = param
        else:
            composed[name] = leaves[name]
    mixer = stock.decoder.layers[0].mixer
    inner, of_groups = mixer.d_inner, mixer.ngroups * mixer.d_state
    rows = {
        "in_proj": {"z": inner, "x": inner, "B": of_groups, "C": of_groups, "dt": mixer.nheads},
        "out_proj": {"out": SIZES["hidden"]},
    }
    for layer in range(2):
        for linear, blocks in rows.items():
            path = f"decoder.layers.{layer}.mixer.{linear}"
            scaled = []
            for branch, block in zip(blocks, leaves[f"{path}.weight"].split(list(blocks.values()))):
                columns = vector(f"{path}.gamma_in_shared") * vector(f"{path}.gamma_in_{branch}")
                scaled.append(vector(f"{path}.gamma_out_{branch}")[..., None] * block * columns)
            composed[f"{path}.weight"] = torch.cat(scaled)
    composed["decoder.final_norm.weight"] = leaves["decoder.final_norm.weight"] * vector(
        "decoder.final_norm.gamma"
    )
    ours, expected = run(model), run(stock, composed)
    return {**result, **_differences(model, leaves, ours, expected)}


def delta_by_definition(configs: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Two gated delta nets against ``tests/reference_delta.py``; returns as :func:`mamba_by_definition`."""
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_compare_delta(config) for config in configs]


def _compare_delta(config: dict[str, Any]) -> dict[str, float]:
    from reference import Branch, rms_norm
    from reference_delta import delta_net

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from ranks.hybrids import build_hybrid
    from ranks.models import SIZES

    model = build_hybrid("GG")
    tokens = torch.arange(SIZES["sequence"])

    def logits():
        return model(tokens[None], tokens[None], None)[0]

    before = logits().detach()
    apply_scale_vectors(model, ScaleVecConfig(**config))
    result = {"start": _difference(logits().detach(), before)}
    fill_by_name(model, 0, 1)
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    eps = model.config.layernorm_epsilon

    def norm(path, x):
        return rms_norm(x, leaves[f"{path}.weight"] * _vector(leaves, f"{path}.gamma"), eps)

    x = leaves["embedding.word_embeddings.weight"][tokens]
    for number, layer in enumerate(model.decoder.layers):
        path, mixer = f"decoder.layers.{number}", layer.self_attention
        heads = mixer.num_value_heads
        own = f"{path}.self_attention"
        sizes = [mixer.qk_dim, mixer.qk_dim, mixer.v_dim, mixer.v_dim, heads, heads]
        blocks = dict(zip("qkvzba", leaves[f"{own}.in_proj.weight"].split(sizes)))
        of_all = _vector(leaves, f"{own}.in_proj.gamma_in_shared")
        parts = {
            branch: Branch(
                weight,
                of_all * _vector(leaves, f"{own}.in_proj.gamma_in_delta_{branch}").expand(SIZES["hidden"]),
                _vector(leaves, f"{own}.in_proj.gamma_out_delta_{branch}"),
            )
            for branch, weight in blocks.items()
        }
        parts["out"] = Branch(leaves[f"{own}.out_proj.weight"])
        parts["convolution"] = leaves[f"{own}.conv1d.weight"].squeeze(1)
        parts["A"], parts["bias"] = leaves[f"{own}.A_log"], leaves[f"{own}.dt_bias"]
        parts["gamma"] = leaves[f"{own}.out_norm.weight"] * _vector(leaves, f"{own}.out_norm.gamma")
        heads_of = {"key_heads": mixer.num_key_heads, "value_heads": heads}
        x = x + delta_net(norm(f"{path}.input_layernorm", x), parts, **heads_of, eps=eps)
    expected = norm("decoder.final_norm", x) @ leaves["output_layer.weight"].T
    return {**result, **_differences(model, leaves, logits(), expected)}


def _vector(leaves: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A scale vector by the names of its stored parts; one where there is none."""
    from reference import product, unit

    if f"{name}_beta" in leaves:
        return product(leaves[f"{name}_beta"], leaves[f"{name}_alpha"])
    if f"{name}_magnitude" in leaves:
        return unit(leaves[f"{name}_magnitude"], leaves[f"{name}_direction"])
    return leaves.get(name, torch.ones(()).double())


def _differences(model, leaves, ours: torch.Tensor, expected: torch.Tensor) -> dict[str, float]:
    """Of values and of all gradients, relative to their largest entries."""
    result = {"logits": _difference(ours.detach(), expected.detach())}
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).double()
    (ours * target).sum().backward()
    (expected * target).sum().backward()
    floor = 1e-3 * max(float(leaf.grad.abs().max()) for leaf in leaves.values() if leaf.grad is not None)
    result["gradient"] = max(
        float((param.grad - leaves[name].grad).abs().max()) / max(float(leaves[name].grad.abs().max()), floor)
        for name, param in model.named_parameters()
        if param.requires_grad
    )
    return result


def mixed_refused(case: str) -> dict[str, Any]:
    """Ask for vectors on layers that cannot carry them, and look at the model afterwards."""
    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from ranks.hybrids import build_heterogeneous, build_hybrid
    from ranks.models import initialize_parallel

    initialize_parallel()
    if case == "replaced":
        model = build_heterogeneous(replaced=True)
    else:
        model = build_hybrid("M*")
        mixer = model.decoder.layers[0].mixer
        if case == "mixer":
            mixer.__class__ = type("Other", (type(mixer),), {})
        elif case == "ungated":
            mixer.rmsnorm = False
        elif case == "zero-centered":
            model.config.layernorm_zero_centered_gamma = True
        elif case == "attention":
            attention = model.decoder.layers[1].self_attention
            attention.__class__ = type("Other", (torch.nn.Module,), {})
        elif case == "cross-attention":
            model.decoder.layers[1].cross_attention = torch.nn.Linear(1, 1)
        elif case == "sparse":
            model.hybrid_layer_pattern = model.hybrid_override_pattern = "MD"
    state = _state(model)
    try:
        apply_scale_vectors(model, ScaleVecConfig(strategy="hg"))
    except ScaleVecError as error:
        return {"error": str(error), "unchanged": _same(state, _state(model))}
    return {"error": "", "unchanged": False}


def other_model(kind: str, by: str) -> str:
    """A model with cross-attention or without a decoder, in a run with the flag; what is said.

    Args:
        kind: ``T5Model`` or ``BertModel``.
        by: ``flag`` (the hooks of a run) or ``call``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from megatron_scalevec import ScaleVecConfig, ScaleVecError, apply_scale_vectors
    from megatron_scalevec.integration import hooks
    from ranks.models import initialize_parallel

    if by == "flag":
        hooks.install(["--scalevec-strategy", "hg"])
    import megatron.core.optimizer as optimizer

    initialize_parallel()
    try:
        model = _t5() if kind == "T5Model" else _bert()
        if by == "call":
            apply_scale_vectors(model, ScaleVecConfig(strategy="hg"))
        wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        config = OptimizerConfig(lr=0.1, weight_decay=0.1)
        rules = optimizer.get_standard_config_overrides(config)
        optimizer.get_megatron_optimizer(config, [wrapped], config_overrides=rules)
    except ScaleVecError as error:
        return str(error)
    return ""


def _config():
    from megatron.core.transformer.transformer_config import TransformerConfig

    from ranks.models import settings_of

    return TransformerConfig(**settings_of("gpt2", torch.float32))


def _t5():
    from megatron.core.models.T5 import t5_spec
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = _config()

    def block(spec):
        return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=WrappedTorchNorm)

    return T5Model(
        config=config,
        encoder_config=config,
        transformer_encoder_layer_spec=block(t5_spec.encoder_model_with_local_spec()),
        transformer_decoder_layer_spec=block(t5_spec.decoder_model_with_local_spec()),
        vocab_size=64,
        max_sequence_length=16,
    )


def _bert():
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    return BertModel(
        config=_config(),
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=64,
        max_sequence_length=16,
    )
