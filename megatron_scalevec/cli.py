"""The ``scalevec`` command and its subcommands."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_scalevec import __version__
from megatron_scalevec.config import choose
from megatron_scalevec.errors import USAGE_EXIT_CODE, ScaleVecError
from megatron_scalevec.report import leave_with, tolerate_any_encoding

__all__ = ["main"]

_COMMANDS = {
    "launch": "run an unmodified Megatron training script with the --scalevec-* flags understood",
    "pretrain": "pre-train a GPT with Megatron's loop from the wheel; no Megatron checkout needed",
    "explain": "say what a launch line would build, on any machine, without training",
    "unfold": "make a stock checkpoint the start of a run with scale vectors",
    "fold": "fold the scale vectors of a checkpoint into its weights, for stock Megatron",
    "patch": "make a Megatron-LM tree find this package by itself, without the launcher",
    "demo": "train a small GPT on this machine under several strategies and compare them",
    "compare": "compare runs that have been trained: a table, a picture, a page",
    "study": "compare strategies over seeds and learning rates on this machine, in pieces, with a report",
    "export": "write a checkpoint as a Hugging Face folder, scale vectors folded into the weights",
    "import": "write a Hugging Face folder as a stock Megatron checkpoint to start from",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code; 2 for anything the user can mend."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    tolerate_any_encoding()
    try:
        return _dispatch(arguments)
    except ScaleVecError as error:
        return leave_with(error)


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
    if args.command == "compare":
        from megatron_scalevec.compare import main as compare

        return compare(args.rest)
    if args.command == "study":
        from megatron_scalevec.study import main as study

        return study(args.rest)
    if args.command == "explain":
        from megatron_scalevec.explain import main as explain

        # As given: argparse swallows a leading "--" in some versions of Python.
        return explain(arguments[arguments.index("explain") + 1 :])
    if args.command in ("unfold", "fold"):
        from megatron_scalevec.checkpoint.commands import main as rewrite

        return rewrite(args.command, args.rest)
    if args.command == "patch":
        from megatron_scalevec.patches import main as patch

        return patch(args.rest)
    if args.command in ("export", "import"):
        from megatron_scalevec.huggingface import commands

        run = commands.export_main if args.command == "export" else commands.import_main
        return run(arguments[arguments.index(args.command) + 1 :])
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
