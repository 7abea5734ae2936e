"""Steps of several trainers in turn, so that whatever else the machine does hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from training import Trainer, synchronize

__all__ = ["PassTimer", "interleaved", "ratio"]

Seconds = tuple[float, float]
"""Processor time and wall time."""


def interleaved(trainers: dict[str, Trainer]) -> dict[str, Seconds]:
    """One step of each, microbatch by microbatch in turn: what each took."""
    taken = {name: (0.0, 0.0) for name in trainers}
    parts = {name: trainer.parts_of_a_step() for name, trainer in trainers.items()}
    while parts:
        for name in list(parts):
            device = trainers[name].device
            synchronize(device)
            start = time.process_time(), time.perf_counter()
            going = next(parts[name], parts) is None
            synchronize(device)
            spent = time.process_time() - start[0], time.perf_counter() - start[1]
            taken[name] = taken[name][0] + spent[0], taken[name][1] + spent[1]
            if not going:
                del parts[name]
    return taken


def ratio(own: Sequence[float], stock: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median of own / stock over rounds, and its quartiles."""
    ratios = sorted(a / b for a, b in zip(own, stock))
    return statistics.median(ratios), (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])


class PassTimer:
    """Times the passes of a trainer's engine where they are called.

    Attributes:
        host: Processor time of every pass since :meth:`clear`, in seconds, by its name.
        device: The same on the GPU; empty on a CPU.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.clear()
        self._cuda = trainer.device == "cuda"
        self._events: list = []
        engine = trainer.engine
        for name in ("split", "write"):
            setattr(engine, name, self._timed(name, getattr(engine, name)))

    def clear(self) -> None:
        """Forget what was timed."""
        self.host: dict[str, list[float]] = {"split": [], "write": []}
        self._events = []

    @property
    def device(self) -> dict[str, list[float]]:
        """See the class."""
        found: dict[str, list[float]] = {"split": [], "write": []}
        for name, before, after in self._events:
            after.synchronize()
            found[name].append(before.elapsed_time(after) / 1000)
        return found if self._cuda else {}

    def _timed(self, name, function):
        def call(*args):
            start = time.process_time()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._cuda else []
            if events:
                events[0].record()
            function(*args)
            if events:
                events[1].record()
                self._events.append((name, *events))
            self.host[name].append(time.process_time() - start)

        return call
