"""``scalevec export`` and ``scalevec import``."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.lifetime import stopped_by_signals

__all__ = ["export_main", "import_main"]

_INTERRUPTED_EXIT_CODE = 130


def export_main(argv: Sequence[str]) -> int:
    """Run ``scalevec export``. Returns the exit code.

    Raises:
        ScaleVecError: Something about the arguments, the checkpoint or the folder.
    """
    options = _export_parser().parse_args(list(argv))
    return _run(lambda: _export(options))


def import_main(argv: Sequence[str]) -> int:
    """Run ``scalevec import``. Returns the exit code.

    Raises:
        ScaleVecError: Something about the arguments or one of the folders.
    """
    options = _import_parser().parse_args(list(argv))
    return _run(lambda: _import(options))


def _run(work: Callable[[], None]) -> int:
    try:
        with stopped_by_signals():
            work()
    except KeyboardInterrupt:
        print("\nscalevec: stopped; nothing was left behind.", file=sys.stderr)
        return _INTERRUPTED_EXIT_CODE
    return 0


def _export(options: argparse.Namespace) -> None:
    from megatron_scalevec.huggingface.exporting import export_checkpoint

    with _progress("exporting") as progress:
        made = export_checkpoint(
            options.checkpoint,
            options.out,
            step=options.step,
            architecture=options.format,
            vocabulary=options.vocab_size,
            tokenizer=options.tokenizer,
            drop_mtp=options.drop_mtp,
            progress=progress,
        )
    print(
        f"{made.folder}: {made.architecture}, {made.tensors} tensors, {made.parameters:,} parameters, from "
        f"iteration {made.iteration}."
    )
    if made.architecture == "scalevec":
        print("It has norms of its own: load it with trust_remote_code=True.")


def _import(options: argparse.Namespace) -> None:
    from megatron_scalevec.huggingface.importing import ARGUMENTS_FILE, import_folder, import_unfolded

    choices = {
        "implementation": options.transformer_impl,
        "vocabulary_multiple": options.make_vocab_size_divisible_by,
    }
    with _progress("importing") as progress:
        if options.strategy is None:
            made = import_folder(options.folder, options.out, **choices, progress=progress)
        else:
            made = import_unfolded(
                options.folder, options.out, options.strategy, **choices, progress=progress, say=print
            )
    print(f"{made.folder}: {made.architecture}, {made.parameters:,} parameters, a Megatron checkpoint.")
    print(f"Load it with: --load {made.folder} --use-checkpoint-args {' '.join(made.flags_to_give)}")
    print(
        "The flags behind --use-checkpoint-args are not restored by it and change the model where they are "
        f"missing; {ARGUMENTS_FILE} in that folder has all of the model's."
    )


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, advance=done, total=total)


class _Parser(SentenceParser):
    def error(self, message: str):
        super().error(f"{message}; {self.prog} --help says more")


def _export_parser() -> argparse.ArgumentParser:
    from megatron_scalevec.huggingface.architectures import ARCHITECTURES

    kinds = "; ".join(f"{name}: {entry.summary}" for name, entry in ARCHITECTURES.items())
    parser = _Parser(
        prog="scalevec export",
        description="Write a Megatron checkpoint as a Hugging Face folder, scale vectors folded into the "
        "weights.",
    )
    parser.add_argument(
        "checkpoint", metavar="CKPT", help="a --save folder of Megatron (torch_dist), or one iteration's"
    )
    parser.add_argument("out", metavar="OUT", help="the folder to make; it does not exist yet")
    parser.add_argument(
        "--format",
        default="auto",
        metavar="NAME",
        help=f"architecture; auto, the default, takes the first that holds the model. {kinds}",
    )
    parser.add_argument("--step", type=int, metavar="N", help="another iteration than the last")
    parser.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="keep the first N rows of the vocabulary; default: all, padding included, as in training",
    )
    parser.add_argument("--tokenizer", metavar="DIR", help="copy the tokenizer files of this folder")
    parser.add_argument(
        "--drop-mtp", action="store_true", help="leave out multi-token-prediction layers, which none can hold"
    )
    return parser


def _import_parser() -> argparse.ArgumentParser:
    from megatron_scalevec.huggingface.importing import IMPLEMENTATIONS

    parser = _Parser(
        prog="scalevec import",
        description="Write a Hugging Face folder (llama, qwen2, qwen3, qwen3_moe, mixtral) as a stock "
        "Megatron checkpoint to start from.",
    )
    parser.add_argument("folder", metavar="HF_DIR", help="a folder with config.json and safetensors files")
    parser.add_argument("out", metavar="OUT", help="the folder to make; it does not exist yet")
    parser.add_argument(
        "--strategy",
        metavar="NAME",
        help="unfold it to the start of a run with this --scalevec-strategy, as scalevec unfold does",
    )
    parser.add_argument(
        "--transformer-impl",
        default=IMPLEMENTATIONS[0],
        metavar="NAME",
        help=f"of the runs that will load it: {', '.join(IMPLEMENTATIONS)}; default {IMPLEMENTATIONS[0]}",
    )
    parser.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=128,
        metavar="N",
        help="pad the vocabulary with rows of zeros to a multiple of N; default 128",
    )
    return parser
