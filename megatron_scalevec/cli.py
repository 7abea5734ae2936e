"""The ``scalevec`` command: ``launch``, ``pretrain``, ``demo``."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from megatron_scalevec import __version__
from megatron_scalevec.config import choose
from megatron_scalevec.errors import USAGE_EXIT_CODE, ScaleVecError

__all__ = ["main"]

_COMMANDS = {
    "launch": "run an unmodified Megatron training script with the --scalevec-* flags understood",
    "pretrain": "pre-train a GPT with Megatron's loop from the wheel; no Megatron checkout needed",
    "demo": "train a small GPT on this machine under several strategies and compare them",
}

_FIRST_RANK_SPEAKS_WITHIN = 20.0  # seconds; imports on a busy node differ by several


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code; 2 for anything the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ScaleVecError as error:
        _report(error)
        return _leave(USAGE_EXIT_CODE)


def _report(error: ScaleVecError) -> None:
    """Say it once per node. Mostly every rank meets the same error, and torchrun ends all ranks as soon
    as one has left; so the others leave the first word to the node's first rank, and speak up only if it
    stays silent."""
    rank = os.environ.get("RANK", "0")
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(_FIRST_RANK_SPEAKS_WITHIN)
    where = "" if rank == "0" else f" (rank {rank})"
    print(f"scalevec: error{where}: {error}", file=sys.stderr, flush=True)


def _leave(code: int) -> int:
    """End a rank of a distributed run at once: its peers may wait in a collective that never comes."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _dispatch(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="scalevec",
        description="Scale vectors for Megatron-LM pre-training (arXiv 2605.26895).",
        epilog="\n".join(f"  {name:10} {text}" for name, text in _COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"megatron_scalevec {__version__}")
    parser.add_argument("command", metavar="COMMAND", help=", ".join(_COMMANDS))
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="see COMMAND --help")
    if not arguments:
        parser.print_help()
        return USAGE_EXIT_CODE
    args = parser.parse_args(arguments)
    choose("command", args.command, _COMMANDS)
    if args.command == "demo":
        from megatron_scalevec.demo import main as demo

        return demo(args.rest)
    from megatron_scalevec.integration import launch

    if args.rest in (["--help"], ["-h"]) or (args.command == "launch" and not args.rest):
        _run_help(args.command)
        return 0 if args.rest else USAGE_EXIT_CODE
    if args.command == "pretrain":
        launch.pretrain(args.rest)
    else:
        launch.launch(args.rest[0], args.rest[1:])
    return 0


def _run_help(command: str) -> None:
    from megatron_scalevec.integration.arguments import add_arguments

    script = " SCRIPT" if command == "launch" else ""
    parser = argparse.ArgumentParser(
        prog=f"scalevec {command}",
        usage=f"[torchrun ... -m megatron_scalevec | scalevec] {command}{script} <Megatron's own arguments> "
        "[--scalevec-*]",
        description=_COMMANDS[command] + ".",
        add_help=False,
    )
    add_arguments(parser).print_help()
