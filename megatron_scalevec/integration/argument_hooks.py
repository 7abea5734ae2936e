"""Hooks on Megatron's arguments: what is added, what is checked before anything is built.

Each function takes the session and Megatron's own function, and returns what stands in its place.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from megatron_scalevec.config import ScaleVecConfig
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.execution.choice import choose_execution
from megatron_scalevec.integration.arguments import (
    LOG_INTERVAL,
    MODEL_FLAGS,
    add_arguments,
    merge_command_line,
    merge_yaml,
)
from megatron_scalevec.integration.resumed import execution_to_keep
from megatron_scalevec.integration.session import Session, say
from megatron_scalevec.support import refusals, refuse_unsupported

__all__ = [
    "AUDIT_FILE",
    "add_our_arguments",
    "audit_files",
    "load_yaml",
    "settle_execution",
    "take_over",
    "validate",
]

AUDIT_FILE = "scalevec_audit.json"
LOG_FILE = "scalevec_telemetry.jsonl"


def add_our_arguments(_: Session, original):
    return lambda parser: add_arguments(original(parser))


def load_yaml(current: Session, original):
    def load_yaml(yaml_path):
        args = original(yaml_path)
        merge_yaml(args, current.command_line, yaml_path)
        return args

    return load_yaml


def validate(current: Session, original):
    def validate(args, defaults=None):
        added = merge_command_line(args, current.command_line)
        if added:
            say(f"the script left out {', '.join(added)}; added to Megatron's arguments")
        _strategy_of_spec(args)
        config = ScaleVecConfig.from_namespace(args)
        if current.describing:
            # As they were given, before CPU mode makes something else of them.
            refuse_unsupported(args, config, current.version)
        if current.cpu:
            _choose_for_cpu(current, args, config)
        _settle_telemetry(current, args, config)
        if not current.describing:
            _require_data(args)
            _require_audit_file(args, config)
            _require_log_file(current, args)
        # Before Megatron's own validation, whose complaints would send the user in another direction;
        # and after it, when derived values are known and YAML sections are flat.
        refuse_unsupported(args, config, current.version)
        result = original(args, {} if defaults is None else defaults)
        args = args if result is None else result
        refuse_unsupported(args, config, current.version)
        settle_execution(current, args, config)
        current.audit_files = audit_files(args)
        current.replicas_every = getattr(args, "scalevec_debug_replicas", None)
        _say_if_never("compared", "--scalevec-debug-replicas", current.replicas_every, args)
        if config.active:
            say(f"scale vectors asked for: {config.describe()}")
        return result

    return validate


def settle_execution(current: Session, args: Any, config: ScaleVecConfig) -> None:
    """Decide on the mode of execution, and put it where checkpoints keep it.

    Raises:
        ScaleVecError: The mode that was asked for is not proven for this run.
    """
    resumed = None if current.describing else lambda: execution_to_keep(args)
    choice = choose_execution(args, config, current.version, resumed)
    args.scalevec_executed = choice.mode
    current.config = dataclasses.replace(config, execution=choice.mode) if config.active else config
    current.execution_reason = choice.reason


def _choose_for_cpu(current: Session, args: Any, config: ScaleVecConfig) -> None:
    """Change what CPU needs changed, and say what that hides: the same command line goes to GPUs."""
    from megatron_scalevec import cpu

    before = refusals(args, config, current.version)
    changes = current.cpu_changes = cpu.choose_arguments(args)
    if changes:
        say(f"CPU mode changed {len(changes)} arguments: {'; '.join(changes)}")
    after = refusals(args, config, current.version)
    for sentence in before:
        if sentence not in after:
            say(f"on GPUs this run would be refused: {sentence}")


def _strategy_of_spec(args: Any) -> None:
    """``--spec megatron_scalevec.specs NAME`` means what ``--scalevec-strategy`` means."""
    spec = getattr(args, "spec", None)
    if spec and spec[0] == "megatron_scalevec.specs":
        from megatron_scalevec.specs import strategy_named

        take_over(args, strategy_named(spec[1] if len(spec) > 1 else ""))


def take_over(args: Any, config: ScaleVecConfig) -> None:
    """Write a spec's strategy into the arguments, where checkpoints keep it.

    Raises:
        ScaleVecError: The arguments ask for another one.
    """
    if any(getattr(args, f"scalevec_{name}", None) is not None for name in MODEL_FLAGS):
        asked = ScaleVecConfig.from_namespace(args)
        if asked != config:
            raise ScaleVecError(
                f"--spec asks for {config.describe()}, and the --scalevec-* flags (or the checkpoint's "
                f"arguments) ask for {asked.describe()}; drop one of the two."
            )
    for key, value in config.as_arguments().items():
        setattr(args, key, value)


def _require_data(args: Any) -> None:
    """Stop for a dataset that is not there; Megatron would find out on one rank, minutes later."""
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in _prefixes(getattr(args, name, None)):
            # Remote storage, and formats of other datasets (JSON lines, folders), are not ours to judge.
            if "://" in prefix or os.path.exists(prefix):
                continue
            missing = [end for end in (".bin", ".idx") if not os.path.exists(prefix + end)]
            if missing:
                flag = "--" + name.replace("_", "-")
                raise ScaleVecError(
                    f"{flag} {prefix}: {' and '.join(prefix + end for end in missing)} not found; give the "
                    "path of an indexed dataset without its .bin/.idx ending."
                )


def audit_files(args: Any) -> list[str]:
    beside = [os.path.join(args.save, AUDIT_FILE)] if getattr(args, "save", None) else []
    asked = getattr(args, "scalevec_audit", None)
    return [asked, *beside] if asked else beside


def _require_audit_file(args: Any, config: ScaleVecConfig) -> None:
    """Stop for a file that could not be written, before anything has been built."""
    path = getattr(args, "scalevec_audit", None)
    if path is None:
        return
    if not config.active and not getattr(args, "spec", None):  # a spec may bring a strategy
        raise ScaleVecError(
            f"--scalevec-audit {path} has nothing to say about a stock model; add --scalevec-strategy, for "
            "example hg, or drop it."
        )
    _require_writable("--scalevec-audit", path)


def _settle_telemetry(current: Session, args: Any, config: ScaleVecConfig) -> None:
    """Decide how often is logged, and to which file.

    Raises:
        ScaleVecError: There is nothing to log, or nowhere to log it to.
    """
    file, interval = getattr(args, "scalevec_log", None), getattr(args, "scalevec_log_interval", None)
    current.log_interval = current.log_file = None
    if file is None and interval is None:
        return
    if not config.active and not getattr(args, "spec", None):  # a spec may bring a strategy
        raise ScaleVecError(
            "--scalevec-log-interval and --scalevec-log have nothing to say about a stock model; add "
            "--scalevec-strategy, for example hg, or drop them."
        )
    if file is None and getattr(args, "save", None):
        file = os.path.join(args.save, LOG_FILE)
    if file is None and not (getattr(args, "tensorboard_dir", None) or getattr(args, "wandb_project", None)):
        raise ScaleVecError(
            f"--scalevec-log-interval {interval} has nowhere to log to: add --scalevec-log FILE, --save, "
            "--tensorboard-dir or --wandb-project."
        )
    current.log_interval = LOG_INTERVAL if interval is None else interval
    current.log_file = file
    _say_if_never("logged", "--scalevec-log-interval", current.log_interval, args)


def _say_if_never(done: str, flag: str, interval: int | None, args: Any) -> None:
    """Of an interval that is longer than the run."""
    steps = getattr(args, "train_iters", None)
    if interval and steps and interval > steps:
        say(
            f"nothing will be {done}: {flag} is {interval}, and the run has {steps} iterations; give a "
            "smaller number."
        )


def _require_log_file(current: Session, args: Any) -> None:
    """Stop for a file that could not be written, or is somebody else's, before anything has been built."""
    path = current.log_file
    if path is None:
        return
    named = getattr(args, "scalevec_log", None) is not None
    _require_writable("--scalevec-log", path, "" if named else " (by default in the --save folder)")
    if os.path.realpath(path) in map(os.path.realpath, audit_files(args)):
        raise ScaleVecError(
            f"{path} would be both the audit and the file of --scalevec-log; give one of them another name."
        )
    if getattr(args, "rank", 0) == getattr(args, "world_size", 1) - 1:  # the one that writes
        from megatron_scalevec.telemetry.writing import require_telemetry

        require_telemetry(path)


def _require_writable(flag: str, path: str, why_there: str = "") -> None:
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(folder):
        folder = os.path.dirname(folder)
    if not os.path.basename(path):
        why = "names no file"
    elif os.path.isdir(path):
        why = "is a folder"
    elif not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
        why = f"cannot be created in {folder}"
    elif os.path.exists(path) and not os.access(path, os.W_OK):
        why = "cannot be written to"
    else:
        return
    raise ScaleVecError(f"{flag} {path}{why_there} {why}; give {flag} the name of a file to write.")


def _prefixes(value: Any) -> list[str]:
    """Paths in Megatron's blend notation, where weights may stand between them."""
    if value is None:
        return []
    items = value.split() if isinstance(value, str) else [str(item) for item in value]
    return [item for item in items if not _is_number(item)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
