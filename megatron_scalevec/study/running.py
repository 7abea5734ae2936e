"""Carrying a study out: every run with checkpoints, a result when it has ended."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_scalevec.checkpoint.layout import TRACKER_FILE, whole_iterations
from megatron_scalevec.demo import model
from megatron_scalevec.demo.logs import LogReader, diverged, failure_excerpt
from megatron_scalevec.demo.runs import Run, RunFailed, failure
from megatron_scalevec.study.options import Options
from megatron_scalevec.study.plan import Job, wanted
from megatron_scalevec.study.store import Store

__all__ = ["JobQueue", "prepare", "run_of"]

_EVALUATED_TOKENS = 128 * 1024


def run_of(job: Job, options: Options, store: Store, split: str) -> Run:
    """A job as a process: its command goes on from its last checkpoint where there is one."""
    settings = options.run_options(job.rate, job.steps)
    work = store.work(job.name)
    checkpoints = work / "checkpoints"
    command = model.command(
        settings,
        strategy=job.cell.arm.strategy,
        seed=job.seed,
        split=split,
        folder=store.folder,
        name=job.name,
        cache=work / "cache",
        more={
            **job.cell.arm.flags(),
            "optimizer": job.cell.optimizer,
            # Megatron evaluates after training; what is compared is measured there, on more text.
            "eval-interval": job.steps + 1,
            "eval-iters": max(1, min(job.steps, _EVALUATED_TOKENS // settings.tokens_per_step)),
            "save": checkpoints,
            "load": checkpoints,
            "save-interval": options.save_interval,
        },
    )
    return Run(
        name=job.name,
        strategy=job.cell.arm.strategy,
        seed=job.seed,
        command=command,
        reader=LogReader(store.folder / "logs" / f"{job.name}.log"),
        audit=store.folder / "audits" / f"{job.name}.json",
    )


@dataclass
class JobQueue:
    """The runs that a study wants, as its results come in."""

    options: Options
    store: Store
    split: str
    on_result: Callable[[Job, dict[str, Any]], None] = lambda job, result: None
    active: dict[str, tuple[Job, Run]] = field(default_factory=dict)
    losses: dict[str, float] = field(init=False)
    """As :meth:`Store.losses` gives them: read once, because it is asked several times a second."""

    def __post_init__(self) -> None:
        self.losses = self.store.losses()

    def next(self) -> Run | None:
        """The next run that nobody is at."""
        for job in wanted(self.options, self.losses):
            if job.name not in self.active:
                run = run_of(job, self.options, self.store, self.split)
                prepare(self.store.work(job.name))
                self.active[job.name] = job, run
                return run
        return None

    def ended(self, run: Run, code: int) -> None:
        """Keep the result. A run that diverged has one too.

        Raises:
            RunFailed: It failed otherwise. What was done so far is kept.
        """
        job, _ = self.active.pop(run.name)
        reason = failure(run, code)
        if reason and not diverged(failure_excerpt(run.reader.path, start=run.log_start)):
            raise RunFailed(run, reason)
        result = _result(job, run, None if reason else run.reader.final_validation)
        self.store.add(result)
        final = result["final_validation_loss"]
        self.losses[job.name] = math.nan if final is None else final
        self.on_result(job, result)


def prepare(work: Path) -> None:
    """Make a run's folder, or put right what a killed run has left there.

    An index that it was writing is no good any more. Megatron names the latest checkpoint in a file that it
    empties before it writes it, once the checkpoint is whole; found empty, it would end the next run.
    """
    shutil.rmtree(work / "cache", ignore_errors=True)
    checkpoints = work / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    tracker = checkpoints / TRACKER_FILE
    if tracker.is_file() and not tracker.read_text().strip():
        tracker.unlink()
        if whole := whole_iterations(checkpoints):
            tracker.write_text(str(whole[-1]))


def _result(job: Job, run: Run, final: float | None) -> dict[str, Any]:
    log = run.reader
    audit = json.loads(run.audit.read_text(encoding="utf-8")) if run.audit.is_file() else {}
    return {
        "name": job.name,
        "stage": job.stage,
        "optimizer": job.cell.optimizer,
        "arm": job.cell.arm.label,
        "strategy": job.cell.arm.strategy,
        "learning_rate": job.rate,
        "seed": job.seed,
        "steps": job.steps,
        "final_validation_loss": final if final is None or math.isfinite(final) else None,
        "parameters_logged": log.parameters,
        "parameters_added": audit.get("parameters_added", 0),
        "training": [[step, log.training[step]] for step in sorted(log.training)],
    }
