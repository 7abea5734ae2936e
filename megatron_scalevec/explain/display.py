"""An explanation for people."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from megatron_scalevec.shapes import SHAPES
from megatron_scalevec.support import REFUSALS

if TYPE_CHECKING:  # imports Megatron
    from megatron_scalevec.explain.contents import Explanation, Parameters

__all__ = ["comparison_table", "in_bytes", "support_as_json", "support_table", "text"]


def text(found: Explanation) -> str:
    """The tables and numbers of an explanation."""
    place = "; ".join(
        f"{name} {value}" if name == "layers" else f"{name} rank {value}"
        for name, value in found.place.items()
    )
    parts = [f"asked for: {found.strategy}"]
    if found.whole_model is not None:
        parts += ["", "The whole model, as a run prints it at start:", "", found.whole_model.table()]
    parts += ["", "Parameters", f"  whole model: {_numbers(found.parameters)}"]
    parts += [f"  rank {found.rank}: {_numbers(found.parameters_on_rank)}"]
    parts += ["", f"Rank {found.rank} of {found.world_size}: {place}"]
    if found.this_rank is not None and found.place["pipeline"] != "0 of 1":
        parts += ["", found.this_rank.table().split("\n  parameters")[0]]
    parts += ["", _decay_table(found), "", _stage_table(found)]
    parts += [f"note: {note}" for note in found.notes]
    parts += [f"PROBLEM: {problem}" for problem in found.problems()]
    return "\n".join(parts)


def _numbers(numbers: Parameters) -> str:
    return (
        f"{numbers.stock:,} stock, of which norm scales {numbers.norm_scales:,} "
        f"({_percent(numbers.norm_scales, numbers.stock)}); scale vectors {numbers.added:+,} "
        f"({_percent(numbers.added, numbers.stock)})"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4f} %" if whole else "-"


def _decay_table(found: Explanation) -> str:
    table = _table("Weight decay of the trained tensors, all layers and stages")
    table.add_column("parameter", overflow="fold")
    table.add_column("tensors", justify="right")
    table.add_column("decay")
    for row in found.weight_decay:
        table.add_row(row.name, str(row.tensors), "yes" if row.decays else "no")
    return _print(table)


def _stage_table(found: Explanation) -> str:
    """One rank of each pipeline stage: what it holds, and what folding costs it."""
    mode = found.whole_model.execution if found.whole_model is not None else ""
    stages = [*found.stages]
    costed = [stage.costs[mode] for stage in stages if mode in stage.costs]
    built = f"{found.ranks_built} of {found.world_size} ranks built"
    table = _table(f"One rank of each pipeline stage ({built}; the others of a stage are of the same sizes)")
    for column in ("rank", "layers", "parameters", "vectors", "linears"):
        table.add_column(column, justify="left" if column == "layers" else "right")
    if costed:
        for column in ("memory", "fold", "split", "time"):
            table.add_column(f"{column}/step" if column != "memory" else column, justify="right")
    for stage in stages:
        cells = [str(stage.rank), stage.layers, f"{stage.parameters.stock:,}", f"{stage.parameters.added:+,}"]
        cells.append(str(stage.linears))
        if costed and mode in stage.costs:
            cost = stage.costs[mode]
            cells += [
                in_bytes(cost.memory, sign=True),
                in_bytes(cost.fold_per_step),
                in_bytes(cost.split_per_step),
            ]
            cells.append(f"{1000 * cost.seconds:.2f} ms")
        table.add_row(*cells)
    lines = [_print(table)]
    if costed:
        lines.append(
            f"execution {mode} in all layers. Memory: what is added. Fold, split: bytes that must move at "
            "least; time: of both, less Megatron's copy that the fold replaces, at the given memory "
            "bandwidth, nothing measured."
        )
    return "\n".join(lines)


def in_bytes(number: float, *, sign: bool = False) -> str:
    """1.5 GiB"""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while abs(number) >= 1024 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:{'+' if sign else ''}.{0 if units[0] == 'B' else 1}f} {units[0]}"


def comparison_table(rows: list[tuple[str, str, str]], titles: tuple[str, str]) -> str:
    """Two explanations side by side."""
    table = _table("What differs")
    for column in ("", *titles):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return _print(table)


def support_table() -> str:
    """The shapes of :mod:`megatron_scalevec.shapes`, and what :mod:`megatron_scalevec.support` refuses."""
    shapes = _table("Models", lines=True)
    for column in ("shape", "told by", "branches with scale vectors", "megatron-core"):
        shapes.add_column(column, overflow="fold")
    for shape in SHAPES:
        carries = f"refused: {shape.refused}" if shape.refused else ", ".join(shape.branches)
        shapes.add_row(shape.name, shape.flags or "-", carries, "-" if shape.refused else shape.versions)
    return f"{_print(shapes)}\n\n{_refusals_table()}"


def _refusals_table() -> str:
    table = _table("Refused together with a strategy", lines=True)
    for column in ("name", "reason", "way out"):
        table.add_column(column, overflow="fold")
    for refusal in REFUSALS:
        versions = f" (megatron-core {refusal.versions})" if refusal.versions else ""
        table.add_row(refusal.name, _readable(refusal.reason) + versions, refusal.way_out)
    return _print(table)


def support_as_json() -> str:
    """The same for programs."""
    rows = [
        {"name": r.name, "reason": _readable(r.reason), "way_out": r.way_out, "versions": r.versions or None}
        for r in REFUSALS
    ]
    return json.dumps({"shapes": [asdict(shape) for shape in SHAPES], "refusals": rows}, indent=2)


def _readable(reason: str) -> str:
    """``--optimizer {optimizer}`` is filled in where a run is refused; here it stands for any value."""
    return reason.replace("{", "<").replace("}", ">")


def _table(title: str, *, lines: bool = False) -> Table:
    return Table(title=title, title_justify="left", expand=False, show_lines=lines)


def _print(table: Table) -> str:
    out = io.StringIO()
    Console(file=out, width=110, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
