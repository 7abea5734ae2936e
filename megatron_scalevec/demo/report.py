"""report.json, and the table that is made from it."""

from __future__ import annotations

import datetime
import json
import math
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from megatron_scalevec.demo.folder import KIND
from megatron_scalevec.demo.options import BASELINE, Options
from megatron_scalevec.files import write_file

__all__ = [
    "SCHEMA_VERSION",
    "Result",
    "as_json",
    "make_report",
    "median_step_time",
    "note",
    "table",
    "tail",
    "tail_mean",
    "tail_steps",
    "write_report",
]

SCHEMA_VERSION = 1

_MOST_WARM_UP_STEPS = 20


@dataclass(frozen=True)
class Result:
    """What one run left behind."""

    name: str
    strategy: str
    seed: int
    command: tuple[str, ...]
    training: dict[int, float]
    validation: dict[int, float]
    final_validation_loss: float
    step_times_ms: dict[int, float]
    seconds: float
    parameters_logged: int | None
    """Trainable parameters of the first rank, from Megatron's log."""
    audit: dict[str, Any] | None


def note(seeds: int) -> str:
    """What the demo shows and what it does not."""
    return (
        "A run this small shows that the machinery works: Megatron's own loop built, audited and "
        "trained the strategies. It does not show how large the gain is"
        + ("; one seed says nothing about chance." if seeds == 1 else ".")
    )


def make_report(
    results: Sequence[Result],
    options: Options,
    *,
    text: dict[str, Any],
    machine: dict[str, Any],
    versions: dict[str, str],
) -> dict[str, Any]:
    """The record of a demo, as JSON can hold it."""
    stock_parameters, stock_groups = _stock(results, options)
    runs = [_run(result, options, stock_parameters, stock_groups) for result in results]
    jobs = machine.get("jobs", 1)
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "note": note(len(options.seeds)),
        "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "arguments": options.record(),
        "versions": versions,
        "machine": {**machine, "system": platform.platform(), "processor": platform.machine()},
        "text": text,
        "units": {
            "loss": "nats per byte",
            "validation": "every evaluation reads other held-out sequences, the same ones in all "
            "runs of a seed",
            "tokens": "bytes of text, each document's end included",
            "step_time_ms": "median of Megatron's time per step without the first steps; "
            + (
                f"up to {jobs} runs shared the machine, so ratios mean more than times"
                if jobs > 1
                else "one run at a time"
            ),
            "std": "standard deviation over the seeds; null for one seed",
        },
        "summary": _summary(runs, options),
        "runs": runs,
    }


def as_json(report: dict[str, Any]) -> str:
    """It as the text of strict JSON: what is not a finite number becomes null."""
    return json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write :func:`as_json`, whole or not at all.

    Raises:
        OSError: It cannot be written.
    """
    write_file(path, as_json(report))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- one run --------------------------------------------------------------------------------------


def _run(
    result: Result,
    options: Options,
    stock_parameters: int | None,
    stock_groups: list[dict[str, Any]] | None,
) -> dict[str, Any]:
    audit = result.audit
    if audit is not None:
        stock_parameters, groups = audit["parameters_stock"], audit["decay_groups"]
    else:
        groups = stock_groups
    added = 0 if audit is None else audit["parameters_added"]
    median, dropped = median_step_time(result.step_times_ms)
    return {
        "name": result.name,
        "strategy": result.strategy,
        "seed": result.seed,
        "command": list(result.command),
        "log": f"logs/{result.name}.log",
        "audit": None if audit is None else f"audits/{result.name}.json",
        "final_validation_loss": result.final_validation_loss,
        "final_training_loss": tail_mean(result.training),
        "step_time_ms": {
            "median": median,
            "steps": max(0, len(result.step_times_ms) - dropped),
            "dropped_first": dropped,
        },
        "seconds": round(result.seconds, 1),
        "parameters": {
            "stock": stock_parameters,
            "added": added,
            "added_percent": None if not stock_parameters else 100.0 * added / stock_parameters,
        },
        "weight_decay_groups": groups,
        "validation": _curve(result.validation, options),
        "training": _curve(result.training, options),
    }


def _curve(losses: dict[int, float], options: Options) -> list[dict[str, float]]:
    per_step = options.tokens_per_step
    return [{"step": s, "tokens": s * per_step, "loss": losses[s]} for s in sorted(losses)]


def median_step_time(times: dict[int, float]) -> tuple[float | None, int]:
    """Median after the first steps, in which memory is allocated and caches fill."""
    steps = sorted(times)
    dropped = min(_MOST_WARM_UP_STEPS, len(steps) // 5)
    kept = [times[step] for step in steps[dropped:]]
    return (statistics.median(kept) if kept else None), dropped


def tail_steps(last: int) -> int:
    """Steps that the end of a run is taken to be: a twentieth of all, one at least."""
    return max(1, last // 20)


def tail(losses: Mapping[int, float]) -> list[float]:
    """The losses within the last :func:`tail_steps` of a run that may have one only now and then.

    Args:
        losses: By step.
    """
    last = max(losses, default=0)
    return [losses[step] for step in sorted(losses) if step > last - tail_steps(last)]


def tail_mean(losses: Mapping[int, float]) -> float | None:
    """Mean of :func:`tail`, the loss that a run ended with; None where there is none."""
    found = tail(losses)
    return statistics.fmean(found) if found else None


def _stock(results: Iterable[Result], options: Options) -> tuple[int | None, list[dict[str, Any]] | None]:
    """Parameters and decay groups of the stock model, which makes no audit of its own.

    The audits of the others count its parameters, and its tensors follow from theirs: take away the
    vectors that were added, put back the retired norm scales. In this model one-dimensional means norm,
    and those are what Megatron does not decay.
    """
    results = list(results)
    for result in results:
        audit = result.audit
        if audit is None:
            continue
        added = sum(vector["added"] for vector in audit["vectors"])
        retired = audit["norm_scales_retired"]
        tensors = sum(group["tensors"] for group in audit["decay_groups"])
        if not tensors:
            return audit["parameters_stock"], None
        tensors += retired - added
        norms = _norms(options)
        groups = [(0.0, norms), (1.0, tensors - norms)]
        return audit["parameters_stock"], [
            {
                "weight_decay_multiplier": multiplier,
                "max_learning_rate": options.learning_rate,
                "tensors": count,
            }
            for multiplier, count in groups
        ]
    logged = results[0].parameters_logged if options.tensor_parallel == 1 else None
    return logged, None


def _norms(options: Options) -> int:
    return 2 * options.layers + 1


# --- the summary ----------------------------------------------------------------------------------


def _summary(runs: list[dict[str, Any]], options: Options) -> list[dict[str, Any]]:
    baseline = {run["seed"]: run for run in runs if run["strategy"] == BASELINE}
    found = []
    for strategy in options.strategies:
        mine = [run for run in runs if run["strategy"] == strategy]
        pairs = [(run, baseline[run["seed"]]) for run in mine]
        ratios = [
            run["step_time_ms"]["median"] / stock["step_time_ms"]["median"]
            for run, stock in pairs
            if run["step_time_ms"]["median"] and stock["step_time_ms"]["median"]
        ]
        differences = [run["final_validation_loss"] - stock["final_validation_loss"] for run, stock in pairs]
        is_baseline = strategy == BASELINE
        found.append(
            {
                "strategy": strategy,
                "seeds": len(mine),
                "validation_loss": _mean([run["final_validation_loss"] for run in mine]),
                "difference_to_stock": None if is_baseline else _mean(differences),
                "step_time_ms": _mean(
                    [
                        run["step_time_ms"]["median"]
                        for run in mine
                        if run["step_time_ms"]["median"] is not None
                    ]
                ),
                "step_time_ratio": None if is_baseline else _mean(ratios),
                "parameters": mine[0]["parameters"],
                "weight_decay_groups": mine[0]["weight_decay_groups"],
            }
        )
    return found


def _mean(values: Sequence[float]) -> dict[str, float | None] | None:
    if not values:
        return None
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
    }


# --- the table ------------------------------------------------------------------------------------


def table(report: dict[str, Any]) -> Table:
    """The table shown at the end."""
    spread = any(entry["seeds"] > 1 for entry in report["summary"])
    made = Table(
        title="Validation loss in nats per byte"
        + (", mean ± standard deviation over the seeds" if spread else ""),
        title_justify="left",
        title_style="",
    )
    for column in ("strategy", "validation\nloss", "against\nstock", "parameters\nadded"):
        made.add_column(column, justify="left" if column == "strategy" else "right")
    for column in ("in\npercent", "step\ntime", "tensors that\ndecay"):
        made.add_column(column, justify="right")
    for entry in report["summary"]:
        parameters = entry["parameters"]
        percent = parameters["added_percent"]
        made.add_row(
            entry["strategy"],
            _shown(entry["validation_loss"], ".4f"),
            _shown(entry["difference_to_stock"], "+.4f"),
            f"{parameters['added']:,}" if entry["difference_to_stock"] else "-",
            "-" if percent is None or not entry["difference_to_stock"] else f"{percent:.3f} %",
            "x 1" if entry["strategy"] == BASELINE else _shown_ratio(entry["step_time_ratio"]),
            _shown_groups(entry["weight_decay_groups"]),
        )
    return made


def _shown(value: dict[str, float | None] | None, form: str) -> str:
    if value is None or value["mean"] is None:
        return "-"
    spread = "" if value["std"] is None else f" ± {value['std']:{form.lstrip('+')}}"
    return f"{value['mean']:{form}}{spread}"


def _shown_ratio(value: dict[str, float | None] | None) -> str:
    return "-" if value is None else f"x {value['mean']:.2f}"


def _shown_groups(groups: list[dict[str, Any]] | None) -> str:
    if not groups:
        return "-"
    total = sum(group["tensors"] for group in groups)
    decaying = sum(group["tensors"] for group in groups if group["weight_decay_multiplier"])
    return f"{decaying} of {total}"
