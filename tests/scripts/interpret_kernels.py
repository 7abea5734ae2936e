"""Run the Triton kernels in Triton's interpreter beside the torch passes; prints the differences as JSON."""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from megatron_scalevec.execution import kernels, shard
from megatron_scalevec.execution.shard import Scales, runs_of
from megatron_scalevec.fold import qkv_row_map

COLUMNS = 200  # more than one block of them, the last one not full
ROWS = qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=20, tp_rank=0, tp_size=1)
RUNS = runs_of(ROWS)
TOTAL = len(ROWS.branch_of_row) * COLUMNS


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    results = []
    for has_in, has_out in ((True, True), (True, False), (False, True)):
        inner = [
            1 + torch.rand(COLUMNS, generator=generator) if has_in and b != 1 else None for b in range(3)
        ]
        outer = [1 + torch.rand(n, generator=generator) if has_out else None for n in ROWS.sizes]
        scales = Scales(inner, outer)
        for start, stop in ((0, TOTAL), (3333, TOTAL - 77), (450, 460)):
            results.append(compare(scales, start, stop, generator))
    json.dump(results, sys.stdout)


def compare(scales: Scales, start: int, stop: int, generator: torch.Generator) -> dict[str, object]:
    def draw() -> torch.Tensor:
        return torch.randn(stop - start, generator=generator)

    def zeros() -> Scales:
        pairs = (scales.inner, scales.outer)
        return Scales(
            *([None if v is None else torch.zeros(len(v), dtype=torch.float64) for v in vs] for vs in pairs)
        )

    gradient, master = draw(), draw()
    found = {}
    for passes in (shard, kernels):
        own, sums = gradient.clone(), zeros()
        passes.split_gradient(own, master, start, COLUMNS, RUNS, scales, sums)
        live = {dtype: torch.zeros(stop - start, dtype=dtype) for dtype in (torch.float32, torch.float16)}
        for tensor in live.values():
            passes.fold_into(tensor, master, start, COLUMNS, RUNS, scales)
        found[passes] = own, sums, live
    (g0, s0, l0), (g1, s1, l1) = found.values()
    pairs = zip([*s0.inner, *s0.outer], [*s1.inner, *s1.outer])
    sums = [float((a - b).abs().max()) / max(1.0, float(a.abs().max())) for a, b in pairs if a is not None]
    return {
        "gradient": torch.equal(g0, g1),
        "live": all(torch.equal(l0[dtype], l1[dtype]) for dtype in l0),
        "sums": max(sums),
    }


main()
