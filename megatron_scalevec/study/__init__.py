"""``scalevec study``: strategies, optimizers and seeds compared on this machine, rates tuned for each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_scalevec.demo.process import quiet, require_matplotlib, required_versions
from megatron_scalevec.demo.text import Corpus, read_corpus, write_dataset
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.lifetime import Stopped, stopped_by_signals
from megatron_scalevec.study import options as _options
from megatron_scalevec.study.options import Options
from megatron_scalevec.study.store import Store

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a study, or go on with one; returns the exit code.

    Raises:
        ScaleVecError: Something cannot be done as asked.
    """
    from rich.console import Console

    options = _options.parse(sys.argv[1:] if argv is None else argv)
    console = Console(highlight=False)
    store = Store(options.out)
    try:
        with stopped_by_signals():
            if options.report_only:
                require_matplotlib("the report of a study")
                store.require_given(options)
                return _report(options, store, console)
            corpus = read_corpus(options.text, limit=options.text_bytes, seq_length=options.seq_length)
            return _study(options, store, corpus, required_versions("a study"), console)
    except OSError as error:
        raise ScaleVecError(
            f"--out {options.out}: the study stopped, as something cannot be read or written ({error}); what "
            "was done is kept, and the same command goes on with it once that is put right."
        ) from error
    except Stopped as stopped:
        print(
            "\nStopped; what was done is kept, and the same command goes on with it.",
            file=sys.stderr,
            flush=True,
        )
        return 128 + stopped.number


def _study(options: Options, store: Store, corpus: Corpus, versions: dict[str, str], console: Console) -> int:
    from megatron_scalevec.demo.runs import RunFailed, carry_out, look_at_machine
    from megatron_scalevec.study.display import StudyDisplay
    from megatron_scalevec.study.plan import cells, wanted
    from megatron_scalevec.study.running import JobQueue

    text = corpus.describe()
    at_most = max(len(wanted(options, {})), len(cells(options)) * len(options.seeds))
    machine = look_at_machine(options.run_options(1.0, options.steps), at_most, threads=1)
    store.check(options, text, versions)
    with store.owned() as descriptor:
        # Again: another study may have begun here meanwhile.
        store.check(options, text, versions)
        store.begin(options, text=text, versions=versions, machine=machine.describe())
        with quiet():
            write_dataset(corpus, store.folder / "data" / "text")
        queue = JobQueue(options, store, corpus.split)
        display = StudyDisplay(console, queue)
        queue.on_result = display.result
        console.print(
            f"Text: {corpus.source}: {corpus.training_bytes:,} bytes to train on and "
            f"{corpus.validation_bytes:,} held out. {machine.jobs} runs at a time.",
            soft_wrap=True,
            markup=False,
        )
        try:
            carry_out(queue, machine, display, keep_open=(descriptor,))
        except RunFailed as failed:
            _explain(failed, options)
            return 1
    return _report(options, store, console)


def _report(options: Options, store: Store, console: Console) -> int:
    from megatron_scalevec.study.report import write_study_report

    report = write_study_report(store)
    for entry in report["cells"]:
        if entry["verdict"]:
            console.print(entry["verdict"], markup=False, soft_wrap=True)
    for note in report["notes"]:
        console.print(note, markup=False, soft_wrap=True)
    console.print(f"{store.folder / 'report.md'}, report.json and pictures beside it", markup=False)
    return 0


def _explain(failed: Any, options: Options) -> None:
    from megatron_scalevec.demo.logs import failure_excerpt

    log = failed.run.reader.path
    for line in failure_excerpt(log, start=failed.run.log_start):
        print(f"  {line}", file=sys.stderr)
    print(
        f"scalevec study: the run {failed.run.name} {failed.reason}, so the study was stopped; what was done "
        f"is kept in {options.out}, and the same command goes on with it. Its log: {log}",
        file=sys.stderr,
        flush=True,
    )
