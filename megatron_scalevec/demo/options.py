"""What the user can choose, and the checks that come before anything is created."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.config import STRATEGIES, ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "BASELINE",
    "Options",
    "add_size",
    "add_text",
    "built_strategies",
    "check_size",
    "flag_of",
    "names_in",
    "parse",
    "seeds_in",
]

BASELINE = "stock"
_FIRST_SEED = 1234
_MOST_COUNTED_SEEDS = 100
_LARGEST_COUNT = 2**53  # floats hold it
_LARGEST_SEED = 2**32 - 1  # numpy's
_HEAD_DIM = 32


@dataclass(frozen=True)
class Options:
    """The demo's choices, checked."""

    strategies: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    batch_size: int
    seq_length: int
    layers: int
    hidden_size: int
    learning_rate: float
    weight_decay: float
    tensor_parallel: int
    text: tuple[Path, ...] | None
    text_bytes: int
    out: Path
    jobs: int | None
    baseline_added: bool = False

    @property
    def heads(self) -> int:
        """Attention heads; two share each key and value head."""
        return self.hidden_size // _HEAD_DIM

    @property
    def query_groups(self) -> int:
        """Key and value heads."""
        return self.heads // 2

    @property
    def ffn_hidden_size(self) -> int:
        """Width of the SwiGLU layer."""
        return 3 * self.hidden_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one global batch."""
        return self.batch_size * self.seq_length

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        values = dataclasses.asdict(self)
        values["text"] = None if self.text is None else [str(path) for path in self.text]
        values["out"] = str(self.out)
        return values


def built_strategies() -> list[str]:
    """Names that this version builds."""
    found = []
    for name in STRATEGIES:
        try:
            ScaleVecConfig(strategy=name)
        except ScaleVecError:
            continue
        found.append(name)
    return found


def add_text(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what text is trained on."""
    text = parser.add_argument_group("text")
    text.add_argument(
        "--text",
        metavar="FILE",
        nargs="+",
        action="extend",
        type=Path,
        help="train on these files (default: documentation and sources of this Python installation)",
    )
    text.add_argument(
        "--text-bytes",
        metavar="N",
        type=int,
        default=8_000_000,
        help="read at most this much of it (default: %(default)s)",
    )


def add_size(parser: argparse.ArgumentParser, *, steps: int) -> argparse._ArgumentGroup:
    """The arguments that say how large a run is; ``steps`` is the default."""
    size = parser.add_argument_group("size of the runs")
    for flag, default, text_ in (
        ("--steps", steps, "optimizer steps"),
        ("--batch-size", 8, "sequences per step"),
        ("--seq-length", 128, "bytes per sequence"),
        ("--layers", 6, "transformer layers"),
        ("--hidden-size", 128, f"width, a multiple of {2 * _HEAD_DIM}"),
    ):
        size.add_argument(
            flag, metavar="N", type=int, default=default, help=f"{text_} (default: %(default)s)"
        )
    size.add_argument(
        "--weight-decay",
        metavar="X",
        type=float,
        default=0.1,
        help="decoupled weight decay (default: %(default)s)",
    )
    return size


def check_size(args: argparse.Namespace, *counts: str) -> None:
    """Check what :func:`add_text` and :func:`add_size` have read, and further ``counts``.

    Raises:
        ScaleVecError: A number is out of range.
    """
    for name in ("steps", "batch_size", "seq_length", "layers", "text_bytes", *counts):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= _LARGEST_COUNT:
            must = "at least 1" if value < 1 else f"at most {_LARGEST_COUNT}"
            raise ScaleVecError(f"{flag_of(name)} {value} must be {must}.")
    for path in args.text or ():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ScaleVecError(
                f"--text {str(path)!r}: the name is no UTF-8, and no report could say it; rename the file."
            ) from None
    if not 0 <= args.weight_decay < float("inf"):
        raise ScaleVecError(f"--weight-decay {args.weight_decay:g} must be a number 0 or more.")
    if args.hidden_size < 2 * _HEAD_DIM or args.hidden_size % (2 * _HEAD_DIM):
        raise ScaleVecError(
            f"--hidden-size {args.hidden_size} must be a multiple of {2 * _HEAD_DIM}: heads are "
            f"{_HEAD_DIM} wide and come in pairs."
        )


def _parser() -> argparse.ArgumentParser:
    parser = SentenceParser(
        prog="scalevec demo",
        description=(
            "Train one small GPT with Megatron's own training loop under several scale-vector "
            "strategies: same text, same data order, same seed, side by side. Without options it "
            "takes four to five minutes on two CPU cores."
        ),
        epilog=(
            "The folder holds report.json, loss.png, the audits, the logs and the text in "
            "Megatron's format. A run this small shows that the machinery works, not how large "
            "the gain is."
        ),
    )
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--strategies",
        metavar="NAME,...",
        default="stock,unified",
        help="of " + ", ".join(built_strategies()) + "; stock is always among them (default: %(default)s)",
    )
    what.add_argument(
        "--seeds",
        metavar="N|SEED,...",
        default="1",
        help=f"how many seeds, counted from {_FIRST_SEED}, or the seeds themselves with commas "
        "(one of your own: '7,'); with two or more the table shows the spread "
        "(default: %(default)s)",
    )
    add_text(parser)
    add_size(parser, steps=900).add_argument(
        "--learning-rate",
        metavar="X",
        type=float,
        default=4e-3,
        help="peak learning rate; it warms up, stays and decays (WSD) (default: %(default)s)",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--tensor-parallel",
        metavar="N",
        type=int,
        default=1,
        help="tensor-parallel ranks of each run (default: %(default)s)",
    )
    where.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help="runs at a time (default: as many as there are cores, or GPUs, for)",
    )
    where.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/demo"),
        help="result folder; an earlier result there is replaced when the new one is complete "
        "(default: %(default)s)",
    )
    return parser


def parse(argv: Sequence[str]) -> Options:
    """Read and check the command line; touches no file.

    Raises:
        ScaleVecError: Something cannot be done as asked.
    """
    args = _parser().parse_args(list(argv))
    check_size(args, "tensor_parallel", "jobs")
    if not 0 < args.learning_rate < float("inf"):
        raise ScaleVecError(f"--learning-rate {args.learning_rate:g} must be a number above 0.")
    groups = args.hidden_size // _HEAD_DIM // 2
    if groups % args.tensor_parallel:
        raise ScaleVecError(
            f"--tensor-parallel {args.tensor_parallel} does not divide the {groups} key and value "
            f"heads of --hidden-size {args.hidden_size}; use --hidden-size "
            f"{2 * _HEAD_DIM * args.tensor_parallel}."
        )
    strategies, added = _strategies(args.strategies)
    values = {**vars(args), "strategies": strategies, "seeds": seeds_in(args.seeds)}
    values["text"] = None if args.text is None else tuple(args.text)
    return Options(**values, baseline_added=added)


def flag_of(name: str) -> str:
    """The option that sets an attribute."""
    return "--" + name.replace("_", "-")


def names_in(text: str) -> list[str]:
    """Names with commas between them, each once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _strategies(text: str) -> tuple[tuple[str, ...], bool]:
    names = names_in(text)
    if not names:
        raise ScaleVecError(f"--strategies is empty: name some of {', '.join(built_strategies())}.")
    for name in names:
        try:
            ScaleVecConfig(strategy=name)
        except ScaleVecError as error:
            raise ScaleVecError(f"--strategies: {error}") from None
    added = BASELINE not in names
    return (BASELINE, *(name for name in names if name != BASELINE)), added


def seeds_in(text: str) -> tuple[int, ...]:
    """Seeds from their number, or from a list with commas.

    Raises:
        ScaleVecError: It is neither.
    """
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > _LARGEST_SEED:
        raise ScaleVecError(
            f"--seeds {text!r}: give a number of seeds, or the seeds themselves with commas, all from 1 to "
            f"{_LARGEST_SEED}."
        )
    if "," in text:
        twice = [str(seed) for seed in dict.fromkeys(numbers) if numbers.count(seed) > 1]
        if twice:
            raise ScaleVecError(
                f"--seeds {text}: {', '.join(twice)} is there more than once, and a run repeated with its "
                "own seed says nothing about chance; name every seed once."
            )
        return tuple(numbers)
    if numbers[0] > _MOST_COUNTED_SEEDS:
        raise ScaleVecError(
            f"--seeds {text} asks for {text} seeds; for the seed {text} itself write '{text},'."
        )
    return tuple(range(_FIRST_SEED, _FIRST_SEED + numbers[0]))
