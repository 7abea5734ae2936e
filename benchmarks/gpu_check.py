#!/usr/bin/env python3
"""Scale vectors on a GPU: are the numbers right? What they cost is measured by gpu_bench.py.

usage: python benchmarks/gpu_check.py [--minutes 8] [--json FILE]

Numbers: small models with local layers and, where TransformerEngine is installed, with its layers, in fp32
and bf16, against the float64 reference of the tests. What counts as right is measured and not assumed: the
stock model has a distance from the reference in each dtype (TensorFloat-32 products in fp32, for one), and
the model with scale vectors may have a few times that. Under FP8 the same is reported, but decides nothing:
FP8 is refused by the package for now.

Exit code: 0 all numbers are right, 1 some are not, 2 there is no GPU.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from on_gpu import GpuRun

TESTS = Path(__file__).resolve().parent.parent / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

NUMBER_CASES = [
    (kind, strategy)
    for kind in ("llama", "gpt2")
    for strategy in ("iwd", "hg", "dp", "unified", "unified-foldable")
]

ALLOWED = 5.0
"""How many times the stock model's distance from the reference is still right."""


def main() -> int:
    """Run everything that fits into the time; see the module's text."""
    run = GpuRun(__doc__)
    rows = run.results["numbers"] = []
    implementations = ["transformer_engine"] * bool(run.results["transformer_engine"]) + ["local"]
    for case, found in run.measured(compare, number_rows(implementations)):
        if "error" in found:
            found = {**found, "row": case, "right": False, "decides": case[1] != "fp8"}
        rows.append(found)
        print(found.get("error") or describe_numbers(found), flush=True)
    wrong = [row for row in rows if row["decides"] and not row["right"]]
    print(f"numbers: {len(rows)} compared, {len(wrong)} wrong")
    run.finish()
    return 1 if wrong else 0


def number_rows(implementations: list[str]):
    """(implementation, precision, kind, strategy), the most telling first."""
    fp8 = ["fp8"] if fp8_available() else []
    for implementation in implementations:
        for precision in ["bf16", "fp32", *(fp8 if implementation == "transformer_engine" else [])]:
            for kind, strategy in NUMBER_CASES:
                yield implementation, precision, kind, strategy


def fp8_available() -> bool:
    """Whether TransformerEngine would run FP8 products on this device."""
    try:
        import transformer_engine.pytorch as te

        found = te.is_fp8_available()
    except (ImportError, AttributeError, OSError, RuntimeError):
        return False
    return bool(found[0] if isinstance(found, tuple) else found)


def compare(implementation: str, precision: str, kind: str, strategy: str, *, device: str) -> dict:
    """Distances from the float64 reference: stock model and converted model."""
    stock = distance(implementation, precision, kind, None, device)
    ours = distance(implementation, precision, kind, strategy, device)
    ratios = {what: ours[what] / max(stock[what], 1e-7) for what in ours}
    return {
        "implementation": implementation,
        "precision": precision,
        "kind": kind,
        "strategy": strategy,
        "stock": stock,
        "scalevec": ours,
        "right": all(ratio <= ALLOWED for ratio in ratios.values()),
        "decides": precision != "fp8",
    }


def distance(implementation: str, precision: str, kind: str, strategy: str | None, device: str) -> dict:
    """Relative distances of the logits, and of the gradients of all matrices and of all vectors.

    All together and not one by one: under dual-norm some gradients are zero but for rounding (a norm takes
    the length of what comes before it away), and have no relative distance.
    """
    from ranks.initial import fill_by_name
    from ranks.models import SIZES, build_gpt, reference_of
    from reference import gpt_logits

    from megatron_scalevec import ScaleVecConfig, apply_scale_vectors

    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    model = build_gpt(kind, dtype, implementation).to(device)
    if strategy is not None:
        apply_scale_vectors(model, ScaleVecConfig(strategy=strategy))
    fill_by_name(model, 0, 1)
    params, reference_config, leaves = reference_of(model)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(SIZES["vocabulary"], (SIZES["sequence"],), generator=generator)
    expected = gpt_logits(tokens, params, reference_config)
    target = torch.randn(expected.shape, generator=generator).double()
    (expected * target).sum().backward()
    position = torch.arange(SIZES["sequence"], device=device)[None]
    with fp8_region(precision == "fp8"):
        logits = model(tokens[None].to(device), position, None)[0]
    (logits.double() * target.to(device)).sum().backward()
    pairs = {"logits": [(logits.detach(), expected.detach())], "matrices": [], "vectors": []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind_of = "matrices" if parameter.dim() > 1 else "vectors"
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            pairs[kind_of].append((grad, leaves[name].grad))
    return {what: relative_distance(found) for what, found in pairs.items()}


def fp8_region(enabled: bool):
    """TransformerEngine's FP8 context with its default recipe."""
    if not enabled:
        return contextlib.nullcontext()
    import transformer_engine.pytorch as te

    return te.autocast(enabled=True) if hasattr(te, "autocast") else te.fp8_autocast(enabled=True)


def relative_distance(pairs) -> float:
    """Of all first tensors together from all second ones, in the Euclidean norm."""
    apart = sum(float((a.double().cpu() - b).pow(2).sum()) for a, b in pairs)
    return (apart / sum(float(b.pow(2).sum()) for _, b in pairs)) ** 0.5


def describe_numbers(row: dict) -> str:
    """One line."""
    verdict = "right" if row["right"] else "WRONG"
    if not row["decides"]:
        verdict = f"{verdict} (not decisive)"
    parts = [f"{what} {row['scalevec'][what]:.1e} (stock {row['stock'][what]:.1e})" for what in row["stock"]]
    where = f"{row['implementation']:18} {row['precision']:4} {row['kind']:5} {row['strategy']:16}"
    return f"{where} {', '.join(parts)}: {verdict}"


if __name__ == "__main__":
    sys.exit(main())
