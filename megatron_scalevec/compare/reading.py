"""Reading runs: Megatron's log, TensorBoard, JSONL, and the folders of ``scalevec demo`` and ``study``."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy

from megatron_scalevec.demo.folder import KIND as DEMO
from megatron_scalevec.demo.folder import REPORT
from megatron_scalevec.demo.logs import LogReader
from megatron_scalevec.demo.report import median_step_time
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.store import DESCRIPTION, Store

__all__ = ["Run", "demo_runs", "read_run", "read_runs", "study_run"]

# The same value under the names that are in use.
_STEP = ("step", "iteration", "_step")
_LOSS = ("loss", "lm loss", "lm_loss", "train_loss")
_VALIDATION = ("validation_loss", "lm loss validation", "val_loss")
_TOKENS = ("tokens", "consumed_tokens")
_SAMPLES = ("consumed_samples", "consumed samples", "samples")
_SECONDS = ("step_seconds", "iteration-time")
_MILLISECONDS = ("step_time_ms", "elapsed_time_per_iteration_ms")
_MEMORY = ("memory_bytes", "mem-max-allocated-bytes")
# Steps stay whole numbers in a float.
_LAST_STEP = 2**53


@dataclass(frozen=True, eq=False)
class Run:
    """What is known of one run. Arrays have one entry for each step with a training loss, rising."""

    label: str
    """What it is an example of; runs that share it differ in their seed."""
    source: str
    steps: numpy.ndarray
    """int64 [n]."""
    losses: numpy.ndarray
    """Training loss, float64 [n], in nats per token."""
    tokens: numpy.ndarray | None = None
    """Tokens consumed, float64 [n]; None if the run does not say."""
    seconds: numpy.ndarray | None = None
    """Time spent in steps so far, float64 [n]; None if the run does not say."""
    validation: tuple[tuple[int, float], ...] = ()
    """Steps, and the validation losses there, those that training paused for."""
    final_validation: float | None = None
    """Validation loss after training."""
    step_time_ms: float | None = None
    """Median time of a step without the first ones."""
    memory_bytes: float | None = None
    """Largest memory allocated on a GPU."""
    seed: int | None = None
    diverged_at: int | None = None
    """The first step whose loss was no finite number; the losses hold the others."""
    remark: str = ""
    """What is to be said of the place that it was read from."""

    def __post_init__(self) -> None:
        if not len(self.steps) and self.diverged_at is None:
            raise ScaleVecError(f"{self.source} holds no training loss; name a run that has taken steps.")


def read_run(path: str | Path, label: str | None = None, seq_length: int | None = None) -> Run:
    """Read one run: a file of Megatron's log or of JSON lines, or a folder of TensorBoard's.

    Args:
        path: The file or folder.
        label: What it is to be called; None takes the strategy that it names, or the file's name.
        seq_length: Tokens of a sequence, for runs that count samples and do not say.

    Raises:
        ScaleVecError: There is no run.
    """
    [run] = read_runs(path, label, seq_length, only_one=True)
    return run


def read_runs(
    path: str | Path, label: str | None = None, seq_length: int | None = None, only_one: bool = False
) -> list[Run]:
    """Read all runs of a file or folder: as :func:`read_run`, or results of ``scalevec demo`` and ``study``.

    Raises:
        ScaleVecError: There is no run, or more than the one that was asked for.
    """
    path = Path(path)
    if not path.exists():
        raise ScaleVecError(f"{path} does not exist: name a log, a JSONL file or a folder of a run.")
    try:
        runs = _read(path, seq_length)
    except OSError as error:
        raise ScaleVecError(f"{path} cannot be read: {error.strerror or error}.") from None
    if only_one and len(runs) != 1:
        raise ScaleVecError(f"{path} holds {len(runs)} runs, and one was asked for.")
    if label is None:
        return runs
    labels = {run.label for run in runs}
    if len(labels) > 1:
        raise ScaleVecError(
            f"{path} holds runs of {', '.join(sorted(labels))}, which cannot all be {label!r}; leave the "
            "label out."
        )
    return [replace(run, label=label) for run in runs]


def _read(path: Path, seq_length: int | None) -> list[Run]:
    if path.is_dir():
        if (path / DESCRIPTION).is_file():
            return _study_runs(path)
        if (path / REPORT).is_file():
            return demo_runs(_json(path / REPORT), str(path))
        return [_tensorboard(path, seq_length)]
    if path.name.startswith("events.out.tfevents"):
        return [_tensorboard(path, seq_length)]
    if path.suffix == ".json":
        return demo_runs(_json(path), str(path))
    with open(path, "rb") as file:
        first = file.read(4096).lstrip()
    return [_json_lines(path, seq_length) if first.startswith(b"{") else _log(path, seq_length)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ScaleVecError(f"{path} is no JSON: {error}.") from None


def _array(values: Mapping[int, float], steps: list[int]) -> numpy.ndarray | None:
    """The values at the steps; between those that are there, and beyond, as a line."""
    if not values or not steps:
        return None
    known = sorted(values)
    return numpy.interp(steps, known, [values[step] for step in known]).astype(float)


def _make(
    source: str,
    label: str,
    losses: Mapping[int, float],
    *,
    tokens: Mapping[int, float] | None = None,
    milliseconds: Mapping[int, float] | None = None,
    failed_at: int | None = None,
    **more: Any,
) -> Run:
    steps = sorted(step for step, loss in losses.items() if loss is not None and math.isfinite(loss))
    unusable = [step for step in losses if losses[step] is None or not math.isfinite(losses[step])]
    if failed_at is not None:
        unusable.append(failed_at)
    seconds = None
    median = None
    if milliseconds:
        known = sorted(milliseconds)
        # A value stands for the steps since the last one: logs may leave steps out.
        spans = numpy.diff(known, prepend=min(0, known[0] - 1))
        total = numpy.cumsum([milliseconds[step] for step in known] * spans) / 1e3
        seconds = numpy.interp(steps, known, total)
        median, _ = median_step_time(dict(milliseconds))
    return Run(
        label=label,
        source=source,
        steps=numpy.array(steps, dtype=numpy.int64),
        losses=numpy.array([losses[step] for step in steps], dtype=float),
        tokens=_array(tokens or {}, steps),
        seconds=seconds,
        step_time_ms=median,
        diverged_at=min(unusable, default=None),
        **more,
    )


def _tokens(samples: Mapping[int, float], seq_length: int | None) -> dict[int, float]:
    return {step: count * seq_length for step, count in samples.items()} if seq_length else {}


def _log(path: Path, seq_length: int | None) -> Run:
    log = LogReader(path)
    log.poll()
    said = log.arguments
    strategy = said.get("scalevec_strategy", "None")
    return _make(
        str(path),
        path.stem if strategy == "None" else strategy,
        log.training,
        tokens=_tokens(log.samples, seq_length or _whole(said, "seq_length")),
        milliseconds=log.step_times,
        failed_at=log.failed_at,
        validation=tuple(sorted(log.validation.items())),
        final_validation=log.final_validation,
        memory_bytes=None if log.memory_megabytes is None else log.memory_megabytes * 2**20,
        seed=_whole(said, "seed"),
    )


def _whole(said: Mapping[str, str], name: str) -> int | None:
    """A whole number among Megatron's arguments."""
    value = said.get(name, "")
    return int(value) if value.isdigit() else None


def _value(line: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    for name in names:
        value = line.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                return float(value)
            except OverflowError:  # an integer beyond what a float can be
                return math.inf if value > 0 else -math.inf
    return None


def _json_lines(path: Path, seq_length: int | None) -> Run:
    """One object a line; what a line does not have, others may. Later lines of a step count."""
    series: dict[str, dict[int, float]] = {}
    seed, label = None, path.stem
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                line = json.loads(raw.decode("utf-8"))
            except ValueError:
                if not raw.endswith(b"\n"):
                    continue  # the run is writing it
                raise ScaleVecError(
                    f"{path}:{number} is no JSON object in UTF-8; each line must be one."
                ) from None
            if not isinstance(line, dict):
                raise ScaleVecError(f"{path}:{number} is no JSON object; each line must be one.")
            seed = line["seed"] if isinstance(line.get("seed"), int) else seed
            for name in ("strategy", "scalevec_strategy"):
                label = line[name] if isinstance(line.get(name), str) else label
            step = _value(line, _STEP)
            if step is None:
                continue
            if not 0 <= step <= _LAST_STEP:
                raise ScaleVecError(
                    f"{path}:{number} has the step {step:g}; a step is a number from 0 to {_LAST_STEP:.0e}."
                )
            for name, names in _SERIES.items():
                if (value := _value(line, names)) is not None:
                    series.setdefault(name, {})[int(step)] = value
    return _from_series(str(path), label, series, seq_length, seed)


_SERIES = {
    "loss": _LOSS,
    "validation": _VALIDATION,
    "tokens": _TOKENS,
    "samples": _SAMPLES,
    "seconds": _SECONDS,
    "milliseconds": _MILLISECONDS,
    "memory": _MEMORY,
}


def _from_series(
    source: str, label: str, series: dict[str, dict[int, float]], seq_length: int | None, seed: int | None
) -> Run:
    validation = sorted(series.get("validation", {}).items())
    losses = series.get("loss", {})
    milliseconds = series.get("milliseconds") or {k: v * 1e3 for k, v in series.get("seconds", {}).items()}
    # Megatron evaluates at the end as well; that value belongs to the whole run.
    final = validation[-1][1] if validation and losses and validation[-1][0] >= max(losses) else None
    return _make(
        source,
        label,
        losses,
        tokens=series.get("tokens") or _tokens(series.get("samples", {}), seq_length),
        milliseconds=milliseconds,
        validation=tuple(validation if final is None else validation[:-1]),
        final_validation=final,
        memory_bytes=max(series["memory"].values()) if series.get("memory") else None,
        seed=seed,
    )


def _tensorboard(path: Path, seq_length: int | None) -> Run:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise ScaleVecError(
            f"{path} is read with tensorboard, which is not installed: pip install tensorboard, or name the "
            "run's log."
        ) from None
    events = EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if not any(name in tags for name in _LOSS):
        raise ScaleVecError(
            f"{path} holds no TensorBoard curve of the training loss ({', '.join(_LOSS)}); name the folder "
            "of --tensorboard-dir, or a log."
        )

    def scalars(names: tuple[str, ...]) -> dict[int, float]:
        for name in names:
            if name in tags:
                # Later events of a step come from a run that went on from a checkpoint.
                return {event.step: float(event.value) for event in events.Scalars(name)}
        return {}

    series = {name: values for name, names in _SERIES.items() if (values := scalars(names))}
    said = _said(events)
    if "samples" not in series and "tokens" not in series:
        series["samples"] = _samples(events, tags)
    strategy = said.get("scalevec_strategy", "None")
    return _from_series(
        str(path),
        (path if path.is_dir() else path.parent).name if strategy == "None" else strategy,
        series,
        seq_length or _whole(said, "seq_length"),
        _whole(said, "seed"),
    )


def _said(events: Any) -> dict[str, str]:
    """Megatron's arguments, which it writes as texts."""
    found = {}
    for name in ("seq_length", "seed", "scalevec_strategy"):
        tag = f"{name}/text_summary"
        if tag in events.Tags()["tensors"]:
            found[name] = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
    return found


def _samples(events: Any, tags: list[str]) -> dict[int, float]:
    """Megatron draws every loss once against steps and once against samples, in the same order."""
    if "lm loss" not in tags or "lm loss vs samples" not in tags:
        return {}
    pairs = zip(events.Scalars("lm loss"), events.Scalars("lm loss vs samples"))
    return {by_step.step: float(by_sample.step) for by_step, by_sample in pairs}


def demo_runs(report: Any, source: str) -> list[Run]:
    """The runs of a demo's ``report.json``.

    Raises:
        ScaleVecError: It is none.
    """
    if not isinstance(report, dict) or report.get("kind") != DEMO:
        raise ScaleVecError(f"{source} is no report of scalevec demo.")
    runs = []
    for entry in report["runs"]:
        final = entry["final_validation_loss"]
        run = _make(
            f"{source}: {entry['name']}",
            entry["strategy"],
            {point["step"]: point["loss"] for point in entry["training"]},
            tokens={point["step"]: point["tokens"] for point in entry["training"]},
            validation=tuple((p["step"], p["loss"]) for p in entry["validation"] if p["loss"] is not None),
            final_validation=final,
            # Every run of a demo has one, and JSON has no other word for one that is no number.
            failed_at=entry["training"][-1]["step"] if final is None and entry["training"] else None,
            seed=entry["seed"],
        )
        runs.append(_with_even_steps(run, entry["step_time_ms"]["median"]))
    return runs


def _with_even_steps(run: Run, milliseconds: float | None) -> Run:
    """Where only the median step is known, every step took that long."""
    if milliseconds is None:
        return run
    return replace(run, step_time_ms=milliseconds, seconds=run.steps * milliseconds / 1e3)


def _study_runs(folder: Path) -> list[Run]:
    from megatron_scalevec.study.report import finished_runs

    runs, diverged = finished_runs(Store(folder))
    remark = ""
    if diverged:
        counted = ", ".join(f"{label} {count}" for label, count in diverged.items())
        remark = f"{folder}: runs that diverged, which are left out: {counted}."
    if not runs:
        said = f"{folder} holds no finished run at a chosen learning rate yet; let the study go on. {remark}"
        raise ScaleVecError(said.rstrip())
    return [replace(run, remark=remark) for run in runs]


def study_run(result: Mapping[str, Any], label: str, tokens_per_step: int, source: str) -> Run:
    """A run from its result in a study's folder, without times: its runs share the machine."""
    losses = dict(map(tuple, result["training"]))
    return _make(
        source,
        label,
        losses,
        tokens={step: step * tokens_per_step for step in losses},
        final_validation=result["final_validation_loss"],
        seed=result["seed"],
    )
