"""Values and gradients beside the float64 reference."""

from __future__ import annotations

from typing import Any

import torch

from ranks.initial import fill_by_name, name_of_expert

__all__ = ["compare_with_apex_norms", "compare_with_reference", "gradients"]


def compare_with_reference(cases: list[dict[str, Any]], dtype: str = "float64") -> list[dict[str, Any]]:
    """Build, convert, move away from the start, and compare with the reference on one sequence.

    Args:
        cases: Each with ``kind`` of model, ``config`` of the strategy and ``overrides`` of Megatron's
            configuration; ``experts`` names one of ``models.EXPERTS``.
        dtype: Of the model; the reference is float64.

    Returns:
        For each case the largest differences, relative to the largest entry: ``start`` (logits before
        conversion against those after), ``logits``, and ``gradient`` over all trainable parameters; and
        ``problems``: what the audit finds missing.
    """
    from ranks.models import initialize_parallel

    initialize_parallel()
    return [_compare(getattr(torch, dtype), **case) for case in cases]


def _compare(
    dtype: torch.dtype,
    kind: str,
    config: dict[str, Any],
    overrides: dict[str, Any] | None = None,
    experts: str | None = None,
) -> dict[str, Any]:
    from reference import gpt_logits

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.audit import audit
    from ranks.models import EXPERTS, SIZES, build_gpt, reference_of

    model = build_gpt(**{"kind": kind, "dtype": dtype, **EXPERTS.get(experts, {}), **(overrides or {})})
    tokens = torch.randint(
        SIZES["vocabulary"], (SIZES["sequence"],), generator=torch.Generator().manual_seed(3)
    )
    position = torch.arange(SIZES["sequence"])[None]

    def logits():
        return model(tokens[None], position, None)[0].double()

    before = logits().detach()
    apply_scale_vectors(model, ScaleVecConfig(**config))
    result: dict[str, Any] = {"start": _difference(logits().detach(), before)}
    built = audit(model)
    result["vectors"] = len(built.vectors)
    fill_by_name(model, 0, 1)
    params, reference_config, leaves = reference_of(model)
    ours, expected = logits(), gpt_logits(tokens, params, reference_config)
    result["logits"] = _difference(ours.detach(), expected.detach())
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4)).double()
    (ours * target).sum().backward()
    (expected * target).sum().backward()
    for leaf in leaves.values():
        if leaf.grad is None:  # of an expert without tokens, whose gradient must be zero and not missing
            leaf.grad = torch.zeros_like(leaf)
    worst = 0.0
    # Some gradients are zero in exact arithmetic (a bias on all keys shifts no attention weight): what is
    # left of them is rounding, measured against the largest gradient of the model.
    floor = 1e-3 * max(float(leaf.grad.abs().max()) for leaf in leaves.values())
    for name, param in model.named_parameters():
        if param.requires_grad:
            name = name_of_expert(name, 0)
            expected_grad = leaves[name].grad
            scale = max(float(expected_grad.abs().max()), floor, _size_of_terms(name, leaves))
            worst = max(worst, float((param.grad - expected_grad).abs().max()) / scale)
        elif param.grad is not None:
            raise AssertionError(f"{name} is frozen and got a gradient")
    result["gradient"] = worst
    return result


def compare_with_apex_norms(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As :func:`compare_with_reference`, with Megatron's norms over apex, and torch for apex's kernel."""
    from megatron.core.fusions import fused_layer_norm

    class Kernel:
        @staticmethod
        def forward(ctx, x, weight, bias, shape, eps):
            raise AssertionError("only its signature is looked at")

        @staticmethod
        def apply(x, weight, bias, shape, eps):
            return torch.nn.functional.layer_norm(x, shape, weight, bias, eps)

    fused_layer_norm.HAVE_FUSED_LAYER_NORM = True
    fused_layer_norm.FusedLayerNormAffineFunction = Kernel
    norms = {"norm_class": fused_layer_norm.FusedLayerNorm}
    return compare_with_reference([{**case, "overrides": norms} for case in cases])


def _size_of_terms(name: str, leaves: dict[str, torch.Tensor]) -> float:
    """A scalar part's gradient is a sum over the channels in which much may cancel; its rounding is that of
    the terms. Zero for anything else."""
    for scalar, vector in (("_beta", "_alpha"), ("_magnitude", "_direction")):
        if name.endswith(scalar):
            base = name.removesuffix(scalar)
            whole = leaves[base + vector].grad
            if scalar == "_magnitude":  # the direction's gradient lacks the part along the direction
                return float(leaves[name].grad.abs().max() + whole.norm() * leaves[name].detach().abs().max())
            return float(whole.norm() * leaves[base + vector].detach().norm())
    return 0.0


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def gradients(
    config: dict[str, Any],
    kind: str,
    sabotage: str | None = None,
    implementation: str = "local",
    **sizes: Any,
) -> dict[str, Any]:
    """One forward and backward pass through megatron.core alone: loss and reduced gradients.

    Args:
        config: The strategy.
        kind: Of model; also those of ``ranks.hybrids``.
        sabotage: Name of a function in ``sabotage.SABOTAGE`` that breaks something on purpose.
        implementation: Megatron's name for the layers.
        sizes: Of Megatron's groups; ``sequence_parallel`` goes to the model.

    Returns:
        ``loss``, and ``gradients`` of the parameters that every rank holds whole, by name.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors
    from megatron_scalevec.patching import PatchSet
    from ranks.hybrids import BUILDERS
    from ranks.jobs.sabotage import SABOTAGE
    from ranks.models import SIZES, build_gpt, initialize_parallel

    if sabotage:
        SABOTAGE[sabotage](PatchSet())
    sequence_parallel = sizes.pop("sequence_parallel", False)
    initialize_parallel(**sizes)
    given = {"sequence_parallel": sequence_parallel, **sizes}
    if kind in BUILDERS:
        model = BUILDERS[kind](**given)
    else:
        model = build_gpt(kind, implementation=implementation, **given)
    apply_scale_vectors(model, ScaleVecConfig(**config))
    fill_by_name(
        model,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    wrapped.zero_grad_buffer()
    draw = torch.Generator().manual_seed(3)
    shape = (2, SIZES["sequence"])
    tokens = torch.randint(SIZES["vocabulary"], shape, generator=draw)
    # Not Megatron's cross-entropy, which computes in float32.
    target = torch.randn(*shape, SIZES["vocabulary"], generator=draw)
    position = torch.arange(shape[1]).expand(shape)
    loss = (wrapped(tokens, position, None) * target).mean()
    loss.backward()
    finalize_model_grads([wrapped])
    return {
        "loss": float(loss),
        "gradients": {
            name: param.main_grad.double().numpy().copy()
            for name, param in model.named_parameters()
            if param.requires_grad and not getattr(param, "tensor_model_parallel", False)
        },
    }
