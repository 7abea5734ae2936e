"""The tutorial, from its first file to its last command, as it stands on the page."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import BLOCK, ROOT

pytestmark = pytest.mark.needs_training

PAGE = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILE = re.compile(r"<!-- file: (?P<name>\S+) -->\n```\w+\n(?P<body>.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """What the commands print, by their first line, and the folder they ran in."""
    folder = tmp_path_factory.mktemp("tutorial")
    texts = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    (folder / "text.txt").write_bytes(b"".join(path.read_bytes() for path in texts))
    for match in FILE.finditer(PAGE):
        (folder / match["name"]).write_text(match["body"], encoding="utf-8")
    commands = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    outputs = {}
    for match in BLOCK.finditer(PAGE):
        if match["mark"] != "checked: tests/test_tutorial.py":
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", match["body"]],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{match['body']}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        outputs[match["body"].splitlines()[0]] = done.stdout
    return outputs, folder


def test_every_step_was_run(printed):
    outputs, folder = printed
    assert len(outputs) == PAGE.count("<!-- checked: tests/test_tutorial.py -->") == 4
    assert (folder / "tokens.idx").is_file() and (folder / "loss.png").is_file()


def test_explain_shows_the_vectors_of_the_script(printed):
    explained = printed[0]["scalevec explain small.sh"]
    assert "linears converted 4 of 4" in explained and "attention q in" in explained


def test_the_runs_learn_and_are_compared(printed):
    outputs, folder = printed
    for name in ("stock", "hg"):
        log = (folder / f"{name}.log").read_text(encoding="utf-8")
        losses = [float(found) for found in re.findall(r"lm loss: (\S+)", log)]
        assert len(losses) == 30 and losses[-1] < losses[0] - 0.5
    [table] = [text for line, text in outputs.items() if line.startswith("STRATEGY=stock")]
    assert "stock" in table and "hg" in table and "validation" in table


def test_the_folded_checkpoint_is_stock(printed):
    _, folder = printed
    from torch.distributed.checkpoint import FileSystemReader

    names = {}
    for name in ("checkpoints", "folded"):
        [written] = [path.parent for path in (folder / name).rglob(".metadata")]
        names[name] = FileSystemReader(str(written)).read_metadata().state_dict_metadata
    assert any("gamma_in" in key for key in names["checkpoints"])
    assert not any("gamma_" in key for key in names["folded"])
