"""The command line of ``scalevec compare``."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.compare.comparison import compare
from megatron_scalevec.compare.reading import read_runs
from megatron_scalevec.compare.rendering import render, table
from megatron_scalevec.compare.run import Run, visible
from megatron_scalevec.compare.statistics import LEVELS
from megatron_scalevec.demo.folder import REPORT
from megatron_scalevec.demo.process import quiet, require_matplotlib
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.store import DESCRIPTION

__all__ = ["run"]

# Where output is no terminal its width is a guess; the table needs this much.
_PLAIN_WIDTH = 150
_OWN = (REPORT, DESCRIPTION)


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(
        prog="scalevec compare",
        description=(
            "Compare runs that have been trained: loss at the end and its interval over seeds, tokens to "
            "equal loss, step time and memory, as a table, a picture and a page."
        ),
        epilog=(
            "RUN is Megatron's log (or rank 0's part of it), a folder of --tensorboard-dir, a file of JSON "
            "lines (step, loss, and of tokens, validation_loss, step_time_ms, memory_bytes, seed what there "
            "is), or a folder of scalevec demo or scalevec study, which holds several. Runs of one label are "
            "repetitions with other seeds; without a label, a run is called by its strategy, or by its file."
        ),
    )
    parser.add_argument("runs", metavar="[LABEL=]RUN", nargs="+", help="two runs at least")
    parser.add_argument(
        "--baseline", metavar="LABEL", help="compare with this one (default: stock, or the first)"
    )
    parser.add_argument(
        "--by",
        choices=("validation", "training"),
        help="the loss to take at the end (default: validation, where all runs have one after training)",
    )
    parser.add_argument(
        "--confidence",
        metavar="PERCENT",
        type=float,
        default=95.0,
        help="of the intervals (default: %(default)g)",
    )
    parser.add_argument(
        "--seq-length", metavar="N", type=int, help="tokens of a sequence, for runs that do not say"
    )
    parser.add_argument("--png", metavar="FILE", type=Path, help="write the picture there")
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="write a page there that needs no other file"
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there")
    parser.add_argument("--title", default="Comparison of runs", help="of picture and page")
    return parser


def run(argv: Sequence[str]) -> int:
    """Carry out ``scalevec compare``; returns the exit code.

    Raises:
        ScaleVecError: Something cannot be done as asked; nothing was written.
    """
    args = _parser().parse_args(list(argv))
    lowest, highest = (100 * level for level in LEVELS)
    if not lowest <= args.confidence <= highest:
        raise ScaleVecError(
            f"--confidence {args.confidence:.10g} must be a percentage from {lowest:g} to {highest:g}."
        )
    if args.seq_length is not None and args.seq_length < 1:
        raise ScaleVecError(f"--seq-length {args.seq_length} must be at least 1.")
    outputs = [path for path in (args.png, args.html, args.json) if path is not None]
    for path in outputs:
        _require_writable(path)
    _require_apart(outputs, [_named(text)[1] for text in args.runs])
    if args.png or args.html:
        require_matplotlib("scalevec compare")
    with quiet():
        found = [one for text in args.runs for one in _read(text, args.seq_length)]
    comparison = compare(found, args.baseline, by=args.by, level=args.confidence / 100)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    console.print(table(comparison))
    for row in comparison.rows:
        if row.verdict:
            console.print(row.verdict, markup=False, soft_wrap=True)
    for note in comparison.notes:
        console.print(note, markup=False, soft_wrap=True)
    try:
        render(comparison, png=args.png, page=args.html, figures=args.json, title=visible(args.title))
    except OSError as error:
        raise ScaleVecError(f"nothing was written: {error}.") from None
    return 0


def _read(text: str, seq_length: int | None) -> list[Run]:
    label, path = _named(text)
    return read_runs(path, label, seq_length)


def _named(text: str) -> tuple[str | None, str]:
    """Label and path of ``[LABEL=]RUN``; both may hold an equals sign themselves."""
    if not os.path.exists(text):
        for index in (index for index, sign in enumerate(text) if sign == "=" and index):
            if os.path.exists(text[index + 1 :]):
                return text[:index].strip() or None, text[index + 1 :]
    return None, text


def _require_apart(outputs: Sequence[Path], inputs: Sequence[str]) -> None:
    """No output may take the place of a run, or of another output."""
    taken = {os.path.realpath(path): f"the run {path}" for path in inputs}
    for path in inputs:
        # What a folder of a demo or study is read from.
        taken |= {os.path.realpath(os.path.join(path, name)): f"of the run {path}" for name in _OWN}
    for path in outputs:
        place = os.path.realpath(path)
        if place in taken:
            raise ScaleVecError(f"{path} cannot be written: it is {taken[place]}; give another file.")
        taken[place] = "another output as well"


def _require_writable(path: Path) -> None:
    taken = os.path.exists(path) and not os.path.isfile(path)
    if taken or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise ScaleVecError(f"{path} cannot be written: give a file in a folder that exists.")
