"""The recipes: well-formed, explained with the right counts, and three iterations of a shrunken model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_scalevec.explain.launch_line import launch_in_script

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples/megatron"
SCRIPTS = sorted(EXAMPLES.glob("*.sh"))
# One of each family; a recipe is added here when what it trains is supported.
TRIED = (
    ("llama3-8b.sh", {}),
    ("llama3-70b.sh", {}),
    ("paper.sh", {}),
    ("paper.sh", {"OPTIMIZER": "muon", "SCHEDULE": "cosine"}),
    ("mixtral-8x7b.sh", {}),
    ("qwen3-30b-a3b.sh", {}),
)


def recipe(name: str, *arguments: str, **environment: str):
    return launch_in_script(EXAMPLES / name, arguments, environment)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_takes_it(path):
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.name != "slurm.sh"], ids=lambda p: p.name)
def test_one_line_switches_the_strategy(path):
    """Both halves of an A/B pair: the same data in the same order, other output folders."""
    unified = recipe(path.name).arguments
    stock = recipe(path.name, STRATEGY="stock").arguments
    different = [(a, b) for a, b in zip(unified, stock) if a != b]
    assert len(unified) == len(stock)
    assert {b for _, b in different} == {a.replace("unified", "stock") for a, _ in different}
    folders = [option for option, value in zip(stock, stock[1:]) if "stock-" in value]
    assert set(folders) == {"--data-cache-path", "--save", "--load", "--tensorboard-dir"}
    assert unified[-2:] == ("--scalevec-strategy", "unified") and stock[-1] == "stock"
    for option in ("--seed", "--global-batch-size", "--train-iters"):
        assert unified[unified.index(option) + 1] == stock[stock.index(option) + 1]


def test_slurm_hands_over_to_torchrun():
    """One torchrun per node, which meet at the first, and requeued jobs that go on."""
    text = (EXAMPLES / "slurm.sh").read_text()
    for line in ("#SBATCH --ntasks-per-node=1", "#SBATCH --requeue", "#SBATCH --signal=TERM@600"):
        assert f"\n{line}\n" in text
    exported = set(re.findall(r"^export (\w+)", text, re.MULTILINE))
    assert exported == {"NNODES", "RDZV_ENDPOINT", "RDZV_ID"}
    for path in SCRIPTS:
        if path.name != "slurm.sh":
            used = set(re.findall(r"\$\{(NNODES|RDZV_\w+):-", path.read_text()))
            assert used == exported, path.name


# Hand counts. Per layer of a gated dense model: q, k, v, o; gate, up, down; two norms.
def llama(layers, hidden, ffn, kv, vocabulary):
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    return layers * layer + 2 * vocabulary * hidden + hidden


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("name", "arguments", "stock", "layers", "hidden", "rows"),
    [
        ("llama3-8b.sh", [], 8_030_261_248, 32, 4096, 2 * 14336),
        # Eight tensor-parallel ranks: the vocabulary is padded to a multiple of 1,024.
        ("llama3-70b.sh", [], 70_566_289_408, 80, 8192, 2 * 28672),
        ("paper.sh", ["1b"], 1_028_065_024, 22, 1792, 2 * 4778),
    ],
)
def test_counts(ranks, name, arguments, stock, layers, hidden, rows):
    """Stock, and unified: behind product, every vector has one more element.

    Five input scales of the hidden size and two output scales make up for two norms per layer; q, k and v get
    norms per head. The final norm keeps its scale, with a factor in front.
    """
    found = recipe(name, *arguments)
    [seen] = ranks.run("explain_line", timeout=400, arguments=["p.py", *found.arguments], of=found.world_size)
    assert seen["error"] is None and seen["problems"] == []
    assert seen["parameters"]["stock"] == stock
    assert seen["parameters"]["norm_scales"] == (2 * layers + 1) * hidden
    head = 128
    per_layer = 5 * (hidden + 1) + rows + 2 + 3 * (head + 1) - 2 * hidden
    assert seen["parameters"]["added"] == layers * per_layer + 1
    assert seen["whole_model"]["linears_converted"] == 2 * layers


def test_hand_counts_are_the_published_ones():
    assert llama(32, 4096, 14336, 1024, 128256) == 8_030_261_248
    assert llama(80, 8192, 28672, 1024, 128256) == 70_553_706_496
    assert llama(80, 8192, 28672, 1024, 129024) == 70_566_289_408
    assert llama(22, 1792, 4778, 1792, 50304) == 1_028_065_024


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("name", "settings"),
    TRIED,
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else value,
)
def test_a_shrunken_run(ranks, name, settings):
    """The same flags with small sizes: it trains, and explain says what its audit says."""
    found = recipe(name, CPU_SMOKE="1", **settings)
    argv = list(found.arguments)
    results = ranks.run("train", found.world_size, argv=argv)
    assert max(len(result["losses"]) for result in results) == 3
    [seen] = ranks.run("explain_line", arguments=argv, of=found.world_size)
    assert seen["error"] is None
    assert seen["whole_model"] == results[0]["audit"]


@pytest.mark.needs_training
def test_dry_run(tmp_path):
    """The recipe's own switch, through bash, in a folder with nothing in it; slurm.sh passes it on."""
    environment = {**os.environ, "DRY_RUN": "1", "OMP_NUM_THREADS": "1"}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "llama3-8b.sh")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "whole model: 8,030,261,248 stock" in done.stdout
    assert not list(tmp_path.iterdir())
