"""``scalevec demo``: a small GPT under several strategies, on this machine, in a few minutes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_scalevec.demo import options as _options
from megatron_scalevec.demo.folder import REPORT, ResultFolder, check_place
from megatron_scalevec.demo.process import quiet, required_versions
from megatron_scalevec.demo.text import Corpus, read_corpus, write_dataset
from megatron_scalevec.files import write_files
from megatron_scalevec.lifetime import Stopped, stopped_by_signals

if TYPE_CHECKING:
    from rich.console import Console

    from megatron_scalevec.demo.options import Options
    from megatron_scalevec.demo.runs import Machine, Run

__all__ = ["main"]

_PICTURE = "loss.png"
# Where output is no terminal its width is a guess; the table needs this much.
_PLAIN_WIDTH = 110


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code.

    Raises:
        ScaleVecError: Something cannot be done as asked; nothing was created.
    """
    from rich.console import Console

    began = time.monotonic()
    options = _options.parse(sys.argv[1:] if argv is None else argv)
    check_place(options.out)
    corpus = read_corpus(options.text, limit=options.text_bytes, seq_length=options.seq_length)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    try:
        with stopped_by_signals():
            versions = required_versions("the demo")
            return _demo(options, corpus, versions, console, began)
    except Stopped as stopped:
        print("\nStopped; the runs were ended and nothing was kept.", file=sys.stderr, flush=True)
        return 128 + stopped.number


def _demo(options: Options, corpus: Corpus, versions: dict[str, str], console: Console, began: float) -> int:
    from megatron_scalevec.demo import runs as _runs
    from megatron_scalevec.demo.display import make_display

    machine = _runs.look_at_machine(options, len(options.strategies) * len(options.seeds))
    _introduce(options, corpus, machine, console)
    with ResultFolder(options.out) as folder, _runs.index_cache() as cache:
        with quiet():
            write_dataset(corpus, folder.path / "data" / "text")
        planned = _runs.plan(options, split=corpus.split, folder=folder.path, cache=cache)
        try:
            _runs.train(planned, options, machine, make_display(console, options.steps))
        except _runs.RunFailed as failure:
            shutil.rmtree(folder.path / "data", ignore_errors=True)
            _explain(failure, folder.keep("failed"))
            return 1
        report = _report(planned, options, corpus, machine, versions, folder.path, cache)
        _finish(report, folder)
    _conclude(report, options, time.monotonic() - began, console)
    return 0


def _introduce(options: Options, corpus: Corpus, machine: Machine, console: Console) -> None:
    if options.baseline_added:
        console.print(f"{_options.BASELINE} was added: it is what the others are compared with.")
    console.print(
        f"Text: {corpus.source}: {corpus.training_bytes:,} bytes to train on and "
        f"{corpus.validation_bytes:,} held out, from {corpus.files} files.",
        soft_wrap=True,
        markup=False,
    )
    count = len(options.strategies) * len(options.seeds)
    if machine.jobs == 1:
        order = "one after another, " if count > 1 else ""
    else:
        order = "side by side, " if machine.jobs == count else f"{machine.jobs} at a time, "
    share = "on the GPU" if machine.gpus else f"with {_plural(machine.threads, 'thread')}"
    each = "each" if options.tensor_parallel == 1 else f"for each of {options.tensor_parallel} ranks"
    console.print(
        f"Training {_plural(count, 'run')} of {options.steps} steps, {order}{share} {each}; "
        "Megatron takes a moment to start.",
        soft_wrap=True,
    )


def _plural(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _report(
    planned: Sequence[Run],
    options: Options,
    corpus: Corpus,
    machine: Machine,
    versions: dict[str, str],
    folder: Path,
    cache: Path,
) -> dict[str, Any]:
    from megatron_scalevec.demo.report import Result, make_report

    results = []
    for run in planned:
        log = run.reader
        audit = json.loads(run.audit.read_text(encoding="utf-8")) if run.audit.is_file() else None
        results.append(
            Result(
                name=run.name,
                strategy=run.strategy,
                seed=run.seed,
                command=_repeatable(run.command, folder, cache),
                training=log.training,
                validation=log.validation,
                final_validation_loss=log.final_validation,
                step_times_ms=log.step_times,
                seconds=run.seconds,
                parameters_logged=log.parameters,
                audit=audit,
            )
        )
    return make_report(
        results,
        options,
        text=corpus.describe(),
        machine=machine.describe(),
        versions=versions,
    )


def _repeatable(command: Sequence[str], folder: Path, cache: Path) -> tuple[str, ...]:
    """The command as it can be given again inside the result folder."""
    parts = [part.replace(str(folder), ".").replace(str(cache), "./data/cache") for part in command]
    return ("python", *parts[1:])


def _finish(report: dict[str, Any], folder: ResultFolder) -> None:
    from megatron_scalevec.demo.picture import draw
    from megatron_scalevec.demo.report import as_json

    with quiet():
        picture = draw(report)
    write_files({folder.path / _PICTURE: picture, folder.path / REPORT: as_json(report)})
    folder.install()


def _conclude(report: dict[str, Any], options: Options, seconds: float, console: Console) -> None:
    from megatron_scalevec.demo.report import table

    console.print()
    console.print(table(report))
    out = options.out
    console.print(
        f"\n{out / REPORT}   everything above, and the curves\n"
        f"{out / _PICTURE}      the curves drawn\n"
        f"{out}/audits, {out}/logs, {out}/data\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(f"{report['note']}", soft_wrap=True)
    if report["machine"]["jobs"] > 1:
        console.print("Step times were taken while runs shared the machine.", soft_wrap=True)
    console.print(f"Took {int(seconds) // 60} min {int(seconds) % 60} s.")


def _explain(failure: Any, kept: Path) -> None:
    from megatron_scalevec.demo.logs import diverged, failure_excerpt

    log = kept / "logs" / failure.run.reader.path.name
    lines = [f"  {line}" for line in failure_excerpt(log)]
    if lines:
        print("\n".join(lines), file=sys.stderr)
    hint = " It diverged: try a lower --learning-rate." if diverged(lines) else ""
    print(
        f"scalevec demo: the run {failure.run.name} {failure.reason}, so the demo was stopped."
        f"{hint} Its log: {log}",
        file=sys.stderr,
        flush=True,
    )
