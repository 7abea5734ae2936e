"""Run the Triton kernels in Triton's interpreter beside the torch passes; prints the differences as JSON."""

import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"

import torch

from megatron_scalevec import ScaleVecError
from megatron_scalevec.execution import kernels, shard, trial
from megatron_scalevec.execution.shard import Part, Run, runs_of
from megatron_scalevec.execution.trial import try_kernels
from megatron_scalevec.fold import qkv_row_map

COLUMNS = 200  # more than one block of them, the last one not full
ROWS = qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=20, tp_rank=0, tp_size=1)
RUNS = runs_of(ROWS)
TOTAL = len(ROWS.branch_of_row) * COLUMNS
# Where vectors lie in the flat tensors: three γ_in, then three γ_out.
INNER = tuple(COLUMNS * branch for branch in range(3))
OUTER = tuple(3 * COLUMNS + sum(ROWS.sizes[:branch]) for branch in range(3))
FLAT = 3 * COLUMNS + sum(ROWS.sizes)


def qkv(start: int, stop: int, has_in: bool, has_out: bool) -> Part:
    """A shard of the weight; the second branch has no γ_in."""
    inner = tuple(at if has_in and branch != 1 else None for branch, at in enumerate(INNER))
    return Part(start, stop, COLUMNS, RUNS, inner, OUTER if has_out else (None,) * 3)


def main() -> None:
    several = [qkv(0, TOTAL, True, True), qkv(3333, TOTAL - 77, True, False), qkv(450, 460, True, True)]
    whole = qkv(0, TOTAL, True, True)
    # Another weight, of fewer columns.
    narrow = Part(32, 64 * 48, 48, (Run(0, 64, 0, 0),), (FLAT,), (FLAT + 48,))
    cases = {
        "one": [whole],
        "without γ_out": [qkv(0, TOTAL, True, False)],
        "without γ_in": [qkv(3333, TOTAL, False, True)],
        "cut anywhere": several,
        "one vector for several weights": [whole, qkv(0, TOTAL, True, True), narrow],
        "none": [],
    }
    results = {name: compare(parts) for name, parts in cases.items()}
    # Blocks of each launch: the weights with one γ_out after each other, the third beside the first.
    here = torch.device("cpu")
    results["in turn"] = [
        len(launch.blocks)
        for launch in kernels._plan(tuple(cases["one vector for several weights"]), here).launches
    ]
    # Within one launch; launches that follow each other may share a vector.
    results["refused"] = refusals(whole)
    kernels.TEMPORARY_BYTES = 4 * COLUMNS * 3  # three blocks at once
    kernels._plan.cache_clear()
    results["several launches"] = compare([*cases["one vector for several weights"], *several])
    results["launches"] = [len(launch.blocks) for launch in kernels._plan((whole, narrow), here).launches]
    kernels.TEMPORARY_BYTES = 32 << 20  # all blocks at once
    kernels._plan.cache_clear()
    trial.ELEMENTS = 3 * 2400  # two ends of each shard
    results["trial"] = {
        name: tried(passes, [whole, qkv(3333, TOTAL - 77, True, True), narrow])
        for name, passes in trials().items()
    }
    json.dump(results, sys.stdout)


def compare(parts: list[Part]) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    gamma = 1 + torch.rand(FLAT + 48 + 64, generator=generator)
    sizes = [part.stop - part.start for part in parts]
    gradients, masters = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(2))
    found = []
    for passes in (shard, kernels):
        own, totals = [g.clone() for g in gradients], torch.ones(gamma.numel(), dtype=torch.float64)
        passes.split_parts(parts, own, masters, gamma, totals)
        live = [[torch.zeros(n, dtype=dtype) for n in sizes] for dtype in (torch.float32, torch.float16)]
        for of_dtype in live:
            passes.fold_parts(parts, of_dtype, masters, gamma)
        found.append((own, totals, sum(live, [])))
    (g0, t0, l0), (g1, t1, l1) = found
    return {
        "gradient": all(map(torch.equal, g0, g1)),
        "live": all(map(torch.equal, l0, l1)),
        "sums": float((t0 - t1).abs().max() / t0.abs().max()),
    }


def refusals(whole: Part) -> list[str]:
    """What is said of vectors that overlap, and of live weights of two dtypes."""
    shifted = Part(0, TOTAL, COLUMNS, RUNS, (INNER[0] + 1, None, None), (None,) * 3)
    said = []
    masters = [torch.zeros(TOTAL) for _ in range(2)]
    for act in (
        lambda: kernels.split_parts([whole, shifted], masters, masters, torch.ones(FLAT), torch.ones(FLAT)),
        lambda: kernels.fold_parts([whole] * 2, [masters[0], masters[1].half()], masters, torch.ones(FLAT)),
    ):
        try:
            act()
        except RuntimeError as error:
            said.append(str(error))
    return said


def trials() -> dict[str, SimpleNamespace]:
    """The kernels as they are, and broken; ``broken`` calls the right one with something wrong."""

    def passes(split=kernels.split_parts, fold=kernels.fold_parts) -> SimpleNamespace:
        return SimpleNamespace(split_parts=split, fold_parts=fold)

    def shift(gamma: torch.Tensor) -> torch.Tensor:
        return gamma.roll(1)

    def without_scales(parts, gradients, masters, gamma, totals) -> None:
        given = [gradient.clone() for gradient in gradients]
        kernels.split_parts(parts, gradients, masters, gamma, totals)
        for gradient, was in zip(gradients, given):
            gradient.copy_(was)

    def without_the_last_block(parts, gradients, masters, gamma, totals) -> None:
        before = totals.clone()
        kernels.split_parts(parts, gradients, masters, gamma, totals)
        totals[FLAT - 1] = before[FLAT - 1]

    def does_not_compile(*_) -> None:
        raise RuntimeError("Failed to find C compiler.\nPlease specify CC")

    return {
        "right": passes(),
        "gradients": passes(without_scales),
        "sums": passes(without_the_last_block),
        "folds": passes(fold=lambda *a: kernels.fold_parts(*a[:3], shift(a[3]))),
        "not compiled": passes(does_not_compile),
    }


def tried(passes: SimpleNamespace, parts: list[Part]) -> str:
    """What the trial of some kernels says; γ_in and γ_out of a fresh start would be all one."""
    generator = torch.Generator().manual_seed(1)
    sizes = [part.stop - part.start for part in parts]
    gradients, masters = ([torch.randn(n, generator=generator) for n in sizes] for _ in range(2))
    before = [tensor.clone() for tensor in (*gradients, *masters)]
    lives = [torch.zeros(n, dtype=torch.float16) for n in sizes]
    try:
        try_kernels(passes, parts, gradients, masters, lives, FLAT + 48 + 64)
    except ScaleVecError as error:
        return str(error)
    assert all(map(torch.equal, before, (*gradients, *masters))), "the trial has changed its data"
    return "no difference"


main()
