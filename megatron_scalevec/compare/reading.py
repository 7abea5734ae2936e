"""Reading runs: Megatron's log, TensorBoard, JSONL, and the folders of ``scalevec demo`` and ``study``."""

from __future__ import annotations

import codecs
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_scalevec.compare.run import LAST_STEP, Run, make_run, require_sound, visible
from megatron_scalevec.demo.folder import KIND as DEMO
from megatron_scalevec.demo.folder import REPORT
from megatron_scalevec.demo.logs import LogReader
from megatron_scalevec.demo.series import Series
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.study.store import DESCRIPTION, Store

__all__ = ["demo_runs", "read_run", "read_runs", "study_run"]

# The same value under the names that are in use.
_STEP = ("step", "iteration", "_step")
_LOSS = ("loss", "lm loss", "lm_loss", "train_loss")
_VALIDATION = ("validation_loss", "lm loss validation", "val_loss")
_TOKENS = ("tokens", "consumed_tokens")
_SAMPLES = ("consumed_samples", "consumed samples", "samples")
_SECONDS = ("step_seconds", "iteration-time")
_MILLISECONDS = ("step_time_ms", "elapsed_time_per_iteration_ms")
_MEMORY = ("memory_bytes", "mem-max-allocated-bytes")
# How files begin that hold a run's lines, but not as they are.
_PACKED = {
    b"\x1f\x8b": "is compressed; unpack it first",
    b"\xff\xfe": "is UTF-16; save it as UTF-8",
    b"\xfe\xff": "is UTF-16; save it as UTF-8",
}


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
    try:
        if not path.exists():
            raise ScaleVecError(f"{path} does not exist: name a log, a JSONL file or a folder of a run.")
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
    return [replace(run, label=visible(label)) for run in runs]


def _read(path: Path, seq_length: int | None) -> list[Run]:
    if path.is_dir():
        if (path / DESCRIPTION).is_file():
            return _study_runs(path)
        if (path / REPORT).is_file():
            return demo_runs(_json(path / REPORT), str(path))
        return [_tensorboard(path, seq_length)]
    if path.name.startswith("events.out.tfevents"):
        return [_tensorboard(path, seq_length)]
    if not path.is_file():
        raise ScaleVecError(f"{path} is no file that can be read twice; write what it gives to a file first.")
    with open(path, "rb") as file:
        first = file.read(4096)
    for start, what in _PACKED.items():
        if first.startswith(start):
            raise ScaleVecError(f"{path} {what}.")
    if not first.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{"):
        if path.suffix == ".json":
            raise ScaleVecError(f"{path} is no report of scalevec demo and holds no JSON lines.")
        return [_log(path, seq_length)]
    if (whole := _one_object(path)) is not None:
        return demo_runs(whole, str(path))
    return [_json_lines(path, seq_length)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ScaleVecError(f"{path} is no JSON: {error}.") from None


def _one_object(path: Path) -> dict[str, Any] | None:
    """The JSON object that a whole file is; None where there are several, or one with a run's step."""
    with open(path, "rb") as file:
        if _is_object(file.readline()) and any(line.strip() for line in file):
            return None
    try:
        whole = _json(path)
    except ScaleVecError:  # the reader of lines says which it is
        return None
    return None if _value(whole, _STEP) is not None else whole


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return False


def _tokens(samples: Mapping[int, float], seq_length: int | None) -> dict[int, float]:
    return {step: count * seq_length for step, count in samples.items()} if seq_length else {}


def _log(path: Path, seq_length: int | None) -> Run:
    log = LogReader(path)
    log.poll(ended=True)
    said = log.arguments
    _require_one_run(path, log.starts)
    strategy = said.get("scalevec_strategy", "None")
    return make_run(
        str(path),
        path.stem if strategy == "None" else strategy,
        log.training,
        tokens=_tokens(log.samples, _whole(said, "seq_length") or seq_length),
        milliseconds=log.step_times,
        failed_at=log.failed_at,
        abandoned=log.abandoned,
        validation=sorted(log.validation.items()),
        final_validation=log.final_validation,
        memory_bytes=None if log.memory_megabytes is None else log.memory_megabytes * 2**20,
        seed=_whole(said, "seed"),
    )


def _require_one_run(path: Path, starts: Sequence[Mapping[str, str]]) -> None:
    """All starts that a file has the arguments of must be of one run."""
    for first, then in itertools.pairwise(starts):
        for name, what, default in (("scalevec_strategy", "strategy", "stock"), ("seed", "seed", None)):
            # Plain Megatron prints no strategy; but a seed it always does, so that nothing has been cut off.
            whole = "seed" in first and "seed" in then
            one, other = (start.get(name, default if whole else None) for start in (first, then))
            one, other = (default if value == "None" else value for value in (one, other))
            if None not in (one, other) and one != other:
                _two_runs(path, what, one, other)


def _two_runs(path: Path, what: str, one: object, other: object) -> NoReturn:
    place = "folder" if path.is_dir() else "file"
    values = " and one with ".join(visible(str(value)) for value in (one, other))
    raise ScaleVecError(
        f"{path} holds two runs, one with the {what} {values}: give each a {place} of its own."
    )


def _whole(said: Mapping[str, str], name: str) -> int | None:
    """A whole number among Megatron's arguments."""
    value = said.get(name, "")
    return int(value) if re.fullmatch("[0-9]{1,18}", value) else None


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
    series = Series()
    said: dict[str, Any] = {}
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if number == 1:
                raw = raw.removeprefix(codecs.BOM_UTF8)
            if not raw.strip():
                continue
            try:
                line = json.loads(raw.decode("utf-8"))
            except (ValueError, RecursionError):
                if not raw.endswith(b"\n"):
                    continue  # the run is writing it
                raise ScaleVecError(
                    f"{path}:{number} is no JSON object in UTF-8; each line must be one."
                ) from None
            if not isinstance(line, dict):
                raise ScaleVecError(f"{path}:{number} is no JSON object; each line must be one.")
            for what, value in _named_in(line):
                if said.setdefault(what, value) != value:
                    _two_runs(path, what, said[what], value)
            step = _value(line, _STEP)
            if step is None:
                continue
            if not (0 <= step <= LAST_STEP and step == int(step)):
                raise ScaleVecError(
                    f"{path}:{number} has the step {step:g}; a step is a whole number from 0 to "
                    f"{LAST_STEP:.0e}."
                )
            step = int(step)
            # Our own telemetry, which has no other word for a loss that is no number.
            without_loss = "loss" in line and line["loss"] is None and "skipped" in line
            if without_loss or _value(line, _LOSS) is not None:
                series.trained(step)
            if without_loss and line["skipped"] is False and "loss" in series.values:
                series.add("loss", step, math.nan)
            for name, names in _SERIES.items():
                if (value := _value(line, names)) is not None:
                    series.add(name, step, value)
    return _from_series(str(path), said.get("strategy", path.stem), series, seq_length, said.get("seed"))


def _named_in(line: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a line says of the run that it is of."""
    if type(line.get("seed")) is int:
        yield "seed", line["seed"]
    strategies = [line[name] for name in ("scalevec_strategy", "strategy") if isinstance(line.get(name), str)]
    if strategies:
        yield "strategy", strategies[0]


_SERIES = {
    "loss": _LOSS,
    "validation": _VALIDATION,
    "tokens": _TOKENS,
    "samples": _SAMPLES,
    "seconds": _SECONDS,
    "milliseconds": _MILLISECONDS,
    "memory": _MEMORY,
}


def _from_series(source: str, label: str, said: Series, seq_length: int | None, seed: int | None) -> Run:
    series = said.values
    validation = sorted(series.get("validation", {}).items())
    losses = series.get("loss", {})
    memory = series.get("memory", {})
    require_sound(source, "memory", memory)
    milliseconds = series.get("milliseconds") or {k: v * 1e3 for k, v in series.get("seconds", {}).items()}
    # Megatron evaluates at the end as well; that value belongs to the whole run.
    final = validation[-1][1] if validation and losses and validation[-1][0] >= max(losses) else None
    return make_run(
        source,
        label,
        losses,
        tokens=series.get("tokens") or _tokens(series.get("samples", {}), seq_length),
        milliseconds=milliseconds,
        validation=validation if final is None else validation[:-1],
        final_validation=final,
        memory_bytes=max(memory.values(), default=None),
        abandoned=said.abandoned,
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
    # Where a run went on is told by its losses: tensorboard's own way takes counts of samples for steps.
    events = EventAccumulator(
        str(path), size_guidance={"scalars": 0, "tensors": 0}, purge_orphaned_data=False
    )
    events.Reload()
    tags = events.Tags()["scalars"]
    if not any(name in tags for name in _LOSS):
        raise ScaleVecError(
            f"{path} holds no TensorBoard curve of the training loss ({', '.join(_LOSS)}); name the folder "
            "of --tensorboard-dir, or a log."
        )

    found = []
    for name, names in _SERIES.items():
        tag = next((one for one in names if one in tags), None)
        if tag is not None:
            found += _timed(
                name, [(event.wall_time, event.step, event.value) for event in events.Scalars(tag)]
            )
    if not any(name in ("samples", "tokens") for _, name, _, _ in found):
        found += _timed("samples", _samples(events, tags))
    series = Series()
    for _, name, step, value in sorted(found, key=lambda one: one[0]):
        if name == "loss":
            series.trained(step)
        series.add(name, step, value)
    starts = _starts(events)
    _require_one_run(path, starts)
    said = {name: value for start in starts for name, value in start.items()}
    strategy = said.get("scalevec_strategy", "None")
    return _from_series(
        str(path),
        (path if path.is_dir() else path.parent).name if strategy == "None" else strategy,
        series,
        _whole(said, "seq_length") or seq_length,
        _whole(said, "seed"),
    )


def _starts(events: Any) -> list[dict[str, str]]:
    """Megatron's arguments, which each start writes as texts."""
    found = {}
    for name in ("seq_length", "seed", "scalevec_strategy"):
        tag = f"{name}/text_summary"
        if tag in events.Tags()["tensors"]:
            found[name] = [event.tensor_proto.string_val[0].decode() for event in events.Tensors(tag)]
    return [
        {name: values[index] for name, values in found.items() if index < len(values)}
        for index in range(max(map(len, found.values()), default=0))
    ]


def _timed(name: str, events: list[tuple[float, int, float]]) -> list[tuple[float, str, int, float]]:
    """Times, name, steps and values of a curve; a clock that is set back does not change their order."""
    times = itertools.accumulate((time for time, _, _ in events), max)
    return [(time, name, step, float(value)) for time, (_, step, value) in zip(times, events)]


def _samples(events: Any, tags: list[str]) -> list[tuple[float, int, float]]:
    """Megatron draws every loss once against steps and once against samples, in the same order."""
    if "lm loss" not in tags or "lm loss vs samples" not in tags:
        return []
    pairs = zip(events.Scalars("lm loss"), events.Scalars("lm loss vs samples"))
    return [(by_sample.wall_time, by_step.step, by_sample.step) for by_step, by_sample in pairs]


def demo_runs(report: Any, source: str) -> list[Run]:
    """The runs of a demo's ``report.json``.

    Raises:
        ScaleVecError: It is none.
    """
    kind = report.get("kind") if isinstance(report, dict) else None
    if kind != DEMO:
        found = "" if kind is None else f" but of kind {kind!r}"
        raise ScaleVecError(
            f"{source} is no report of scalevec demo{found}; name one, or JSON lines (an object a line, "
            "with its step), or the folder of a demo or study."
        )
    try:
        runs = [_demo_run(entry, source) for entry in report["runs"]]
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ScaleVecError(
            f"{source}, a report of scalevec demo, is not as it was written ({type(error).__name__}: "
            f"{error}); make it again, or name the logs of its runs."
        ) from None
    if not runs:
        raise ScaleVecError(f"{source} is a report of scalevec demo on no run; name another.")
    return runs


def _demo_run(entry: Mapping[str, Any], source: str) -> Run:
    final = entry["final_validation_loss"]
    run = make_run(
        f"{source}: {entry['name']}",
        entry["strategy"],
        {point["step"]: point["loss"] for point in entry["training"]},
        tokens={point["step"]: point["tokens"] for point in entry["training"]},
        validation=[(point["step"], point["loss"]) for point in entry["validation"]],
        final_validation=final,
        # Every run of a demo has one, and JSON has no other word for one that is no number.
        failed_at=entry["training"][-1]["step"] if final is None and entry["training"] else None,
        seed=entry["seed"],
    )
    return _with_even_steps(run, entry["step_time_ms"]["median"])


def _with_even_steps(run: Run, milliseconds: float | None) -> Run:
    """Where only the median step is known, every step took that long."""
    if milliseconds is None:
        return run
    return replace(run, step_time_ms=milliseconds, seconds=run.steps * milliseconds / 1e3)


def _study_runs(folder: Path) -> list[Run]:
    from megatron_scalevec.study.report import finished_runs

    runs, diverged = finished_runs(Store(folder))
    remarks = []
    if diverged:
        counted = ", ".join(f"{label} {count}" for label, count in diverged.items())
        remarks.append(f"{folder}: runs that diverged, which are left out: {counted}.")
    if not runs:
        said = f"{folder} holds no finished run at a chosen learning rate yet; let the study go on."
        raise ScaleVecError(" ".join([said, *remarks]))
    return [replace(run, remarks=(*remarks, *run.remarks)) for run in runs]


def study_run(result: Mapping[str, Any], label: str, tokens_per_step: int, source: str) -> Run:
    """A run from its result in a study's folder, without times: its runs share the machine."""
    losses = dict(map(tuple, result["training"]))
    return make_run(
        source,
        label,
        losses,
        tokens={step: step * tokens_per_step for step in losses},
        final_validation=result["final_validation_loss"],
        seed=result["seed"],
    )
