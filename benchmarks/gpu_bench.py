#!/usr/bin/env python3
"""Scale vectors on one GPU: fold and split against the memory's bandwidth, whole steps against stock.

usage: python benchmarks/gpu_bench.py [--minutes 8] [--json FILE]

1. The kernels beside plain torch on the same numbers: equal, or the run ends here.
2. The bandwidth: the best of several copies of a large tensor.
3. A GPT shaped like the paper's 1B, and a stack of layers of a 7B model as high as fits, in bf16 with Adam
   over float32 masters: the stock model and one with scale vectors take their steps in turn, microbatch by
   microbatch. Beside the ratio of their times, what the passes of the optimizer's mode take on the device,
   and what the bytes of megatron_scalevec/cost.py would take at the bandwidth of 2.

One rank: no shard is divided, so the passes do here what a data-parallel group of s ranks divides by s.

Exit code: 0 measured, 1 the kernels are wrong, 2 there is no GPU.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch
from on_gpu import GpuRun
from timing import PassTimer, interleaved, ratio
from training import Sizes, Trainer, synchronize

MODELS = {
    "1B": Sizes(22, 1792, 14, 14, 4778, 50304, sequence=2048, batch=1, microbatches=8),
    # The number of layers is what fits, this many at most.
    "7B stack": Sizes(16, 4096, 32, 8, 14336, 32000, sequence=2048, batch=1, microbatches=8),
}
# (strategy, execution, implementation of the layers), the most telling first.
ROWS = (
    ("unified", "optimizer", "transformer_engine"),
    ("unified-foldable", "optimizer", "transformer_engine"),
    ("unified", "autograd", "transformer_engine"),
    ("unified-foldable", "optimizer", "local"),
    ("unified", "optimizer", "local"),
    ("unified", "autograd", "local"),
)
_BYTES_PER_PARAMETER = 18  # weight, gradient, master and two moments


def main() -> int:
    """See the module's text."""
    run = GpuRun(__doc__)
    results = run.results
    results["kernels"] = kernels_beside_torch("cuda")
    print(f"kernels beside torch: {results['kernels']}")
    if results["kernels"]["right"]:
        results["bytes_per_second"] = bandwidth("cuda", 1 << 28)
        print(f"copies move {results['bytes_per_second'] / 1e12:.2f} TB/s", flush=True)
        results["rows"] = []
        rows = [row for row in ROWS if row[2] == "local" or results["transformer_engine"]]
        for _, row in run.measured(measure, [(model, *row) for row in rows for model in MODELS]):
            results["rows"].append(row)
            print(row.get("error") or describe(row, results["bytes_per_second"]), flush=True)
    run.finish()
    return 0 if results["kernels"]["right"] else 1


def kernels_beside_torch(device: str, rows: int = 4096, columns: int = 1536) -> dict[str, Any]:
    """Relative differences between the passes for ``device`` and those in plain torch on the CPU."""
    from megatron_scalevec.execution import shard
    from megatron_scalevec.execution.engine import passes_for
    from megatron_scalevec.execution.shard import Part, Run

    half = rows // 2
    runs = (Run(0, half, 0, 0), Run(half, rows, 1, 0))
    # γ_in of both branches and γ_out of the first; one shard ends in the middle of a row.
    part = Part(1000, rows * columns - 3000, columns, runs, (0, columns), (2 * columns, None))
    generator = torch.Generator().manual_seed(1)
    gamma = 1 + 0.1 * torch.randn(2 * columns + half, generator=generator)
    gradient, master = (torch.randn(part.stop - part.start, generator=generator) for _ in range(2))
    found = []
    for passes, where in ((shard, "cpu"), (passes_for(torch.device(device)), device)):
        grad, own, vectors = gradient.clone().to(where), master.to(where), gamma.to(where)
        totals = torch.zeros_like(vectors, dtype=torch.float64)
        live = torch.empty_like(own, dtype=torch.bfloat16)
        passes.split_parts([part], [grad], [own], vectors, totals)
        passes.fold_parts([part], [live], [own], vectors)
        found.append([grad, live.float(), totals])
    worst = [float((a - b.cpu()).abs().max() / a.abs().max()) for a, b in zip(*found)]
    return {"differences": worst, "right": all(one < 1e-6 for one in worst)}


def bandwidth(device: str, elements: int, tries: int = 10) -> float:
    """Bytes per second that a copy of float32 tensors reads and writes, the best of several."""
    source, target = (torch.zeros(elements, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(tries):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return 2 * source.nbytes / best


def fitting(sizes: Sizes, free: float) -> Sizes:
    """As many layers, of at most those given, as two models have room for in ``free`` bytes."""
    settings = sizes.settings
    hidden, ffn = settings["hidden_size"], settings["ffn_hidden_size"]
    queries = hidden // settings["num_attention_heads"] * settings["num_query_groups"]
    per_layer = 2 * hidden * (hidden + queries) + 3 * hidden * ffn
    outside = 2 * sizes.vocabulary * hidden
    # Half of what is left after the tables is for activations.
    layers = int((free / 2 / _BYTES_PER_PARAMETER - outside) / per_layer / 2)
    if layers < 1:
        raise RuntimeError(f"not even one layer of this model fits into {free / 1e9:.0f} GB twice")
    return replace(sizes, layers=min(sizes.layers, layers))


def measure(
    model: str,
    strategy: str,
    execution: str,
    implementation: str,
    *,
    device: str,
    sizes: Sizes | None = None,
    rounds: int = 7,
) -> dict[str, Any]:
    """Step times of stock and one variant in turn; times of the passes."""
    if sizes is None:
        sizes = fitting(MODELS[model], torch.cuda.mem_get_info()[0])
    trainers = {
        "stock": Trainer(sizes, device=device, implementation=implementation),
        "own": Trainer(sizes, strategy, execution, device=device, implementation=implementation),
    }
    timer = PassTimer(trainers["own"]) if execution == "optimizer" else None
    for _ in range(2):
        interleaved(trainers)
    peaks = {}
    for name, trainer in trainers.items() if device == "cuda" else ():
        torch.cuda.reset_peak_memory_stats()
        trainer.step()
        peaks[name] = torch.cuda.max_memory_allocated()
    if timer:
        timer.clear()
    taken: dict[str, list[float]] = {name: [] for name in trainers}
    for index in range(rounds):
        names = list(trainers) if index % 2 == 0 else list(trainers)[::-1]
        for name, (_, wall) in interleaved({name: trainers[name] for name in names}).items():
            taken[name].append(wall)
    middle, quartiles = ratio(taken["own"], taken["stock"])
    passes = {}
    if timer:
        by = timer.device or timer.host
        expected = trainers["own"].cost("optimizer")
        bytes_of = {"split": expected.split_per_step, "write": expected.fold_per_step}
        passes = {
            name: {
                "seconds": sorted(seconds)[len(seconds) // 2],
                "host_seconds": sorted(timer.host[name])[len(seconds) // 2],
                "bytes": bytes_of[name],
            }
            for name, seconds in by.items()
        }
    del trainers, timer
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return {
        "model": model,
        "strategy": strategy,
        "execution": execution,
        "implementation": implementation,
        "sizes": asdict(sizes),
        "stock_seconds": sorted(taken["stock"])[rounds // 2],
        "ratio": middle,
        "quartiles": quartiles,
        "passes": passes,
        "peak_bytes": peaks,
    }


def describe(row: dict[str, Any], bytes_per_second: float) -> str:
    """One line."""
    low, high = row["quartiles"]
    line = (
        f"{row['model']:8} {row['implementation']:18} {row['strategy']:16} {row['execution']:9} "
        f"{row['sizes']['layers']} layers: x{row['ratio']:.4f} (x{low:.4f} to x{high:.4f}) of "
        f"{1000 * row['stock_seconds']:.1f} ms"
    )
    for name, found in row["passes"].items():
        floor = found["bytes"] / bytes_per_second
        line += (
            f"; {name} {1000 * found['seconds']:.2f} ms, {found['seconds'] / floor:.2f} times its floor of "
            f"{1000 * floor:.2f} ms"
        )
    return line


if __name__ == "__main__":
    sys.exit(main())
