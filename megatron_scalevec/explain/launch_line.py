"""Finding the run in a launch script: the training script, its arguments, and the number of ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.explain.shell import (
    Started,
    commands_of,
    is_unknown,
    readable,
    reasons,
    several_words,
)

__all__ = ["Launch", "launch_in_command", "launch_in_script"]


@dataclass(frozen=True)
class Launch:
    """One run. ``world_size`` is None where nothing says it, ``script`` empty for ``scalevec pretrain``."""

    script: str
    arguments: tuple[str, ...]
    world_size: int | None
    notes: tuple[str, ...] = ()


# Programs that start a training script, in front of each other or alone.
_STARTERS = re.compile(
    r"python[0-9.]*|torchrun|srun|mpirun|mpiexec|exec|nohup|env|time|timeout|numactl|nsys|stdbuf|scalevec"
    r"|apptainer|singularity|docker|podman|enroot"
)
_OUR_MODULE = ("-m", "megatron_scalevec")
# At least one of these is in every command line of Megatron that builds a model.
_MEGATRON = ("--num-layers", "--hybrid-layer-pattern", "--hybrid-override-pattern", "--use-checkpoint-args")
_MEGATRON += ("--yaml-cfg", "--hidden-size")
# Values of these do not change what is built.
_ELSEWHERE = re.compile(
    r"--(save|load|data-path|train-data-path|valid-data-path|test-data-path|data-cache-path|data-args-path"
    r"|tokenizer-model|vocab-file|merge-file|tensorboard-dir|tensorboard-log-dir|log-dir|exit-duration-in-mins"
    r"|wandb-[a-z-]+|non-persistent-[a-z-]+|profile-[a-z-]+|scalevec-audit|seed|experiment-name"
    r"|per-split-data-args-path|replication-[a-z-]+|async-[a-z-]+)"
)


def launch_in_script(
    path: str | os.PathLike[str], arguments: Sequence[str], environment: Mapping[str, str]
) -> Launch:
    """Read a bash or Slurm script; nothing of it is executed.

    Args:
        path: The script.
        arguments: Its own.
        environment: Variables that are set; those of Slurm are taken from the script's directives.

    Raises:
        ScaleVecError: It cannot be read, starts no Megatron run or several, or an argument of the run is not
            known here.
    """
    name = os.path.basename(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScaleVecError(f"{path} cannot be read as a script: {error}.") from error
    slurm = _directives(text)
    try:
        started, unknown = commands_of(text, arguments, {**environment, **_slurm_variables(slurm)})
    except ScaleVecError as error:
        raise ScaleVecError(f"{name}, {error}") from error
    runs = [(command, place) for command in started if (place := _place(command.words)) is not None]
    if not runs:
        raise ScaleVecError(
            f"{name} starts no Megatron run that can be seen here (a python, torchrun or srun command with a "
            "script and --num-layers or --hidden-size); put the arguments of the run behind -- instead."
        )
    lines = sorted({command.line for command, _ in runs})
    if len(runs) > 1:
        raise ScaleVecError(
            f"{name} starts {len(runs)} runs (lines {', '.join(map(str, lines))}); set the variables that "
            "choose one of them, or put the arguments of one behind --."
        )
    command, (script, first) = runs[0]
    if not command.certain:
        raise ScaleVecError(
            f"{name}, line {command.line}: whether this run starts depends on something else "
            f"({command.unless}); set it in the environment, or put the arguments of the run behind --."
        )
    sources = [name for name in ("source", ".") for other in started if other.words[0] == name]
    notes = [f"{name}: what 'source' reads is not read here"] if sources else []
    world_size = _ranks(command.words[: first - 1], {**slurm, **_from_environment(command)})
    words, more = _known(command, command.words[first:], unknown, name)
    return Launch(script, tuple(words), world_size, (*notes, *more))


def launch_in_command(words: Sequence[str]) -> Launch:
    """The run of a command line that is given as words: ``torchrun ... pretrain_gpt.py ...``, or the script
    and its arguments, or the arguments alone."""
    words = tuple(words)
    found = _place(words) if words and _STARTERS.fullmatch(os.path.basename(words[0])) else None
    if found is not None:
        script, first = found
        return Launch(script, words[first:], _ranks(words[: first - 1], {}))
    script = ""
    while words and not words[0].startswith("-"):  # launch pretrain_gpt.py
        script, words = words[0], words[1:]
    return Launch(script, words, None)


def _place(words: Sequence[str]) -> tuple[str, int] | None:
    """The training script of a command and where its arguments begin; None for any other command."""
    if not words or not _STARTERS.fullmatch(os.path.basename(words[0])):
        return None
    for number, word in enumerate(words):
        before = words[number - 1] if number else ""
        ours = (os.path.basename(word) == "scalevec" and not before.startswith("-")) or (
            (before, word) == _OUR_MODULE
        )
        following = words[number + 1] if number + 1 < len(words) else ""
        if ours and following not in ("launch", "pretrain"):
            return None  # another of our own commands
        if (ours and following == "pretrain") or re.search(r"\w\.py$", word):
            first = number + (2 if ours else 1)
            if any(option.split("=")[0] in _MEGATRON for option in words[first:]):
                return "" if ours else word, first
    return None


def _known(
    command: Started, words: Sequence[str], unknown: Sequence[str], name: str
) -> tuple[list[str], list[str]]:
    """The arguments of the run; what is not known is let through where it does not matter."""
    result, notes = [], []
    for number, word in enumerate(words):
        if is_unknown(word):
            option = word.split("=")[0] if word.startswith("--") else (words[number - 1] if number else "")
            # Several paths may follow one option.
            place = number - 1
            while place > 0 and not words[place].startswith("--"):
                place -= 1
                option = words[place]
            why = "; ".join(reasons(word, unknown))
            if not _ELSEWHERE.fullmatch(option):
                what = f"the value of {option}" if option.startswith("--") else "an argument"
                if several_words(word) and not option.startswith("--"):
                    what = "a part of the command line"
                raise ScaleVecError(
                    f"{name}, line {command.line}: {what} is not known here ({why}); set it in the "
                    "environment, as in: NAME=value scalevec explain SCRIPT, or put the arguments of the run "
                    "behind --."
                )
            word = readable(word, unknown)
            notes.append(f"{option} {word}: not known here, and not needed ({why})")
        result.append(word)
    return result, notes


def _directives(text: str) -> dict[str, str]:
    """``#SBATCH --nodes=4`` and so on, by their long names."""
    short = {"N": "nodes", "n": "ntasks", "G": "gpus"}
    found = {}
    for line in re.findall(r"^#SBATCH[ \t]+(.*)$", text, re.MULTILINE):
        for long, brief, value in re.findall(
            r"(?:--([a-z-]+)|(?<!-)-([a-zA-Z]))(?:[= ]([^\s#-][^\s#]*))?", line
        ):
            found[long or short.get(brief, brief)] = value
    return found


def _slurm_variables(given: Mapping[str, str]) -> dict[str, str]:
    """What Slurm sets from the directives of the script."""
    nodes, tasks = given.get("nodes"), given.get("ntasks-per-node")
    gpus = (given.get("gpus-per-node") or given.get("gres") or "").rpartition(":")[2]
    total = given.get("ntasks")
    if total is None and (nodes or "").isdigit() and (tasks or "").isdigit():
        total = str(int(nodes) * int(tasks))
    values = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS_PER_NODE": tasks,
        "SLURM_GPUS_PER_NODE": gpus,
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
    }
    return {name: value for name, value in values.items() if value}


def _from_environment(command: Started) -> dict[str, str]:
    value = command.environment.get("WORLD_SIZE", "")
    return {"world-size": value} if value.isdigit() else {}


def _option(words: Sequence[str], *names: str) -> str | None:
    for number, word in enumerate(words):
        key, given, value = word.partition("=")
        if key.replace("_", "-") in names:
            return value if given else (words[number + 1] if number + 1 < len(words) else None)
    return None


def _ranks(before: Sequence[str], slurm: Mapping[str, str]) -> int | None:
    """Number of ranks: torchrun's nodes times its processes, or the tasks of srun."""

    def number(text: str | None) -> int | None:
        text = (text or "").split(":")[-1]
        return int(text) if text.isdigit() else None

    torchrun = next(
        (i for i, w in enumerate(before) if re.search(r"(^|/)torchrun$|\.run$|\.launch$", w)), None
    )
    if torchrun is not None:
        options = before[torchrun + 1 :]
        each = number(_option(options, "--nproc-per-node", "-nproc-per-node"))
        if each is None:  # "gpu", or left to the machine
            each = number(slurm.get("gpus-per-node") or slurm.get("gres"))
        nodes = number(_option(options, "--nnodes", "-nnodes") or "1")
        return each * nodes if each is not None and nodes is not None else None
    if any(os.path.basename(word) == "srun" for word in before):
        total = number(_option(before, "--ntasks", "-n") or slurm.get("ntasks"))
        nodes = number(_option(before, "--nodes", "-N") or slurm.get("nodes"))
        each = number(_option(before, "--ntasks-per-node") or slurm.get("ntasks-per-node"))
        if total is None and nodes is not None and each is not None:
            return nodes * each
        return total
    return number(slurm.get("world-size"))
