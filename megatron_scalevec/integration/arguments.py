"""The ``--scalevec-*`` flags: one declaration for the launcher's own parser and for Megatron's."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import json
import re
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from megatron_scalevec.command_line import SentenceParser
from megatron_scalevec.config import (
    BOOLEAN_IN_YAML,
    BRANCH_NAMES,
    COMPONENTS,
    DEFAULT_SITES,
    LR_ROLES,
    SITES,
    STRATEGIES,
    ScaleVecConfig,
    choose,
)
from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "CPU_MODES",
    "LOG_INTERVAL",
    "MODEL_FLAGS",
    "add_arguments",
    "flags_in",
    "merge_command_line",
    "merge_yaml",
    "options",
    "parse_own",
    "strategy_comes_later",
]

LOG_INTERVAL = 100
CPU_MODES = ("auto", "on", "off")
PREFIX = "--scalevec-"

# Flags of one launch that are for the hooks, beside --scalevec-cpu, which is for the launcher.
_LAUNCH_FLAGS = ("execution", "audit", "debug_replicas", "log_interval", "log")

# Flags that say what is built. They travel in YAML files and checkpoints; the others belong to one launch.
MODEL_FLAGS = (
    "strategy",
    *(name for name in COMPONENTS if name != "execution"),
    "branches_off",
    "lr_mult",
    "sites",
)


def _named(what: str, valid: Sequence[str]):
    def parse(value: str) -> str:
        try:
            return choose(what, value, valid)
        except ScaleVecError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def _checked(field: str, **context: str):
    """A flag whose value the configuration checks and brings into its usual order.

    ``context``: components under which every value of the right form has an effect; whether it has one with
    the run's own components is decided when all flags are known.
    """

    def parse(value: str) -> str | None:
        try:
            resolved = getattr(ScaleVecConfig(strategy="hg", **context, **{field: value}), field)
        except ScaleVecError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return ",".join(resolved) if isinstance(resolved, tuple) else resolved

    return parse


def _number_of_steps(value: str) -> int:
    try:
        steps = int(str(value))  # YAML knows 2.5 and true, which int() would take
    except ValueError:
        steps = 0
    if steps < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of steps, 1 or more")
    return steps


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags to a parser. Values are strings, numbers or None, which checkpoints can hold."""
    group = parser.add_argument_group(title="scale vectors")
    group.add_argument(
        f"{PREFIX}strategy",
        type=_named("strategy", list(STRATEGIES)),
        metavar="NAME",
        help="; ".join(f"{name}: {strategy.summary}" for name, strategy in STRATEGIES.items())
        + ". Default: stock.",
    )
    for component, values in COMPONENTS.items():
        flag = PREFIX + component.replace("_", "-")
        group.add_argument(
            flag,
            type=_named(f"value for {flag}", list(values)),
            metavar="|".join(values),
            help="; ".join(f"{name}: {text}" for name, text in values.items()).replace("%", "%%")
            + ". Default: as the strategy says.",
        )
    group.add_argument(
        f"{PREFIX}branches-off",
        type=_checked("branches_off"),
        metavar="BRANCH,...",
        help="branches that get no scale vectors, their scale being one: "
        + ", ".join(dict.fromkeys(name for names in BRANCH_NAMES.values() for name in names))
        + ". Default: none.",
    )
    group.add_argument(
        f"{PREFIX}lr-mult",
        type=_checked("lr_mult", placement="dual-norm", reparam="unit"),
        metavar="ROLE=FACTOR,...",
        help="learning-rate multipliers of the scale vectors by role: "
        + ", ".join(LR_ROLES)
        + ". Needs megatron-core 0.19. Default: 1.",
    )
    group.add_argument(
        f"{PREFIX}sites",
        type=_checked("sites"),
        metavar="SITE,...",
        help="where the strategy acts: "
        + "; ".join(f"{name}: {text}" for name, text in SITES.items())
        + f". Default: {','.join(DEFAULT_SITES)}.",
    )
    group.add_argument(
        f"{PREFIX}audit",
        metavar="FILE",
        help="write the audit (what was built, against what was asked for) to this JSON file as well; with "
        "--save it lies beside the checkpoints anyway.",
    )
    group.add_argument(
        f"{PREFIX}debug-replicas",
        type=_number_of_steps,
        metavar="N",
        help="every N steps, compare the copies of one-dimensional parameters that tensor-, context-, data- "
        "and expert-parallel ranks have, bit for bit, and stop if they differ. Default: never.",
    )
    group.add_argument(
        f"{PREFIX}log-interval",
        type=_number_of_steps,
        nargs="?",
        const=LOG_INTERVAL,
        metavar="N",
        help="every N steps, log how the scale vectors develop: to Megatron's TensorBoard and W&B writers, "
        f"where there are some, and to a file of JSON lines. Without a number: {LOG_INTERVAL}. "
        "Default: never.",
    )
    group.add_argument(
        f"{PREFIX}log",
        metavar="FILE",
        help="the file of JSON lines; by default scalevec_telemetry.jsonl in the --save folder. Named "
        f"without {PREFIX}log-interval, it is written every {LOG_INTERVAL} steps.",
    )
    group.add_argument(
        f"{PREFIX}cpu",
        type=_named(f"value for {PREFIX}cpu", CPU_MODES),
        metavar="|".join(CPU_MODES),
        help="run Megatron on the CPU; auto (the default of the launcher): when no CUDA device is found.",
    )
    return parser


class _Parser(SentenceParser):
    def error(self, message: str):
        raise ScaleVecError(message) from None


def options() -> list[str]:
    """All flags, for messages and for the test that freezes the list."""
    parser = add_arguments(_Parser(add_help=False, allow_abbrev=False))
    return [option for action in parser._actions for option in action.option_strings]


def flags_in(argv: Sequence[str]) -> list[str]:
    """The arguments that are ours, values not included."""
    return [item.split("=", 1)[0] for item in argv if item.startswith(PREFIX)]


def parse_own(argv: Sequence[str]) -> argparse.Namespace:
    """Read the flags out of a whole Megatron command line, before Megatron is imported.

    Raises:
        ScaleVecError: An unknown ``--scalevec-`` flag, a bad value, two values for one flag, or a
            combination that contradicts itself.
    """
    known = options()
    for flag in flags_in(argv):
        if flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise ScaleVecError(f"unknown argument {flag}: the flags are {', '.join(known)}.{hint}")
    parser = add_arguments(_Parser(add_help=False, allow_abbrev=False))
    args, _ = parser.parse_known_args(list(argv))
    if not strategy_comes_later(argv):
        ScaleVecConfig.from_namespace(args)
    return args


def strategy_comes_later(argv: Sequence[str]) -> bool:
    """Whether a checkpoint or a YAML file may add a strategy to what the command line says."""
    return any(item.split("=", 1)[0] in ("--use-checkpoint-args", "--yaml-cfg") for item in argv)


def merge_command_line(args: Any, command_line: argparse.Namespace) -> list[str]:
    """Give parsed arguments the flags that the process was started with and that did not reach them.

    A script may compose Megatron's command line itself, from a configuration of its own, and leave out what
    it does not know.

    Returns:
        The flags that had to be added.

    Raises:
        ScaleVecError: The script passed another value than the command line says.
    """
    added = []
    for name in (*MODEL_FLAGS, *_LAUNCH_FLAGS):
        key = f"scalevec_{name}"
        given = getattr(command_line, key)
        if given is None:
            continue
        flag = PREFIX + name.replace("_", "-")
        got = getattr(args, key, None)
        if got is None:
            setattr(args, key, given)
            added.append(f"{flag} {given}")
        elif got != given:
            raise ScaleVecError(
                f"the command line says {flag} {given}, and the script hands {flag} {got} to Megatron: make "
                "them the same."
            )
    return added


def merge_yaml(args: Any, command_line: argparse.Namespace, path: str) -> None:
    """Give a namespace read from ``--yaml-cfg`` its scale-vector keys.

    Megatron replaces the whole command line by the YAML file, so a flag that stands only there would be
    dropped without a word.

    Raises:
        ScaleVecError: The file has an unknown ``scalevec`` key, one in a section or a bad value, or the
            command line says something the file does not say.
    """
    known = [option.removeprefix("--").replace("-", "_") for option in options()]
    # Megatron reads the file when CPU mode would long have had to be on.
    known.remove("scalevec_cpu")
    for section, key in _our_keys(args):
        choose(f"key in {path}:", key, known)
        if section:
            raise ScaleVecError(
                f"{section}.{key} in {path} would not be read: write {key} at the top level of that file, "
                f"outside of {section}."
            )
    types = {action.dest: action.type for action in add_arguments(_Parser(add_help=False))._actions}
    for name in MODEL_FLAGS:
        key = f"scalevec_{name}"
        given, written = getattr(command_line, key), getattr(args, key, None)
        written = _text_of(name, written, path)
        if written is not None:
            with contextlib.suppress(argparse.ArgumentTypeError):  # the configuration says what is wrong
                written = types[key](written)
        setattr(args, key, written)
        if given is not None and given != written:
            flag = PREFIX + name.replace("_", "-")
            state = "has no such key" if written is None else f"says {written!r}"
            raise ScaleVecError(
                f"{flag} {given} was given with --yaml-cfg {path}, which replaces the command line and "
                f"{state}: write '{key}: {given}' at the top level of that file."
            )
    for name in (*_LAUNCH_FLAGS, "cpu"):
        key = f"scalevec_{name}"
        if getattr(args, key, None) is None:
            setattr(args, key, getattr(command_line, key))
    for key in ("scalevec_debug_replicas", "scalevec_log_interval"):
        if (written := getattr(args, key)) is not None:
            try:
                setattr(args, key, _number_of_steps(written))
            except argparse.ArgumentTypeError as error:
                raise ScaleVecError(f"{key} in {path}: {error}.") from None
    for key in ("scalevec_audit", "scalevec_log"):
        if not isinstance(written := getattr(args, key), (str, type(None))):
            raise ScaleVecError(f"{key} in {path} is {written!r}, not the name of a file; put it in quotes.")
    ScaleVecConfig.from_namespace(args)
    for name in _LAUNCH_FLAGS:
        given, written = (getattr(one, f"scalevec_{name}") for one in (command_line, args))
        if given is not None and given != written:
            raise ScaleVecError(
                f"the command line says {PREFIX}{name.replace('_', '-')} {given}, and scalevec_{name} in "
                f"{path} is {written}: make them the same, or leave one out."
            )


def _our_keys(node: Any, section: str = "") -> Iterator[tuple[str, str]]:
    """(section, key) of every key that somebody may have meant for this package, at any depth."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _our_keys(item, f"{section}[{number}]")
    elif isinstance(node, SimpleNamespace):
        for key, value in vars(node).items():
            if re.match(r"[-_]*scale[-_]?vec", key, re.IGNORECASE):
                yield section, key
            yield from _our_keys(value, f"{section}.{key}" if section else key)


# Keys that may have several names.
_EXAMPLES = {"sites": "[attention, mlp]", "branches_off": "[k, v]", "lr_mult": "[input=2, output=0.5]"}


def _text_of(name: str, written: Any, path: str) -> Any:
    """The value of a key as the command line would give it; whether it is a valid one is not looked at.

    Raises:
        ScaleVecError: It is neither a string nor, where there may be several, a list of strings.
    """
    if written is None or isinstance(written, str):
        return written
    if name in _EXAMPLES:
        if isinstance(written, list) and all(isinstance(item, str) for item in written):
            return ",".join(written)
        expected = f"a list of names, for example {_EXAMPLES[name]}, or one string with commas"
    elif isinstance(written, (list, SimpleNamespace)):
        expected = "one name"
    else:
        return written
    shown = json.dumps(written, default=vars)
    hint = f" {BOOLEAN_IN_YAML}" if re.search(r"\b(true|false)\b", shown) else ""
    raise ScaleVecError(f"scalevec_{name} in {path} is {shown}: give {expected}.{hint}")
