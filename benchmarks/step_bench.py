#!/usr/bin/env python3
"""Step time, memory, traffic and arithmetic of strategies and executions beside stock, on the CPU.

    python benchmarks/step_bench.py                   the set of `make bench`
    python benchmarks/step_bench.py --hidden 1024 --microbatches 8 --sequence 256 --rounds 15
    python benchmarks/step_bench.py --counts          no times: what is counted, and how it grows

Times: one process; stock and both executions of a strategy take their steps in turn, microbatch by
microbatch, and the order is turned around from round to round, so that whatever else the machine does hits
all alike. Where a model happens to lie in memory makes it some percent faster or slower for as long as it
lives, so all are built several times, and lie in large pages where torch can ask for them. A line has the
median over builds and rounds of the ratio to stock, with its quartiles, in processor time (which other
processes disturb less) and in wall time; and the share of stock's step that the passes of the
optimizer's mode take, timed where they are called (the fold among them takes the place of a copy of stock's).
On a processor without instructions for bf16 take --float32-products: without, nothing shows beside stock's
products.

Counts: on top of stock, by torch's own operations and by the formulas of megatron_scalevec/cost.py, which
have every tensor read once and written once; with several ranks the mean over them. Memory is the bytes of
all tensors that are alive after a step on one rank, a strategy's own vectors, gradients and moments apart;
the peak is that of a step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch with the first tensor

import torch
from counting import Counter
from products import float32_products
from timing import PassTimer, interleaved, ratio
from training import Sizes, Trainer, alive_bytes, start_parallel

EXECUTIONS = ("optimizer", "autograd")
STRATEGIES = ("unified-foldable", "unified", "hg", "dp")
SHORT, LONG = 256, 1024

# How counts grow: one size doubled at a time. Of branches there are five, unless some are left out.
SMALL = Sizes(layers=2, hidden=256, sequence=64, microbatches=2)
GROWTH: dict[str, dict[str, int]] = {
    "hidden 256, 5 branches, 2 microbatches, 2 layers, 1 rank": {},
    "hidden 512": {"hidden": 512},
    "2 branches": {"branches": 2},
    "4 microbatches": {"microbatches": 4},
    "4 layers": {"layers": 4},
    "2 ranks": {"ranks": 2},
    "4 ranks": {"ranks": 4},
}
GROWING = "unified-foldable"


def main(argv: list[str] | None = None) -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--sequence",
        type=int,
        nargs="+",
        help=f"tokens of a sample (default: {SHORT}; {LONG} for the largest of the other sizes and the first "
        "two strategies besides)",
    )
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES))
    parser.add_argument("--builds", type=int, default=3, help="how many times all models are built")
    parser.add_argument("--rounds", type=int, default=2, help="steps of every model of a build")
    parser.add_argument(
        "--float32-products",
        action="store_true",
        help="compute stock's and all products of bf16 matrices in float32",
    )
    parser.add_argument("--counts", action="store_true", help="no times: what is counted, and how it grows")
    parser.add_argument("--point", help=argparse.SUPPRESS)  # one line of --counts, as JSON, under torchrun
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    if options.point:
        start()
        found = _mean_over_ranks(counts(**json.loads(options.point)))
        if torch.distributed.get_rank() == 0:
            options.json.write_text(json.dumps(found), encoding="utf-8")
        return 0
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "processor": processor(),
        "torch": torch.__version__,
        "builds": options.builds,
        "rounds": options.rounds,
        "products": "float32" if options.float32_products else "bf16",
        "times": [],
        "counts": [],
    }
    start()
    if not options.counts:
        with float32_products() if options.float32_products else contextlib.nullcontext():
            for sizes, strategy in _timed(options):
                for row in times(sizes, strategy, options.rounds, options.builds):
                    results["times"].append(row)
                    print(describe_times(row), flush=True)
    else:
        for name, changes in GROWTH.items():
            for row in point(changes):
                results["counts"].append({"point": name, **row})
                print(describe_counts(results["counts"][-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def processor() -> str:
    """What the system calls it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def start() -> None:
    """CPU mode on one thread, so that processor time is that of the work alone."""
    torch.set_num_threads(1)
    from megatron_scalevec import cpu

    cpu.install()
    start_parallel("gloo")


# --- times --------------------------------------------------------------------------------------------


def _timed(options: argparse.Namespace) -> list[tuple[Sizes, str]]:
    """What steps are timed of."""
    sequences = options.sequence or [SHORT]
    points = list(itertools.product(sequences, options.hidden, options.microbatches, options.strategies))
    if options.sequence is None:
        largest = max(options.hidden), max(options.microbatches)
        points += [(LONG, *largest, strategy) for strategy in options.strategies[:2]]
    return [
        (Sizes(options.layers, hidden, sequence=sequence, microbatches=microbatches), strategy)
        for sequence, hidden, microbatches, strategy in points
    ]


def times(sizes: Sizes, strategy: str, rounds: int, builds: int = 1) -> list[dict[str, Any]]:
    """One row per execution of a strategy."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ("stock", *EXECUTIONS)}
    shares = []
    for build in range(builds):
        trainers = {
            name: Trainer(sizes) if name == "stock" else Trainer(sizes, strategy, name)
            for name in (list(taken) if build % 2 == 0 else list(taken)[::-1])
        }
        timer = PassTimer(trainers["optimizer"])
        for trainer in trainers.values():
            trainer.step()  # what is made once is made now
        for index in range(rounds):
            timer.clear()
            names = list(trainers) if index % 2 == 0 else list(trainers)[::-1]
            for name, seconds in interleaved({name: trainers[name] for name in names}).items():
                taken[name].append(seconds)
            shares.append(sum(map(sum, timer.host.values())) / taken["stock"][-1][0])
        del trainers, timer, trainer
        gc.collect()
    stock = taken.pop("stock")
    rows = []
    for execution, own in taken.items():
        row: dict[str, Any] = {"strategy": strategy, "execution": execution, **dataclasses.asdict(sizes)}
        row["stock_seconds"] = statistics.median(wall for _, wall in stock)
        for kind, name in enumerate(("processor", "wall")):
            row[name], row[f"{name}_quartiles"] = ratio([a[kind] for a in own], [b[kind] for b in stock])
        row["passes"] = statistics.median(shares) if execution == "optimizer" else None
        rows.append(row)
    return rows


def describe_times(row: dict[str, Any]) -> str:
    """One line."""
    where = f"hidden {row['hidden']:4} sequence {row['sequence']:4} microbatches {row['microbatches']}"
    line = f"{where} {row['strategy']:16} {row['execution']:9}"
    for name in ("processor", "wall"):
        low, high = row[f"{name}_quartiles"]
        line += f" x{row[name]:.4f} {name} time (x{low:.3f} to x{high:.3f})"
    if row["passes"] is not None:
        line += f", passes {100 * row['passes']:.2f} % of stock"
    return line


# --- counts -------------------------------------------------------------------------------------------


def point(changes: dict[str, int]) -> list[dict[str, Any]]:
    """The counts with some sizes changed, on one rank here or on several under torchrun."""
    changes = dict(changes)
    ranks = changes.pop("ranks", 1)
    if ranks == 1:
        return counts(**changes)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [__file__, "--point", json.dumps(changes), "--json", str(file)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return json.loads(file.read_text(encoding="utf-8"))


def _mean_over_ranks(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ranks have equal shares of all parameters together, not of those that are folded."""
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, rows)
    return [
        {
            key: value if isinstance(value, str) else statistics.fmean(row[key] for row in of_ranks)
            for key, value in of_ranks[0].items()
        }
        for of_ranks in zip(*gathered)
    ]


def counts(branches: int = 5, strategy: str = GROWING, **changes: int) -> list[dict[str, Any]]:
    """One row per execution: what is counted on this rank on top of stock, and what the formulas say."""
    sizes = dataclasses.replace(SMALL, **changes)
    off = {5: (), 2: ("q", "k", "v")}[branches]
    Trainer(sizes).step()  # what is made once per process is made now
    stock, memory, _, _ = _counted(sizes, "stock", None)
    rows = []
    for execution in EXECUTIONS:
        own, own_memory, vectors, expected = _counted(sizes, strategy, execution, branches_off=off)
        beside = own_memory - memory - vectors
        rows.append(
            {
                "strategy": strategy,
                "execution": execution,
                "bytes": own.bytes - stock.bytes,
                "bytes_by_formula": expected.added_per_step,
                "flops": own.flops - stock.flops,
                "flops_by_formula": expected.flops_per_step,
                "memory": beside,
                "memory_by_formula": expected.tables + expected.index_maps,
                "memory_percent": 100 * beside / memory,
                "peak": own.peak - stock.peak,
                "vectors": vectors,
            }
        )
    return rows


def _counted(sizes: Sizes, strategy: str, execution: str | None, **config: Any):
    """(counter of a step, bytes alive after it, bytes of the vectors, cost by formula or None)"""
    before = alive_bytes()
    trainer = Trainer(sizes, strategy, execution, **config)
    trainer.step()
    memory, vectors = alive_bytes() - before, trainer.vector_bytes()
    with Counter() as counter:
        trainer.step()
    return counter, memory, vectors, trainer.cost(execution) if execution else None


def describe_counts(row: dict[str, Any]) -> str:
    """One line."""
    return (
        f"{row['point']:56} {row['execution']:9} "
        f"{row['bytes']:>13,.0f} bytes (formula {row['bytes_by_formula']:>12,.0f}), "
        f"{row['flops']:>11,.0f} operations (formula {row['flops_by_formula']:>11,.0f}), "
        f"{row['memory']:>+9,.0f} bytes held ({row['memory_percent']:+.3f} %), "
        f"{row['peak']:>+10,.0f} at the peak"
    )


if __name__ == "__main__":
    sys.exit(main())
