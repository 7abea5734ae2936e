"""The runs: what each is called with, and carrying them out side by side."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron_scalevec.demo import model
from megatron_scalevec.demo.display import Display
from megatron_scalevec.demo.logs import LogReader
from megatron_scalevec.demo.options import Options
from megatron_scalevec.lifetime import die_with_parent

__all__ = [
    "Machine",
    "Queue",
    "Run",
    "RunFailed",
    "carry_out",
    "failure",
    "index_cache",
    "look_at_machine",
    "plan",
    "train",
]

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10.0
_LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Machine:
    """What the runs share, and how it is divided."""

    cores: int
    gpus: tuple[str, ...]
    jobs: int
    threads: int

    def describe(self) -> dict[str, object]:
        """As JSON can hold it."""
        return {
            "device": "cuda" if self.gpus else "cpu",
            "gpus": len(self.gpus),
            "cores": self.cores,
            "jobs": self.jobs,
            "threads_per_rank": self.threads,
        }

    def environment(self, slot: int, ranks: int) -> dict[str, str]:
        """Environment of a run in one of the ``jobs`` slots."""
        env = {
            key: value
            for key, value in os.environ.items()
            # A run is a world of its own, even if the demo was started by a launcher.
            if key not in _LAUNCHER_VARIABLES and not key.startswith("TORCHELASTIC_")
        }
        env.update(PYTHONUNBUFFERED="1", OMP_NUM_THREADS=str(self.threads))
        if self.gpus:
            # Megatron asks for this where communication and computation share a GPU.
            env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
            if len(self.gpus) >= self.jobs * ranks:
                mine = self.gpus[slot * ranks : (slot + 1) * ranks]
                env["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return env


def look_at_machine(options: Options, runs: int, threads: int | None = None) -> Machine:
    """How many runs at a time, with how many threads each: as many as there are cores for, or ``threads``."""
    import torch

    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = tuple(visible[:count] if visible else map(str, range(count)))
    room = (len(gpus) or cores) // options.tensor_parallel
    jobs = min(runs, options.jobs or max(1, room))
    return Machine(cores, gpus, jobs, threads or max(1, cores // (jobs * options.tensor_parallel)))


@dataclass
class Run:
    """One run and what is known of it."""

    name: str
    strategy: str
    seed: int
    command: list[str]
    reader: LogReader
    audit: Path
    started: float | None = None
    seconds: float | None = None
    process: subprocess.Popen | None = field(default=None, repr=False)
    log_start: int = 0
    """Where its log begins, behind those of earlier starts."""


class RunFailed(Exception):
    """A run ended without a result."""

    def __init__(self, run: Run, reason: str) -> None:
        super().__init__(f"{run.name} {reason}")
        self.run = run
        self.reason = reason


def plan(options: Options, *, split: str, folder: Path, cache: Path) -> list[Run]:
    """All runs; those that are compared with each other stand next to each other."""
    runs = []
    for seed in options.seeds:
        for strategy in options.strategies:
            name = f"{strategy}-seed{seed}"
            runs.append(
                Run(
                    name=name,
                    strategy=strategy,
                    seed=seed,
                    command=model.command(
                        options,
                        strategy=strategy,
                        seed=seed,
                        split=split,
                        folder=folder,
                        name=name,
                        # Megatron writes its index there; runs side by side must not share one.
                        cache=cache / name,
                    ),
                    reader=LogReader(folder / "logs" / f"{name}.log"),
                    audit=folder / "audits" / f"{name}.json",
                )
            )
    return runs


class Queue(Protocol):
    """Where :func:`carry_out` gets its runs from."""

    def next(self) -> Run | None:
        """The next run to start; None while there is none."""

    def ended(self, run: Run, code: int) -> None:
        """A run's process has ended with this exit code; an exception ends all others."""


class _AllOrNothing:
    """Runs in their order, of which none may fail."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._waiting = list(runs)

    def next(self) -> Run | None:
        return self._waiting.pop(0) if self._waiting else None

    def ended(self, run: Run, code: int) -> None:
        if reason := failure(run, code):
            raise RunFailed(run, reason)


def train(runs: Sequence[Run], options: Options, machine: Machine, display: Display) -> None:
    """Carry out the runs; whatever happens, no process of theirs is left.

    Raises:
        RunFailed: One of them failed. The others were ended.
    """
    carry_out(_AllOrNothing(runs), machine, display, ranks=options.tensor_parallel)


def carry_out(
    queue: Queue, machine: Machine, display: Display, *, ranks: int = 1, keep_open: Sequence[int] = ()
) -> None:
    """Start what the queue gives, side by side, until it gives nothing more and all have ended.

    Whatever happens, no process of theirs is left. ``keep_open`` are file descriptors that the runs hold too.
    """
    active: dict[int, Run] = {}
    with display, _ended_at_exit(active):
        while True:
            for slot in range(machine.jobs):
                if slot not in active and (run := queue.next()) is not None:
                    active[slot] = run
                    _start(run, machine.environment(slot, ranks), keep_open)
                    display.started(run)
            if not active:
                return
            time.sleep(_POLL_SECONDS)
            for slot, run in list(active.items()):
                code = run.process.poll()
                if run.reader.poll():
                    display.progress(run)
                if code is not None:
                    run.seconds = time.monotonic() - run.started
                    del active[slot]
                    queue.ended(run, code)
                    display.finished(run)


def _start(run: Run, env: dict[str, str], keep_open: Sequence[int]) -> None:
    run.started = time.monotonic()
    # A run that goes on goes on with its log.
    with open(run.reader.path, "ab") as log:
        run.log_start = log.tell()
        log.write((shlex.join(run.command) + "\n").encode())
        log.flush()
        # A session of its own: Ctrl-C reaches the demo, which then ends the whole group.
        run.process = subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=env,
            pass_fds=keep_open,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def failure(run: Run, code: int) -> str | None:
    """Why a run whose process ended with this exit code has no result; None if it has one."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = str(-code)
        hint = "; the machine may be out of memory" if -code == signal.SIGKILL else ""
        return f"was ended by signal {name}{hint}"
    if code:
        return f"failed with exit code {code}"
    if run.reader.final_validation is None:
        return "ended without a validation loss in its log"
    if run.strategy != "stock" and not run.audit.is_file():
        return "ended without an audit"
    return None


@contextlib.contextmanager
def _ended_at_exit(active: dict[int, Run]) -> Iterator[None]:
    try:
        yield
    finally:
        processes = [run.process for run in active.values() if run.process is not None]
        for process in processes:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_SECONDS
        for process in processes:
            # torchrun ends its ranks when it is told to end.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal_group(process, signal.SIGKILL)
            process.wait()


def _signal_group(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


@contextlib.contextmanager
def index_cache() -> Iterator[Path]:
    """A folder for Megatron's dataset indexes, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="scalevec-demo-") as folder:
        yield Path(folder)
