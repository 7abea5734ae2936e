"""``scalevec explain``: what a launch line would build, without GPUs and without training.

Megatron's own parser and validation read the arguments, with the hooks of a real run in place, and
Megatron's own code builds the model, rank by rank on the meta device in a process group that only pretends
to have the other ranks. So what is shown is what a run would build, at any size, in seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.cost import H100_BYTES_PER_SECOND
from megatron_scalevec.errors import USAGE_EXIT_CODE, ScaleVecError
from megatron_scalevec.explain.launch_line import Launch, launch_in_command, launch_in_script

if TYPE_CHECKING:
    from megatron_scalevec.explain.contents import Explanation

__all__ = ["explain", "main"]

# Every rank's place in every group is looked at; a mistyped number would fill the memory.
_MOST_RANKS = 2**20
# From the slowest memory to far beyond the fastest, so that times are numbers.
_BANDWIDTHS = (0.001, 1e9)


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code.

    Raises:
        ScaleVecError: The arguments cannot be explained, or a run with them would be refused.
    """
    arguments = list(argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    own, sides = _sides(arguments[:split])
    options = _parser().parse_args(own)
    options.diff = sides
    if options.support:
        from megatron_scalevec.explain.display import support_as_json, support_table

        print(support_as_json() if options.json else support_table())
        return 0
    launch = _launch(options, arguments[split + 1 :] if split < len(arguments) else None)
    if options.diff:
        return _compare(launch, options)
    try:
        found = _explain(launch, options)
    except ScaleVecError as error:
        if options.json:
            print(json.dumps({"refused": str(error)}, indent=2))
        raise
    if options.json:
        print(found.to_json())
    else:
        from megatron_scalevec.explain.display import text

        print(text(found))
    return 0 if not found.problems() else USAGE_EXIT_CODE


def explain(
    arguments: Sequence[str],
    *,
    rank: int = 0,
    world_size: int | None = None,
    every_rank: bool = False,
    bytes_per_second: float = H100_BYTES_PER_SECOND,
) -> Explanation:
    """Build what a run would build, and look at it. This process is good for nothing else afterwards.

    Args:
        arguments: Megatron's, ``--scalevec-*`` included, as in a launch line; the script's name may stand
            before them and is not looked at, and so may a launcher with its options (``torchrun ...``).
        rank: Whose part of the model is shown.
        world_size: Number of ranks; by default the launcher's, else the smallest that the parallel sizes
            allow.
        every_rank: Build every rank of one copy of the model instead of one of each pipeline stage.
        bytes_per_second: Memory bandwidth, for the time of folds.

    Returns:
        The model and what was found out about it, :mod:`megatron_scalevec.explain.contents`.

    Raises:
        ScaleVecError: Megatron or this package would refuse the run.
    """
    launch = launch_in_command(arguments)
    return _look(launch, rank, world_size, every_rank, bytes_per_second)


def _look(launch: Launch, rank: int, world_size: int | None, every_rank: bool, bytes_per_second: float):
    from megatron_scalevec.explain.dry_run import quietly, read_arguments

    with quietly():
        run = read_arguments(
            list(launch.arguments),
            rank,
            launch.world_size if world_size is None else world_size,
            launched=world_size is None,
            with_script=bool(launch.script),
        )
        run.notes[:0] = launch.notes
        # Imports Megatron's layers, for which CPU mode must be on.
        from megatron_scalevec.explain.contents import look_at

        return look_at(run, every_rank=every_rank, bytes_per_second=bytes_per_second)


def _launch(options: argparse.Namespace, behind: list[str] | None) -> Launch:
    if options.script is None:
        if behind is None:
            raise ScaleVecError(
                "name a launch script, or put the arguments of the run behind --, as in: scalevec explain -- "
                "pretrain_gpt.py --num-layers 22 ...; scalevec explain --help says more."
            )
        return launch_in_command(behind)
    if options.script.endswith(".py"):
        raise ScaleVecError(
            f"{options.script} is a training script; put it and its arguments behind --, as in: scalevec "
            "explain -- pretrain_gpt.py --num-layers 22 ..."
        )
    found = launch_in_script(options.script, options.words, os.environ)
    return dataclasses.replace(found, arguments=(*found.arguments, *(behind or ())))


def _explain(launch: Launch, options: argparse.Namespace):
    return _look(launch, options.rank, options.world_size, options.every_rank, options.memory_bandwidth * 1e9)


def _compare(launch: Launch, options: argparse.Namespace) -> int:
    from megatron_scalevec.explain.compare import changed, differences, in_a_process_of_its_own, side

    def record(text: str) -> dict:
        run = dataclasses.replace(launch, arguments=tuple(changed(launch.arguments, side(text))))
        return in_a_process_of_its_own(lambda: _explain(run, options).to_json())

    for text in options.diff:
        side(text)
    found = differences(*map(record, options.diff))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        from megatron_scalevec.explain.display import comparison_table

        def shown(value) -> str:
            return "-" if value is None else f"{value:,}" if isinstance(value, (int, float)) else str(value)

        rows = [(name, shown(a), shown(b)) for name, (a, b) in found.items()]
        print(comparison_table(rows, tuple(options.diff)))
    return USAGE_EXIT_CODE if "refused" in found else 0


def _sides(words: list[str]) -> tuple[list[str], list[str] | None]:
    """Take ``--diff A B`` out of the words, also where it is cut short as argparse allows: that would take a
    flag in the place of A for its own."""
    place = _place_of_diff(words)
    if place is None:
        return words, None
    sides = words[place + 1 : place + 3]
    if len(sides) < 2:
        raise ScaleVecError(
            "scalevec explain: --diff takes two strategies, or two sets of arguments, each in quotes."
        )
    left = words[:place] + words[place + 3 :]
    if _place_of_diff(left) is not None:
        raise ScaleVecError("scalevec explain: --diff is given twice; give it once, with two sides.")
    return left, sides


def _place_of_diff(words: list[str]) -> int | None:
    found = (place for place, word in enumerate(words) if len(word) > 2 and "--diff".startswith(word))
    return next(found, None)


class _Parser(SentenceParser):
    def error(self, message: str):
        super().error(f"{message}; Megatron's arguments stand behind --")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scalevec explain",
        usage="scalevec explain [options] LAUNCH_SCRIPT [its arguments] [-- more of Megatron's arguments]\n"
        "       scalevec explain [options] -- [torchrun ...] [SCRIPT] <Megatron's own arguments> "
        "[--scalevec-*]\n       scalevec explain --support [--json]",
        description="Say what would be built, without GPUs and without training: the scale vectors of the "
        "whole model and of one rank, parameters, weight decay, cost, and why a run would be refused. A "
        "launch script (bash, Slurm) is read, and never executed; give its variables in the environment.",
    )
    parser.add_argument("script", nargs="?", metavar="LAUNCH_SCRIPT", help="a bash or Slurm script")
    parser.add_argument("words", nargs="*", metavar="ARGUMENT", help="of the script: $1 and so on")
    parser.add_argument(
        "--rank", type=_rank, default=0, metavar="R", help="whose part is shown; default %(default)s"
    )
    parser.add_argument(
        "--world-size",
        type=_number_of_ranks,
        metavar="N",
        help="number of ranks; default: as launched, else the fewest that the parallel sizes allow",
    )
    parser.add_argument(
        "--every-rank",
        action="store_true",
        help="build every rank of one copy of the model, not one of each pipeline stage",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="what differs between two strategies, or with two sets of further arguments (each in quotes)",
    )
    parser.add_argument(
        "--memory-bandwidth",
        type=_bandwidth,
        default=H100_BYTES_PER_SECOND / 1e9,
        metavar="GB/S",
        help="of a GPU, for the time that folds take; default: an H100 SXM's, %(default).0f",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record")
    parser.add_argument(
        "--support",
        action="store_true",
        help="print which models carry scale vectors, what cannot be combined, and why",
    )
    return parser


def _rank(text: str) -> int:
    return _number(text, int, 0, _MOST_RANKS - 1, f"a rank, a whole number from 0 to {_MOST_RANKS - 1}")


def _number_of_ranks(text: str) -> int:
    return _number(text, int, 1, _MOST_RANKS, f"a number of ranks, a whole number from 1 to {_MOST_RANKS}")


def _bandwidth(text: str) -> float:
    return _number(text, float, *_BANDWIDTHS, "a bandwidth in GB/s, {:g} to {:g}".format(*_BANDWIDTHS))


def _number(text: str, kind: type, least: float, most: float, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value
