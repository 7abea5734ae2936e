#!/usr/bin/env python3
"""Writes docs/performance.md: what scale vectors cost at usual sizes, from the formulas of cost.py, and what
they cost on a CPU, from docs/performance.json, which is what `make bench` wrote as bench-times.json, and from
docs/performance-float32-products.json, which benchmarks/step_bench.py wrote with that option.

usage: python scripts/performance_doc.py [--check]

``--check`` writes nothing and fails where the file is not what the formulas give.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalevec.cost import (
    H100,
    H200,
    Cost,
    ModelSizes,
    Schedule,
    cost,
    microbatches_in_flight,
    norm_bytes,
)
from megatron_scalevec.explain.display import in_bytes

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"
MEASURED = DOCUMENT.with_suffix(".json")
MEASURED_IN_FLOAT32 = DOCUMENT.with_name("performance-float32-products.json")
MADE_WITH = ("processor", "torch", "date", "builds", "rounds")
"""Of a file of measurements, what the text says besides its rows."""

UTILIZATION = 0.4
"""Share of the data sheet's operations per second that a stock step is taken to reach."""


@dataclass(frozen=True)
class Run:
    """A model and its layout; sizes and flags are those of a script in examples/megatron."""

    title: str
    script: str
    shape: ModelSizes
    ranks: int
    batch: int
    micro: int = 1
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    context: int = 1
    expert: int = 1

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        """Per rank and step."""
        return self.batch // (self.micro * self.data)

    @property
    def layout(self) -> str:
        """In words."""
        named = zip(("TP", "PP", "CP", "EP"), (self.tensor, self.pipeline, self.context, self.expert))
        parts = [f"{name}{size}" for name, size in named if size > 1]
        return ", ".join([" ".join(parts)] * bool(parts) + [f"{self.ranks} ranks, {self.microbatches}"])

    def step_seconds(self, flops_per_second: float) -> float:
        """Of a stock step, from its arithmetic alone."""
        flops = self.shape.flops_per_token() * self.batch * self.shape.sequence
        return flops / self.ranks / (UTILIZATION * flops_per_second)

    def schedule(self, state_shards: int) -> Schedule:
        """Of the first pipeline stage, where most microbatches are in flight."""
        flying = microbatches_in_flight(self.microbatches, 0, self.pipeline, self.chunks)
        return Schedule(self.microbatches, flying, state_shards=state_shards)

    def cost(self, execution: str) -> Cost:
        """Of one rank of the first stage, ``unified`` in bf16 with the distributed optimizer."""
        shards = self.data * self.context
        dense, experts = self.shape.unified(self.shape.layers // self.pipeline, self.tensor, self.expert)
        found = cost(dense, self.schedule(shards), execution)
        if experts.weights:
            # Expert-parallel ranks are taken from the data-parallel ones; TP is 1 for experts here.
            found += cost(experts, self.schedule(shards * self.tensor // self.expert), execution)
        return found


RUNS = (
    Run(
        "1B of the paper",
        "paper.sh",
        ModelSizes(22, 1792, 14, 14, 128, 4778, 50304, 2048),
        ranks=8,
        batch=512,
        micro=8,
    ),
    Run(
        "Llama-3 8B",
        "llama3-8b.sh",
        ModelSizes(32, 4096, 32, 8, 128, 14336, 128256, 8192),
        ranks=8,
        batch=512,
        tensor=2,
    ),
    Run(
        "Llama-3 70B",
        "llama3-70b.sh",
        ModelSizes(80, 8192, 64, 8, 128, 28672, 129024, 8192),
        ranks=128,
        batch=1024,
        tensor=8,
        pipeline=4,
        chunks=4,
        context=2,
    ),
    Run(
        "Mixtral 8x7B",
        "mixtral-8x7b.sh",
        ModelSizes(32, 4096, 32, 8, 128, 14336, 32000, 4096, experts=8, chosen=2),
        ranks=64,
        batch=1024,
        pipeline=4,
        expert=8,
    ),
)

MODES = (("optimizer", "in the optimizer"), ("autograd", "`autograd`"))


def traffic_rows() -> list[str]:
    """Bytes, and their time beside a step's, on both devices."""
    rows = []
    for run in RUNS:
        for mode, label in MODES:
            found = run.cost(mode)
            cells = [f"{run.title}, {run.layout}", label]
            cells += [in_bytes(found.fold_per_step), in_bytes(found.split_per_step)]
            for device in (H100, H200):
                seconds = found.added_per_step / device.bytes_per_second
                share = seconds / run.step_seconds(device.flops_per_second)
                cells += [f"{1000 * seconds:.2f} ms", f"{100 * share:.3f} %"]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def memory_rows() -> list[str]:
    """What is added on one rank."""
    rows = []
    for run in RUNS:
        for mode, label in MODES:
            found = run.cost(mode)
            cells = [run.title, label, in_bytes(found.parameters_and_state)]
            cells += [in_bytes(part) for part in (found.index_maps, found.tables, found.folded_weights)]
            cells.append(f"{100 * found.beside_the_vectors / H100.memory:.3f} %")
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def norm_rows() -> list[str]:
    """The norms of dual-norm on one rank of the first stage."""
    rows = []
    for run in RUNS:
        tokens = run.batch * run.shape.sequence // run.data // run.context
        channels = run.shape.qkv_rows // run.tensor * run.shape.layers // run.pipeline
        cells = [run.title]
        for apart in (False, True):
            seconds = norm_bytes(tokens * channels, gamma_apart=apart) / H100.bytes_per_second
            share = seconds / run.step_seconds(H100.flops_per_second)
            cells += [f"{1000 * seconds:.1f} ms", f"{100 * share:.2f} %"]
        # Forward kernels of a step: three norms for each layer and microbatch, or one.
        layers = run.shape.layers // run.pipeline * run.microbatches
        cells.append(f"{3 * layers:,} or {layers:,}")
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def step_rows() -> list[str]:
    """The stock steps that shares are taken of."""
    rows = []
    for run in RUNS:
        flops = run.shape.flops_per_token() * run.batch * run.shape.sequence / run.ranks
        added = 100 * run.cost("optimizer").flops_per_step / flops
        cells = [run.title, f"`examples/megatron/{run.script}`", f"{run.batch * run.shape.sequence:,}"]
        cells += [f"{flops / 1e15:.2f}", f"{run.step_seconds(H100.flops_per_second):.2f} s", f"{added:.1e} %"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def measured_rows(times: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One for each strategy and size."""

    def shown(row: Mapping[str, Any]) -> str:
        low, high = row["processor_quartiles"]
        return f"x{row['processor']:.3f} (x{low:.3f} to x{high:.3f})"

    points: dict[tuple[str, int, int, int], dict[str, Mapping[str, Any]]] = {}
    for row in times:
        point = row["strategy"], row["hidden"], row["sequence"], row["microbatches"]
        points.setdefault(point, {})[row["execution"]] = row
    for (strategy, hidden, sequence, microbatches), found in points.items():
        ours, theirs = found["optimizer"], found["autograd"]
        yield (
            f"| `{strategy}` | {hidden} | {sequence} | {microbatches} | {shown(ours)} | "
            f"{100 * ours['passes']:.2f} % | "
            f"{shown(theirs)} |"
        )


def document() -> str:
    """The whole file."""
    measured, in_float32 = (
        json.loads(path.read_text(encoding="utf-8")) for path in (MEASURED, MEASURED_IN_FLOAT32)
    )
    return TEXT.format(
        utilization=f"{100 * UTILIZATION:.0f}",
        peak=f"{H100.flops_per_second / 1e12:.0f}",
        h100=f"{H100.bytes_per_second / 1e12:g}",
        h200=f"{H200.bytes_per_second / 1e12:g}",
        memory=f"{H100.memory / 1e9:.0f}",
        traffic="\n".join(traffic_rows()),
        memories="\n".join(memory_rows()),
        steps="\n".join(step_rows()),
        norms="\n".join(norm_rows()),
        measured="\n".join(measured_rows(measured["times"])),
        in_float32="\n".join(measured_rows(in_float32["times"])),
        **{name: measured[name] for name in MADE_WITH},
        **{f"{name}_in_float32": in_float32[name] for name in MADE_WITH},
    )


TEXT = (Path(__file__).resolve().parent / "performance.md.in").read_text(encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Write the file, or look whether it is what would be written."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail where the file is old")
    options = parser.parse_args(argv)
    if options.check:
        if DOCUMENT.read_text(encoding="utf-8") == document():
            return 0
        print(f"{DOCUMENT} is not what the formulas give; run make performance-doc", file=sys.stderr)
        return 1
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
