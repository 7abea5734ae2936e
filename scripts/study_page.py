"""Write docs/study.md, its figures (docs/study.json) and its pictures from the folders of studies.

.venv/bin/python scripts/study_page.py STUDY...

A study takes the place of the one with the same optimizers; those with others stay on the page.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from megatron_scalevec.demo.report import write_report
from megatron_scalevec.study.options import OPTIMIZERS
from megatron_scalevec.study.report import markdown, write_study_report
from megatron_scalevec.study.store import Store

DOCS = Path(__file__).resolve().parent.parent / "docs"

INTRODUCTION = """# A study on two cores

What `scalevec study` found on a machine with two CPU cores; [compare.md](compare.md) says how the figures
are made and what they mean. The model is tiny, and so is the text: this shows what the instruments say, and
how little can be said at this size, not what scale vectors do at yours. The paper reports about 0.04 lower
loss for `unified` at 0.12B to 2B parameters, learning rates tuned (arXiv 2605.26895).
"""

SEVERAL = """Each study has its own model and seeds: compare the arms of one study, not losses of one with
those of another.
"""


def page(reports: list[dict]) -> str:
    """The page that stands in the repository, from the reports of several studies."""
    several = len(reports) > 1
    parts = [INTRODUCTION]
    if several:
        parts.append(SEVERAL)
    for report in reports:
        if several:
            parts.append(f"## {title(report)}\n")
        pictures = {
            name: f"images/study-{name}.png"
            for name in report["options"]["optimizers"]
            if (DOCS / "images" / f"study-{name}.png").is_file()
        }
        parts.append(markdown(report, pictures, command(report), "###" if several else "##"))
    return "\n".join(parts)


def title(report: dict) -> str:
    """What tells a study from the others on the page."""
    return "Study with " + " and ".join(OPTIMIZERS[name] for name in report["options"]["optimizers"])


def command(report: dict) -> str:
    """The command that makes such a study."""
    options = report["options"]
    parts = ["scalevec study", "--arms", ",".join(options["arms"])]
    parts += [
        "--optimizers",
        ",".join(options["optimizers"]),
        "--seeds",
        str(len(options["seeds"])),
        "--rates",
    ]
    parts += [f"{name}={','.join(f'{rate:g}' for rate in rates)}" for name, rates in options["rates"].items()]
    for name in ("widen", "layers", "hidden_size", "steps", "tuning_steps", "save_interval"):
        parts += ["--" + name.replace("_", "-"), str(options[name])]
    return " ".join(parts)


def main(folders: list[str]) -> None:
    """Write the page, the figures and the pictures."""
    if not folders:
        raise SystemExit("name the folders of one study or more")
    reports = []
    for folder in folders:
        reports.append(write_study_report(Store(Path(folder))))
        for name in reports[-1]["options"]["optimizers"]:
            picture = Path(folder) / f"loss-{name}.png"
            shown = DOCS / "images" / f"study-{name}.png"
            if picture.is_file():
                shutil.copyfile(picture, shown)
            else:
                shown.unlink(missing_ok=True)
    figures = DOCS / "study.json"
    on_page = _studies(figures) if figures.is_file() else []
    by_title = {title(report): report for report in (*on_page, *reports)}
    write_report({"studies": list(by_title.values())}, figures)
    (DOCS / "study.md").write_text(page(_studies(figures)), encoding="utf-8")


def _studies(figures: Path) -> list[dict]:
    return json.loads(figures.read_text(encoding="utf-8"))["studies"]


if __name__ == "__main__":
    main(sys.argv[1:])
