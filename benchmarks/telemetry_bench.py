#!/usr/bin/env python3
"""What --scalevec-log-interval costs, on the CPU.

usage: python benchmarks/telemetry_bench.py [--layers 4] [--hidden 512] [--microbatches 4] [--rounds 9]

One process on one thread; two trainers of one strategy take their steps in turn, one of them logging every
step: statistics, a line of JSON, and scalars to TensorBoard. The order is turned around from round to round.
A line has the median over rounds of the ratio of the two in processor time, with its quartiles, and what is
left of the difference where every N-th step is logged; and the same from the logging calls alone, timed where
they are made, which steps disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from timing import interleaved, ratio
from training import Sizes, Trainer, start_parallel

EXECUTIONS = ("optimizer", "autograd")


class LoggingTrainer(Trainer):
    """A trainer that logs every step. ``seconds``: processor time of the logging of each."""

    def __init__(self, sizes: Sizes, strategy: str, execution: str, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        from megatron_scalevec.telemetry import JsonLines, Telemetry

        super().__init__(sizes, strategy, execution)
        self._telemetry = Telemetry([self.model], self.optimizer)
        self._file = JsonLines(folder / "telemetry.jsonl", 0)
        self._writer = SummaryWriter(log_dir=str(folder))
        self._steps = 0
        self.seconds: list[float] = []

    def close(self) -> None:
        """Write what TensorBoard has not written yet."""
        self._writer.close()

    def parts_of_a_step(self):
        """As the base class's, with the logging in the first and the last part."""
        from megatron_scalevec.telemetry import write

        start = time.process_time()
        self._telemetry.before_step()
        spent = time.process_time() - start
        *parts, last = range(self.sizes.microbatches + 1)
        step = super().parts_of_a_step()
        for _ in parts:
            next(step)
            yield
        next(step)
        start = time.process_time()
        self._steps += 1
        write(self._steps, self._telemetry.after_step(), file=self._file, tensorboard=self._writer)
        self.seconds.append(spent + time.process_time() - start)
        yield last


def times(sizes: Sizes, strategy: str, rounds: int, interval: int) -> list[dict[str, Any]]:
    """One row per execution."""
    rows = []
    for execution in EXECUTIONS:
        with tempfile.TemporaryDirectory() as folder:
            logging = LoggingTrainer(sizes, strategy, execution, Path(folder))
            trainers = {"plain": Trainer(sizes, strategy, execution), "logging": logging}
            for trainer in trainers.values():
                trainer.step()  # what is made once is made now
            logging.seconds.clear()
            taken: dict[str, list[float]] = {name: [] for name in trainers}
            for index in range(rounds):
                names = list(trainers) if index % 2 == 0 else list(trainers)[::-1]
                for name, (seconds, _) in interleaved({name: trainers[name] for name in names}).items():
                    taken[name].append(seconds)
            logging.close()
        own, quartiles = ratio(taken["logging"], taken["plain"])
        step, logged = statistics.median(taken["plain"]), statistics.median(logging.seconds)
        rows.append(
            {
                "execution": execution,
                "step_seconds": step,
                "logging_seconds": logged,
                "ratio": own,
                "quartiles": quartiles,
                "percent_by_ratio": 100 * (own - 1) / interval,
                "percent": 100 * logged / step / interval,
            }
        )
    return rows


def describe(row: dict[str, Any], interval: int) -> str:
    """One line."""
    low, high = row["quartiles"]
    return (
        f"{row['execution']:9} step {row['step_seconds']:.3f} s, logging {row['logging_seconds']:.4f} s; "
        f"logging every step x{row['ratio']:.4f} (x{low:.4f} to x{high:.4f}), every {interval} steps "
        f"{row['percent_by_ratio']:+.4f} %; by the calls alone {row['percent']:+.4f} %"
    )


def main(argv: list[str] | None = None) -> int:
    """See the module's text."""
    from megatron_scalevec import cpu
    from megatron_scalevec.integration.arguments import LOG_INTERVAL

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--strategy", default="unified")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--interval", type=int, default=LOG_INTERVAL)
    parser.add_argument("--json", type=Path, help="write the results to this file as well")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cpu.install()
    start_parallel("gloo")
    sizes = Sizes(options.layers, options.hidden, microbatches=options.microbatches)
    rows = times(sizes, options.strategy, options.rounds, options.interval)
    for row in rows:
        print(describe(row, options.interval), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
