"""``scalevec explain``: what a launch line would build, without GPUs and without training.

Megatron's own parser and validation read the arguments, with the hooks of a real run in place, and
Megatron's own code builds the model, rank by rank on the meta device in a process group that only pretends
to have the other ranks. So what is shown is what a run would build, at any size, in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from megatron_scalevec.errors import USAGE_EXIT_CODE, ScaleVecError

__all__ = ["explain", "main"]


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code.

    Raises:
        ScaleVecError: The arguments cannot be explained, or a run with them would be refused.
    """
    arguments = list(argv)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = _parser().parse_args(arguments[:split])
    if options.support:
        from megatron_scalevec.explain.display import support_as_json, support_table

        print(support_as_json() if options.json else support_table())
        return 0
    if split == len(arguments):
        raise ScaleVecError(
            "put the arguments of the run behind --, as in: scalevec explain -- pretrain_gpt.py --num-layers "
            "22 ...; scalevec explain --help says more."
        )
    try:
        found = explain(arguments[split + 1 :], rank=options.rank, world_size=options.world_size)
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


def explain(arguments: Sequence[str], *, rank: int = 0, world_size: int | None = None):
    """Build what a run would build, and look at it. This process is good for nothing else afterwards.

    Args:
        arguments: Megatron's, ``--scalevec-*`` included, as in a launch line; the script's name may stand
            before them and is not looked at.
        rank: Whose part of the model is shown.
        world_size: Number of ranks; by default the smallest that the parallel sizes allow.

    Returns:
        An :class:`~megatron_scalevec.explain.contents.Explanation`.

    Raises:
        ScaleVecError: Megatron or this package would refuse the run.
    """
    from megatron_scalevec.explain.dry_run import quietly, read_arguments

    words = list(arguments)
    while words and not words[0].startswith("-"):  # launch pretrain_gpt.py
        words.pop(0)
    with quietly():
        run = read_arguments(words, rank, world_size, with_script=len(words) < len(arguments))
        # Imports Megatron's layers, for which CPU mode must be on.
        from megatron_scalevec.explain.contents import look_at

        return look_at(run)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise ScaleVecError(f"scalevec explain: {message}; Megatron's arguments stand behind --.") from None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="scalevec explain",
        usage="scalevec explain [--rank R] [--world-size N] [--json] -- [SCRIPT] <Megatron's own arguments> "
        "[--scalevec-*]\n       scalevec explain --support [--json]",
        description="Say what would be built, without GPUs and without training: the scale vectors of the "
        "whole model and of one rank, parameters, weight decay, and why a run would be refused.",
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="whose part is shown; default 0")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks; default: the fewest that the parallel sizes allow",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON record")
    parser.add_argument("--support", action="store_true", help="print what cannot be combined, and why")
    return parser
