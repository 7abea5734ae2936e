"""The documentation is tested: commands run, and what they are said to print is what they print.

A line ``<!-- checked: WHERE -->`` before a bash block names what runs it; ``<!-- needs: GPUs -->`` marks one
that cannot run here.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?:<!-- (?P<mark>[^\n]*?) -->\n)?```bash\n(?P<body>.*?)```", re.DOTALL)


def blocks():
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for match in BLOCK.finditer(path.read_text(encoding="utf-8")):
            yield path.name, match["mark"], match["body"]


def test_every_command_is_run_somewhere_or_needs_gpus():
    found = list(blocks())
    assert len(found) >= 3
    ci = (ROOT / ".ci" / "run").read_text()
    for name, mark, body in found:
        assert mark, f"{name}: nothing says what runs\n{body}"
        if mark == "needs: GPUs":
            continue
        assert mark.startswith("checked: "), f"{name}: unknown mark {mark!r}"
        where = mark.removeprefix("checked: ")
        assert (ROOT / where).is_file(), f"{name}: {where} does not exist"
        if where == ".ci/run":
            for target in re.findall(r"^make ([\w-]+)", body, re.MULTILINE):
                assert re.search(rf"^step \d+ make {target}\b", ci, re.MULTILINE), (
                    f"{target} is not in .ci/run"
                )


LINK = re.compile(r"\]\((?!https?:)(?P<path>[^)#\s]*)(?:#(?P<anchor>[^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(path):
    """As GitHub and the site make them of headings."""
    headings = HEADING.findall(path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    """Of the files beside docs/ too; those from page to page are also looked at when the site is built."""
    found = 0
    for name in ["README.md", "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        file = ROOT / name
        for match in LINK.finditer(file.read_text(encoding="utf-8")):
            target = file.parent / match["path"] if match["path"] else file
            if target.parent.name == "reference" and not target.exists():
                continue  # written when the site is built, which looks at these links
            assert target.exists(), f"{file.name} links to {match['path']}"
            if match["anchor"]:
                assert match["anchor"] in anchors(target), f"{file.name} links to {match[0]}"
            found += 1
    assert found > 40


@pytest.mark.needs_training
def test_the_command_of_the_readme_prints_the_table_of_the_readme(tmp_path):
    [command] = [body for _, mark, body in blocks() if mark == "checked: tests/test_docs.py"]
    arguments = shlex.split(command.replace("\\\n", " "))
    assert arguments[0] == "scalevec"
    run = subprocess.run(
        [str(Path(sys.executable).parent / "scalevec"), *arguments[1:]],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [excerpt] = re.findall(r"<!-- audit-excerpt -->\n```\n(.*?)```", readme, re.DOTALL)
    lines = [line.rstrip() for line in excerpt.splitlines()]
    assert len(lines) > 10
    printed = "\n".join(line.rstrip() for line in run.stdout.splitlines())
    assert "\n".join(lines) in printed
    assert (tmp_path / "audit.json").is_file()


def test_the_python_of_the_readme_runs(ranks):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    codes = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(codes) == 2
    [table] = ranks.run("run_readme_code", code="\n".join(codes))
    assert "linears converted 4 of 4" in table


def test_the_readme_names_every_flag_and_every_strategy():
    from megatron_scalevec.config import STRATEGIES
    from megatron_scalevec.integration.arguments import options

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for flag in options():
        assert flag in readme, flag
    for strategy in STRATEGIES:
        assert f"`{strategy}`" in readme, strategy
