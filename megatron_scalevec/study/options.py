"""What a study is made of, and the checks that come before anything is created."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.demo import options as demo
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.arms import Arm, read_arms

__all__ = ["BASELINE", "OPTIMIZERS", "Options", "parse", "parser", "rounded"]

BASELINE = demo.BASELINE
OPTIMIZERS = {"adam": "AdamW", "muon": "Muon"}
_ARMS = "stock,hg,unified,unified-foldable,unified+branches-off=v"
_RATES = {"adam": (1e-3, 2e-3, 4e-3), "muon": (2e-3, 4e-3, 8e-3)}
_TUNING_SEED = 99
# With rates in this range and so far apart, those that widening adds are numbers, and differ in their names.
_LOWEST_RATE, _HIGHEST_RATE, _RATIO = 1e-8, 1e2, 1.001
_MOST_WIDENING = 20
_FIXED = (
    "steps tuning_steps tuning_seed batch_size seq_length layers hidden_size weight_decay text_bytes"
).split()


@dataclass(frozen=True)
class Options:
    """The choices of a study, checked."""

    arms: tuple[Arm, ...]
    optimizers: tuple[str, ...]
    seeds: tuple[int, ...]
    rates: dict[str, tuple[float, ...]]
    """Optimizer to the learning rates tried, rising."""
    widen: int
    """How many rates may be added at an edge of ``rates`` where the best one lies there."""
    steps: int
    tuning_steps: int
    tuning_seed: int
    batch_size: int
    seq_length: int
    layers: int
    hidden_size: int
    weight_decay: float
    save_interval: int
    text: tuple[Path, ...] | None
    text_bytes: int
    jobs: int | None
    out: Path
    report_only: bool = False
    given: frozenset[str] = field(default=frozenset(), compare=False)
    """Those of them that the command line names."""

    def run_options(self, rate: float, steps: int) -> demo.Options:
        """The demo's options for one run of the study."""
        return demo.Options(
            strategies=(),
            seeds=(),
            steps=steps,
            batch_size=self.batch_size,
            seq_length=self.seq_length,
            layers=self.layers,
            hidden_size=self.hidden_size,
            learning_rate=rate,
            weight_decay=self.weight_decay,
            tensor_parallel=1,
            text=self.text,
            text_bytes=self.text_bytes,
            out=self.out,
            jobs=self.jobs,
        )

    def fixed(self) -> dict[str, Any]:
        """What must stay as it is while a study goes on; arms, optimizers and seeds may be added."""
        values = {name: getattr(self, name) for name in _FIXED}
        values["text"] = None if self.text is None else [str(path) for path in self.text]
        return values

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one batch."""
        return self.batch_size * self.seq_length

    @classmethod
    def from_record(cls, record: Mapping[str, Any], out: Path) -> Options:
        """What :meth:`record` has put down, through the same checks as a command line.

        Raises:
            ScaleVecError: It is no such record.
        """
        names = parse([]).record().keys()
        for what, which in (
            ("are missing", names - record.keys()),
            ("are unknown ones", record.keys() - names),
        ):
            if which:
                raise ScaleVecError(f"among its options {what}: {', '.join(sorted(which))}.")
        try:
            options = parse([*_as_words(record), f"--out={out}"])
        except (TypeError, AttributeError):  # what should be a list or a mapping is none
            options = None
        if options is None or options.record() != record:
            raise ScaleVecError("its options are not in the form that the command writes.")
        return options

    def record(self) -> dict[str, Any]:
        """Everything that the report needs, as JSON can hold it."""
        return {
            **self.fixed(),
            "arms": [arm.label for arm in self.arms],
            "optimizers": list(self.optimizers),
            "seeds": list(self.seeds),
            "rates": {name: list(rates) for name, rates in self.rates.items()},
            "widen": self.widen,
            "save_interval": self.save_interval,
        }


def _as_words(record: Mapping[str, Any]) -> list[str]:
    """A record as a command line."""
    names = (*_FIXED, "widen", "save_interval")
    words = [f"{demo.flag_of(name)}={record[name]}" for name in names]
    words += [f"--{name}={','.join(record[name])}" for name in ("arms", "optimizers")]
    words += [f"--seeds={','.join(map(str, record['seeds']))},"]
    words += [f"--rates={name}={','.join(map(repr, rates))}" for name, rates in record["rates"].items()]
    return words + [f"--text={path}" for path in record["text"] or ()]


def parser() -> argparse.ArgumentParser:
    """The command line of ``scalevec study``."""
    made = SentenceParser(
        prog="scalevec study",
        description=(
            "Train a small GPT with Megatron's own loop under every arm, optimizer and seed, each arm at the "
            "learning rate that is best for it, and report means, intervals and what they allow to say. A "
            "study that was stopped, or killed, goes on where it was when the same command is given again."
        ),
        epilog=(
            "An arm is a strategy, or a strategy with components changed: unified+branches-off=v is unified "
            "without vectors and norm on v. The learning rate is tuned on one seed that is not used again; "
            "where the best rate is the lowest or highest, the next one is tried."
        ),
    )
    what = made.add_argument_group("what is compared")
    what.add_argument(
        "--arms",
        metavar="ARM,...",
        default=_ARMS,
        help="stock is always among them (default: %(default)s)",
    )
    what.add_argument(
        "--optimizers",
        metavar="NAME,...",
        default="adam",
        help="of " + ", ".join(OPTIMIZERS) + " (default: %(default)s)",
    )
    what.add_argument(
        "--seeds", metavar="N|SEED,...", default="3", help="as for scalevec demo (default: %(default)s)"
    )
    what.add_argument(
        "--rates",
        metavar="[OPTIMIZER=]RATE,...",
        nargs="+",
        action="extend",
        default=[],
        help="learning rates to try, for all optimizers or for one; a single one is taken untuned; may be "
        "given again, for another optimizer (default: "
        + ", ".join(f"{name}={','.join(f'{rate:g}' for rate in rates)}" for name, rates in _RATES.items())
        + ")",
    )
    what.add_argument(
        "--widen",
        metavar="N",
        type=int,
        default=2,
        help="rates to add at most where the best one is the lowest or highest (default: %(default)s)",
    )
    demo.add_text(made)
    size = demo.add_size(made, steps=400)
    size.add_argument(
        "--tuning-steps",
        metavar="N",
        type=int,
        help="steps of the runs that tune the learning rate, at most --steps (default: as --steps; fewer "
        "cost less and favour higher rates)",
    )
    for flag, default, text in (
        ("--tuning-seed", _TUNING_SEED, "seed of the runs that tune, none of --seeds"),
        ("--save-interval", 50, "steps between checkpoints: what a kill loses at most"),
    ):
        size.add_argument(flag, metavar="N", type=int, default=default, help=f"{text} (default: %(default)s)")
    where = made.add_argument_group("where it runs")
    where.add_argument(
        "--jobs", metavar="N", type=int, help="runs at a time (default: as many as there are cores, or GPUs)"
    )
    where.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("runs/study"),
        help="the study's folder; one that is there goes on (default: %(default)s)",
    )
    where.add_argument("--report-only", action="store_true", help="report what is there and start nothing")
    return made


def parse(argv: Sequence[str]) -> Options:
    """Read and check the command line; touches no file.

    Raises:
        ScaleVecError: Something cannot be done as asked.
    """
    reader = parser()
    args = reader.parse_args(list(argv))
    demo.check_size(args, "tuning_steps", "tuning_seed", "save_interval", "jobs")
    if not 0 <= args.widen <= _MOST_WIDENING:
        raise ScaleVecError(f"--widen {args.widen} must be from 0 to {_MOST_WIDENING}.")
    if args.tuning_steps is not None and args.tuning_steps > args.steps:
        raise ScaleVecError(
            f"--tuning-steps {args.tuning_steps} is more than --steps {args.steps}: learning rates are tuned "
            "on runs of that length, or shorter ones; leave it out, or raise --steps."
        )
    seeds = demo.seeds_in(args.seeds)
    if args.tuning_seed in seeds:
        raise ScaleVecError(
            f"--tuning-seed {args.tuning_seed} is one of --seeds: an arm would be judged where it was tuned; "
            "give another."
        )
    names = demo.names_in(args.arms)
    if not names:
        raise ScaleVecError(f"--arms is empty: name some, for example {_ARMS}.")
    try:
        arms = read_arms([BASELINE, *names])
    except ScaleVecError as error:
        raise ScaleVecError(f"--arms: {error}") from None
    optimizers = demo.names_in(args.optimizers)
    for name in optimizers:
        if name not in OPTIMIZERS:
            raise ScaleVecError(f"--optimizers {name!r}: choose among {', '.join(OPTIMIZERS)}.")
    if not optimizers:
        raise ScaleVecError(f"--optimizers is empty: name some of {', '.join(OPTIMIZERS)}.")
    names = {field.name for field in dataclasses.fields(Options)} & set(vars(args))
    values = {name: getattr(args, name) for name in names}
    values |= {
        "arms": tuple(arms),
        "optimizers": tuple(optimizers),
        "tuning_steps": args.tuning_steps or args.steps,
        "seeds": seeds,
        "rates": _rates(args.rates, optimizers),
        "text": None if args.text is None else tuple(args.text),
        "given": frozenset(reader.given),
    }
    return Options(**values)


def _rates(given: Sequence[str], optimizers: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """The rates of every optimizer of the study: its own entry, else the general one, else the default."""
    entries: dict[str, tuple[float, ...]] = {}
    for text in given:
        name, equals, numbers = text.rpartition("=")
        if equals and name not in OPTIMIZERS:
            raise ScaleVecError(f"--rates {text}: {name!r} is none of {', '.join(OPTIMIZERS)}.")
        if equals and name not in optimizers:
            raise ScaleVecError(
                f"--rates {text}: {name} is not in this study; leave the entry out, or add {name} to "
                "--optimizers."
            )
        if name in entries:
            raise ScaleVecError(
                f"--rates has two entries for {name or 'all optimizers'}, the second of them {text}: give "
                "one, with commas between the rates."
            )
        entries[name] = _numbers(text, numbers)
    return {name: entries.get(name, entries.get("", _RATES[name])) for name in optimizers}


def _numbers(text: str, numbers: str) -> tuple[float, ...]:
    """The rates of an entry, rising, each once."""
    try:
        rates = tuple(sorted({float(part) for part in demo.names_in(numbers)}))
    except ValueError:
        rates = ()
    if not rates or not all(_LOWEST_RATE <= rate <= _HIGHEST_RATE for rate in rates):
        raise ScaleVecError(
            f"--rates {text}: give numbers from {_LOWEST_RATE:g} to {_HIGHEST_RATE:g} with commas between "
            "them."
        )
    for rate in rates:
        if rate != rounded(rate):
            raise ScaleVecError(
                f"--rates {text}: runs are started with six digits of a rate, and {rate!r} has more; give "
                f"{rate:g}."
            )
    for low, high in zip(rates, rates[1:]):
        if high < low * _RATIO:
            raise ScaleVecError(
                f"--rates {text}: {low:g} and {high:g} are too near each other for a loss to tell; "
                f"leave one out, or put them {_RATIO - 1:.1%} apart at least."
            )
    return rates


def rounded(rate: float) -> float:
    """As it is written in a run's name and on its command line."""
    return float(f"{rate:g}")
