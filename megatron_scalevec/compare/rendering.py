"""A comparison on the terminal, as a picture and as a page."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from megatron_scalevec.compare.comparison import Comparison, Row
from megatron_scalevec.compare.picture import draw
from megatron_scalevec.compare.statistics import Interval
from megatron_scalevec.compare.verdict import percent
from megatron_scalevec.demo.report import as_json
from megatron_scalevec.files import write_files

__all__ = ["COLUMNS", "cells", "render", "table"]

COLUMNS = ("runs", "seeds", "loss at the end", "against {baseline}", "token ratio", "step time", "memory")


def cells(row: Row) -> tuple[str, ...]:
    """A row as text, one entry for each of :data:`COLUMNS`."""
    return (
        row.label,
        str(row.seeds),
        shown(row.terminal, ".4f"),
        "-" if row.gap is None else shown(row.gap, "+.4f"),
        "-" if row.token_ratio is None else shown(row.token_ratio, ".2f", "x "),
        _ratio(row.step_time_ms, row.step_ratio, "ms", 1.0),
        _ratio(row.memory_bytes, row.memory_ratio, "GiB", 2.0**30),
    )


def shown(value: Interval, form: str, before: str = "") -> str:
    """Mean, and the interval in brackets where there is one."""
    mean = f"{before}{_number(value.mean, form)}"
    return f"{mean} [{_number(value.low, form)}, {_number(value.high, form)}]" if value.known else mean


def _number(value: float, form: str) -> str:
    """As the form says; without a sign where no digit of it is left."""
    text = f"{value:{form}}"
    return text if any(digit in text for digit in "123456789") else text.lstrip("+-")


def _ratio(value: float | None, ratio: float | None, unit: str, size: float) -> str:
    if value is None:
        return "-"
    return f"{value / size:.4g} {unit}" + ("" if ratio is None else f" (x {ratio:.2f})")


def _columns(comparison: Comparison) -> list[str]:
    return [column.format(baseline=comparison.baseline) for column in COLUMNS]


def _caption(comparison: Comparison) -> str:
    level = comparison.rows[0].terminal.level
    return f"Loss in nats per token, by {comparison.by}; in brackets: {percent(level)} intervals over seeds"


def table(comparison: Comparison) -> Table:
    """For the terminal."""
    made = Table(title=_caption(comparison), title_justify="left", title_style="")
    for index, column in enumerate(_columns(comparison)):
        made.add_column(escape(column), justify="right" if index else "left")
    for row in comparison.rows:
        made.add_row(*map(escape, cells(row)))
    return made


def render(
    comparison: Comparison,
    *,
    png: str | Path | None = None,
    page: str | Path | None = None,
    figures: str | Path | None = None,
    title: str = "Comparison",
) -> None:
    """Write a picture, a page that holds it and needs no other file, and the figures: all of them or none.

    Args:
        comparison: What to show.
        png: Where to write the picture; None for nowhere.
        page: Where to write the HTML page; None for nowhere.
        figures: Where to write :meth:`.Comparison.record` as JSON; None for nowhere.
        title: What stands above picture and page.

    Raises:
        OSError: Something cannot be written.
    """
    files: dict[str | Path, str | bytes] = {}
    if png is not None or page is not None:
        drawn = draw(comparison.groups, comparison.baseline, title=title, with_time=True)
        files |= {} if png is None else {png: drawn}
        files |= {} if page is None else {page: _page(comparison, drawn, title)}
    if figures is not None:
        files[figures] = as_json(comparison.record())
    write_files(files)


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; color: #222 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
img { max-width: 100% }
"""


def _page(comparison: Comparison, picture: bytes, title: str) -> str:
    def cells_of(values: list[str] | tuple[str, ...], tag: str) -> str:
        return "".join(f"<{tag}>{html.escape(value)}</{tag}>" for value in values)

    rows = "\n".join(f"<tr>{cells_of(cells(row), 'td')}</tr>" for row in comparison.rows)
    verdicts = [row.verdict for row in comparison.rows if row.verdict]
    said = "\n".join(f"<li>{html.escape(text)}</li>" for text in verdicts)
    notes = "\n".join(f"<p>{html.escape(note)}</p>" for note in comparison.notes)
    sources = "\n".join(
        f"<li>{html.escape(label)}: {html.escape(', '.join(run.source for run in runs))}</li>"
        for label, runs in comparison.groups.items()
    )
    encoded = base64.b64encode(picture).decode("ascii")
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{html.escape(title)}</h1>
<ul>
{said}
</ul>
<p>{_caption(comparison)}. The token
ratio is {html.escape(comparison.baseline)}'s tokens over the others' to the same loss: above 1, fewer are
needed.</p>
<table>
<thead><tr>{cells_of(_columns(comparison), "th")}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<p><img alt="Loss against tokens and against time" src="data:image/png;base64,{encoded}"></p>
{notes}
<h2>Runs</h2>
<ul>
{sources}
</ul>
</body>
</html>
"""
