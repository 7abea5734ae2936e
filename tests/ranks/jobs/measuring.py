"""What the benchmarks do, with sizes at which it takes no time, and what they count."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["bench_gpu_script", "bench_telemetry", "bench_tiny", "count_memory", "list_operations"]

_BENCHMARKS = str(Path(__file__).resolve().parents[3] / "benchmarks")

_TINY = {
    "layers": 1,
    "hidden": 64,
    "heads": 4,
    "groups": 2,
    "ffn": 96,
    "vocabulary": 64,
    "sequence": 16,
    "microbatches": 2,
}


@contextlib.contextmanager
def _benchmarks():
    sys.path.insert(0, _BENCHMARKS)
    try:
        yield
    finally:
        sys.path.remove(_BENCHMARKS)


def list_operations(cases: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Names and shapes of what the profiler sees in a microbatch's forward and backward pass, in order.

    Returns:
        ``cases``: one list for each, by its ``strategy`` and further settings, executed in the optimizer.
        ``stock``; ``frozen``: the same with the scales of the layers' norms trained no more.
    """
    from ranks.models import initialize_parallel

    with _benchmarks():
        from training import Sizes, Trainer
    initialize_parallel()
    sizes = Sizes(**_TINY)

    def listed(trainer) -> list[tuple[str, str]]:
        trainer.microbatch()  # what is made once is made now
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        ) as profile:
            trainer.microbatch()
        events = sorted(profile.events(), key=lambda e: (e.time_range.start, -e.time_range.end, e.id))
        return [(event.name, str(event.input_shapes)) for event in events]

    frozen = Trainer(sizes, frozen=r"layers\.\d+\..*layernorm\.weight$")
    return {
        "stock": listed(Trainer(sizes)),
        "frozen": listed(frozen),
        "cases": [listed(Trainer(sizes, execution="optimizer", **case)) for case in cases],
    }


def count_memory(strategies: list[str], hidden: int) -> dict[str, dict[str, float]]:
    """Bytes of all tensors after a step on this rank, by strategy executed in the optimizer."""
    from ranks.models import initialize_parallel

    with _benchmarks():
        from training import Sizes, Trainer, alive_bytes
    initialize_parallel()
    sizes = Sizes(hidden=hidden, sequence=16, microbatches=1)
    Trainer(Sizes(**_TINY)).step()  # what is made once per process is made now
    found = {}
    for strategy in ("stock", *strategies):
        before = alive_bytes()
        trainer = Trainer(sizes, strategy, None if strategy == "stock" else "optimizer")
        trainer.step()
        found[strategy] = {"alive": alive_bytes() - before, "vectors": trainer.vector_bytes()}
        if strategy != "stock":
            expected = trainer.cost("optimizer")
            # The kernels' tables are made where they run, on a GPU.
            found[strategy]["formula"] = expected.memory - expected.index_maps
        del trainer
    return found


def bench_tiny() -> dict[str, Any]:
    """Rows and lines of step_bench, and rows of norm_bench."""
    import dataclasses

    from ranks.models import initialize_parallel

    with _benchmarks():
        import norm_bench
        import step_bench
        from training import Sizes
    initialize_parallel()
    times = step_bench.times(Sizes(**_TINY), "unified", rounds=1, builds=2)
    step_bench.SMALL = dataclasses.replace(step_bench.SMALL, hidden=64, sequence=16)
    counts = {layers: step_bench.counts(layers=layers) for layers in (1, 2)}
    rows = [{"point": "tiny", **row} for row in counts[1]]
    lines = [step_bench.describe_times(row) for row in times]
    return {
        "times": times,
        "counts": counts,
        "lines": lines + list(map(step_bench.describe_counts, rows)),
        "norms": {row["name"]: row for row in norm_bench.measure(tokens=8, heads=4, groups=2, rounds=2)},
    }


def bench_telemetry() -> dict[str, Any]:
    """Rows and lines of telemetry_bench."""
    from ranks.models import initialize_parallel

    with _benchmarks():
        import telemetry_bench
        from training import Sizes
    initialize_parallel()
    rows = telemetry_bench.times(Sizes(**_TINY), "unified", rounds=2, interval=100)
    return {"rows": rows, "lines": [telemetry_bench.describe(row, 100) for row in rows]}


def bench_gpu_script() -> dict[str, Any]:
    """All of gpu_bench that a CPU can do: rows and lines."""
    from ranks.models import initialize_parallel

    with _benchmarks():
        import gpu_bench
        from training import Sizes
    initialize_parallel()
    rows = [
        gpu_bench.measure(
            "1B", strategy, execution, implementation, device="cpu", sizes=Sizes(**_TINY), rounds=2
        )
        for strategy, execution, implementation in gpu_bench.ROWS
        if implementation == "local"
    ]
    speed = gpu_bench.bandwidth("cpu", 1 << 16)
    return {
        "kernels": gpu_bench.kernels_beside_torch("cpu", rows=64, columns=80),
        "rows": rows,
        "speed": speed,
        "lines": [gpu_bench.describe(row, speed) for row in rows],
        "layers": {
            name: [gpu_bench.fitting(sizes, free).layers for free in (140e9, 80e9)]
            for name, sizes in gpu_bench.MODELS.items()
        },
    }
