"""The report of a study: every run's figure, mean and interval of each cell, and what they allow to say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megatron_scalevec.compare.comparison import token_ratio_of
from megatron_scalevec.compare.picture import draw
from megatron_scalevec.compare.reading import study_run
from megatron_scalevec.compare.rendering import shown
from megatron_scalevec.compare.run import Run
from megatron_scalevec.compare.statistics import LEVEL, Interval, bootstrap_interval, terminal_gap
from megatron_scalevec.compare.verdict import chance_note, verdict
from megatron_scalevec.demo.report import as_json
from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.files import write_files
from megatron_scalevec.study.arms import Arm
from megatron_scalevec.study.options import BASELINE, OPTIMIZERS, Options
from megatron_scalevec.study.plan import Cell, Job, Tuning, cells, tuning_of
from megatron_scalevec.study.records import Description
from megatron_scalevec.study.store import Store, losses_of

__all__ = ["KIND", "finished_runs", "make_report", "markdown", "write_study_report"]

KIND = "scalevec study report"


@dataclass(frozen=True)
class _CellResult:
    cell: Cell
    tuning: Tuning
    results: dict[int, dict[str, Any] | None]
    """By seed; None where there is no result yet."""
    runs: tuple[Run, ...]
    """Those that did not diverge."""

    @property
    def diverged(self) -> int:
        return sum(r is not None and r["final_validation_loss"] is None for r in self.results.values())

    @property
    def missing(self) -> int:
        return sum(result is None for result in self.results.values())


def _collect(options: Options, store: Store) -> list[_CellResult]:
    results = store.results()
    losses = losses_of(results)
    found = []
    for cell in cells(options):
        tuning = tuning_of(cell, options, losses)
        mine: dict[int, dict[str, Any] | None] = dict.fromkeys(options.seeds)
        if tuning.chosen is not None:
            for seed in options.seeds:
                mine[seed] = results.get(Job("final", cell, tuning.chosen, seed, options.steps).name)
        runs = tuple(
            study_run(
                result, _label(cell, options), options.tokens_per_step, f"{store.folder}: {result['name']}"
            )
            for result in mine.values()
            if result is not None and result["final_validation_loss"] is not None
        )
        found.append(_CellResult(cell, tuning, mine, runs))
    return found


def _label(cell: Cell, options: Options) -> str:
    return cell.arm.label if len(options.optimizers) == 1 else f"{cell.optimizer} {cell.arm.label}"


def finished_runs(store: Store) -> tuple[list[Run], dict[str, int]]:
    """The runs at the chosen learning rates that did not diverge, and how many did, by label."""
    options = store.known().options
    collected = _collect(options, store)
    runs = [run for found in collected for run in found.runs]
    return runs, {_label(found.cell, options): found.diverged for found in collected if found.diverged}


def make_report(store: Store) -> dict[str, Any]:
    """The report as JSON can hold it; nothing in it depends on the machine's load.

    Raises:
        ScaleVecError: The folder holds no study, or something in it is damaged or of another one.
    """
    known = store.known()
    return _report(known, _collect(known.options, store))


def _report(known: Description, collected: Sequence[_CellResult]) -> dict[str, Any]:
    options = known.options
    baselines = {found.cell.optimizer: found for found in collected if found.cell.arm.label == BASELINE}
    entries = [_entry(found, baselines[found.cell.optimizer], options) for found in collected]
    expected = len(collected) * len(options.seeds)
    missing = sum(found.missing for found in collected)
    comparisons = sum(entry["gap"] is not None and entry["gap"]["low"] is not None for entry in entries)
    return {
        "kind": KIND,
        "complete": missing == 0,
        "options": options.record(),
        "text": known.text,
        "versions": known.versions,
        "model": _model(collected),
        "tokens_per_run": options.steps * options.tokens_per_step,
        "runs": {"wanted": expected, "missing": missing, "diverged": sum(f.diverged for f in collected)},
        "cells": entries,
        "notes": _notes(options, collected, comparisons),
        "machine": known.machine,
    }


def _model(collected: Sequence[_CellResult]) -> dict[str, Any]:
    """Parameters of the stock model, from Megatron's log."""
    for found in collected:
        for result in found.results.values():
            if result is not None and found.cell.arm.label == BASELINE:
                return {"parameters": result["parameters_logged"]}
    return {"parameters": None}


def _entry(found: _CellResult, baseline: _CellResult, options: Options) -> dict[str, Any]:
    runs, is_baseline = found.runs, found is baseline
    gap = ratio = None
    if not is_baseline:
        shared = {run.seed for run in runs} & {run.seed for run in baseline.runs}
        mine = [run for run in runs if run.seed in shared]
        theirs = [run for run in baseline.runs if run.seed in shared]
        if shared:
            gap = terminal_gap(theirs, mine, by="validation")
            ratio = token_ratio_of(theirs, mine, LEVEL)
    label = _label(found.cell, options)
    added = next((r["parameters_added"] for r in found.results.values() if r is not None), None)
    return {
        "label": label,
        "optimizer": found.cell.optimizer,
        "arm": found.cell.arm.label,
        "tuning": [
            {"learning_rate": rate, "loss": loss, "diverged": loss is not None and math.isnan(loss)}
            for rate, loss in found.tuning.losses
        ],
        "learning_rate": found.tuning.chosen,
        "at_edge": found.tuning.at_edge,
        "losses": {
            str(seed): None if result is None else _loss_or_diverged(result)
            for seed, result in found.results.items()
        },
        "loss": _interval(bootstrap_interval([r.final_validation for r in runs]) if runs else None),
        "gap": _interval(gap),
        "token_ratio": _interval(ratio),
        "parameters_added": added,
        "verdict": None
        if is_baseline
        else verdict(
            label,
            _label(baseline.cell, options),
            gap,
            missing=found.missing + baseline.missing,
            diverged=found.diverged + baseline.diverged,
            wanted=2 * len(options.seeds),
        ),
    }


def _loss_or_diverged(result: Mapping[str, Any]) -> float | str:
    loss = result["final_validation_loss"]
    return "diverged" if loss is None else loss


def _interval(value: Interval | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)


def _notes(options: Options, collected: Sequence[_CellResult], comparisons: int) -> list[str]:
    notes = []
    edges = [_label(found.cell, options) for found in collected if found.tuning.at_edge]
    if edges:
        notes.append(
            f"The best learning rate of {', '.join(edges)} was the lowest or highest that was tried: a "
            "better one may lie beyond."
        )
    failed = [_label(found.cell, options) for found in collected if found.tuning.failed]
    if failed:
        notes.append(f"Every run that was to tune {', '.join(failed)} diverged; nothing is known of them.")
    if any(len(found.tuning.losses) > 1 for found in collected):
        notes.append(
            f"Learning rates were tuned on one seed, {options.tuning_seed}, among few rates: another seed or "
            "a finer grid may choose others."
        )
        if options.tuning_steps < options.steps:
            notes.append(_short_tuning(options, collected))
    if note := chance_note(comparisons, LEVEL):
        notes.append(note)
    normalized = [arm.label for arm in options.arms if _has_v_norm(arm)]
    if normalized:
        without = [arm.label for arm in options.arms if _is_unified(arm.strategy) and not _has_v_norm(arm)]
        notes.append(
            f"{', '.join(normalized)} {'has' if len(normalized) == 1 else 'have'} a norm on v. At a width of "
            f"{options.hidden_size} it lifts the values several times over at the start, which it does not "
            "do at widths of thousands; docs/strategies.md has figures."
            + (f" Without it: {', '.join(without)}." if without else " No arm here is unified without it.")
        )
    notes.append(
        "What holds for a model of this size and so little text need not hold for a larger one: run "
        "`scalevec compare` on your own runs."
    )
    return notes


def _short_tuning(options: Options, collected: Sequence[_CellResult]) -> str:
    said = (
        f"The runs that tuned had {options.tuning_steps} steps, the others {options.steps}; shorter runs "
        "favour higher rates."
    )
    chosen = {found.tuning.chosen for found in collected if found.tuning.chosen is not None}
    if len(chosen) > 1:
        said += (
            " Arms have been given different rates by them, and so differences between arms may be "
            "differences between rates."
        )
    return said


def _is_unified(strategy: str) -> bool:
    return strategy.startswith("unified")


def _has_v_norm(arm: Arm) -> bool:
    config = arm.config()
    return config.placement == "dual-norm" and "v" not in config.branches_off


# --- as a page --------------------------------------------------------------------------------------


def markdown(
    report: Mapping[str, Any],
    picture: Mapping[str, str],
    command: str = "scalevec study",
    heading: str = "##",
) -> str:
    """The report as Markdown.

    Args:
        report: What :func:`make_report` gives.
        picture: Optimizer to where its picture is, as the page is to name it.
        command: What the page says made it.
        heading: What stands before its headings.
    """
    options = report["options"]
    runs, text, model = report["runs"], report["text"], report["model"]
    parameters = model["parameters"]
    size = "A GPT" if parameters is None else f"A GPT of {parameters / 1e6:.2f} M parameters"
    lines = [
        f"{size} ({options['layers']} layer{'s' * (options['layers'] > 1)}, width {options['hidden_size']}, "
        f"bytes as tokens) was trained with Megatron's own loop on {report['tokens_per_run']:,} bytes of "
        f"text for each run ({options['steps']} steps of {options['batch_size']} sequences of "
        f"{options['seq_length']}), WSD schedule, weight decay {options['weight_decay']:g}. Text: "
        f"{text['source']}, {text['training_bytes']:,} bytes to train on and {text['validation_bytes']:,} "
        f"held out (sha256 `{text['sha256'][:16]}…`). Loss is in nats per byte on the same held-out text for "
        "all runs of a seed.",
        "",
        f"Seeds: {', '.join(map(str, options['seeds']))}. "
        + (
            "All runs have ended."
            if report["complete"]
            else f"**Not complete: {runs['missing']} of {runs['wanted']} runs are missing.**"
        )
        + (f" {runs['diverged']} diverged." if runs["diverged"] else ""),
    ]
    for optimizer in options["optimizers"]:
        mine = [entry for entry in report["cells"] if entry["optimizer"] == optimizer]
        lines += ["", f"{heading} {OPTIMIZERS[optimizer]}", ""]
        lines += [f"- {entry['verdict']}" for entry in mine if entry["verdict"]]
        lines += ["", *_final_table(mine)]
        if optimizer in picture:
            lines += ["", f"![Loss against text read, {OPTIMIZERS[optimizer]}]({picture[optimizer]})"]
        lines += [
            "",
            f"Learning rates, and the validation losses of the runs of {options['tuning_steps']} steps that "
            "chose them:",
            "",
        ]
        lines += _tuning_table(mine)
        lines += ["", "Every run's validation loss:", "", *_runs_table(mine, options["seeds"])]
    lines += ["", f"{heading} How far this goes", ""]
    lines += [f"- {note}" for note in report["notes"]]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines += ["", f"Made by `{command}` with {versions}.", ""]
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *rows)]


def _shown(value: Mapping[str, Any] | None, form: str, before: str = "") -> str:
    return "-" if value is None else shown(Interval(**value), form, before)


def _final_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    head = ["arm", "learning rate", f"loss, {LEVEL:.0%} interval", f"against {BASELINE}", "token ratio"]
    head += ["parameters added"]
    rows = [
        [
            f"`{entry['arm']}`",
            "-" if entry["learning_rate"] is None else f"{entry['learning_rate']:g}",
            _shown(entry["loss"], ".4f"),
            _shown(entry["gap"], "+.4f"),
            _shown(entry["token_ratio"], ".2f", "x "),
            "-" if entry["parameters_added"] is None else f"{entry['parameters_added']:,}",
        ]
        for entry in entries
    ]
    return [
        *_table(head, rows),
        "",
        f"Token ratio: {BASELINE}'s tokens over the arm's to the same training loss; above 1, fewer are "
        "needed. Times are not reported: the runs shared the machine.",
    ]


def _tuning_table(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    rates = sorted({point["learning_rate"] for entry in entries for point in entry["tuning"]})
    rows = []
    for entry in entries:
        points = {point["learning_rate"]: point for point in entry["tuning"]}
        row = [f"`{entry['arm']}`"]
        for rate in rates:
            point = points.get(rate)
            if point is None or (point["loss"] is None and not point["diverged"]):
                row.append("-")
                continue
            said = "diverged" if point["diverged"] else f"{point['loss']:.4f}"
            row.append(f"**{said}**" if rate == entry["learning_rate"] else said)
        rows.append(row)
    return _table(["arm", *(f"{rate:g}" for rate in rates)], rows)


def _runs_table(entries: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[str]:
    def cell(loss: float | str | None) -> str:
        return "missing" if loss is None else loss if isinstance(loss, str) else f"{loss:.4f}"

    rows = [[f"`{entry['arm']}`", *(cell(entry["losses"][str(seed)]) for seed in seeds)] for entry in entries]
    return _table(["arm", *(f"seed {seed}" for seed in seeds)], rows)


def write_study_report(store: Store) -> dict[str, Any]:
    """Write ``report.json``, ``report.md`` and the pictures into the study's folder; returns the report.

    All of them are the new ones afterwards, or all are as they were. Pictures of what is no longer there go.

    Raises:
        ScaleVecError: As from :func:`make_report`, or they cannot be written.
    """
    known = store.known()
    collected = _collect(known.options, store)
    report = _report(known, collected)
    try:
        pictures = _draw(known.options, collected)
        page = "# Study\n\n" + markdown(report, {name: _picture(name) for name in pictures})
        contents = {"report.json": as_json(report), "report.md": page}
        contents |= {_picture(name): picture for name, picture in pictures.items()}
        write_files(
            {store.folder / name: content for name, content in contents.items()},
            gone=[store.folder / _picture(name) for name in OPTIMIZERS if name not in pictures],
        )
    except OSError as error:
        raise ScaleVecError(
            f"the report cannot be written to {store.folder}: {error}; an earlier one is as it was. Put "
            "that right and give the command again, with --report-only."
        ) from None
    return report


def _picture(optimizer: str) -> str:
    return f"loss-{optimizer}.png"


def _draw(options: Options, collected: Sequence[_CellResult]) -> dict[str, bytes]:
    """A picture for each optimizer whose baseline has runs, as PNG."""
    pictures = {}
    for optimizer in options.optimizers:
        groups = {
            found.cell.arm.label: list(found.runs)
            for found in collected
            if found.cell.optimizer == optimizer and found.runs
        }
        if BASELINE in groups:
            seeds = len(options.seeds)
            title = (
                f"{OPTIMIZERS[optimizer]}, learning rates tuned, {options.steps} steps, up to {seeds} seeds"
            )
            pictures[optimizer] = draw(groups, BASELINE, title=title, token="byte")
    return pictures
