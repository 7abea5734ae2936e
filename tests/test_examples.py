"""The recipes: well-formed, explained with the right counts, and three iterations of a shrunken model."""

import json
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
# One of each family, and of the paper's what else there is.
TRIED = (
    ("llama3-8b.sh", {}),
    ("llama3-70b.sh", {}),
    ("paper.sh", {}),
    ("paper.sh", {"OPTIMIZER": "muon", "SCHEDULE": "cosine"}),
    ("paper.sh", {"EXPERTS": "4", "OPTIMIZER": "muon"}),
    ("mixtral-8x7b.sh", {}),
    ("qwen3-30b-a3b.sh", {}),
    ("deepseek-v3-like.sh", {}),
)
RECIPES = [path.name for path in SCRIPTS if path.name != "slurm.sh"]


def recipe(name: str, *arguments: str, **environment: str):
    return launch_in_script(EXAMPLES / name, arguments, environment)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_takes_it(path):
    assert os.access(path, os.X_OK)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("name", RECIPES)
def test_one_line_switches_the_strategy(name):
    """Both halves of an A/B pair: the same data in the same order, other output folders."""
    unified = recipe(name).arguments
    stock = recipe(name, STRATEGY="stock").arguments
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
    for name in RECIPES:
        used = set(re.findall(r"\$\{(NNODES|RDZV_\w+):-", (EXAMPLES / name).read_text()))
        assert used == exported, name


def test_slurm_starts_the_recipe_on_every_node(tmp_path):
    """With a virtual environment or a container; a job that was requeued meets at a new place."""
    for program, does in (
        ("scontrol", "printf 'node%s\\n' {7..20000}"),  # more than a pipe holds
        ("srun", 'printf "%s\\n" "$NNODES" "$RDZV_ENDPOINT" "$RDZV_ID" "${VENV_IS_ON:-}" "$@"'),
    ):
        stub = tmp_path / program
        stub.write_text(f"#!/bin/bash\n{does}\n")
        stub.chmod(0o755)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/bin/activate").write_text("export VENV_IS_ON=yes\n")
    job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[7-9]", "SLURM_JOB_ID": "41"}
    job["PATH"] = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])

    def started(**more: str) -> list[str]:
        words = ["bash", str(EXAMPLES / "slurm.sh"), "llama3-70b.sh", "x y"]
        done = subprocess.run(words, env={**job, **more}, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    recipe_words = ["bash", "llama3-70b.sh", "x y"]
    assert started() == ["3", "node7:29500", "41-0", "", "--kill-on-bad-exit=1", *recipe_words]
    again = started(SLURM_RESTART_COUNT="2", VENV=str(tmp_path / "venv"))
    assert again == ["3", "node7:29500", "41-2", "yes", "--kill-on-bad-exit=1", *recipe_words]
    inside = started(CONTAINER="nemo.sqsh", MOUNTS="/data:/data")
    assert inside[5:] == [
        *("--container-image", "nemo.sqsh", "--container-workdir", str(tmp_path)),
        *("--container-mounts", "/data:/data", *recipe_words),
    ]


SIZES = {
    "0.12b": "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048",
    "1b": "--num-layers 22 --hidden-size 1792 --num-attention-heads 14 --ffn-hidden-size 4778",
    "2b": "--num-layers 24 --hidden-size 2560 --num-attention-heads 20 --ffn-hidden-size 6912",
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("experts", ["0", "8"])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("schedule", ["wsd", "cosine"])
def test_every_combination_of_the_paper(size, experts, optimizer, schedule):
    """Sizes, dense or with experts, optimizers and schedules: each a variable, each with its own folder."""
    chosen = {"EXPERTS": experts, "OPTIMIZER": optimizer, "SCHEDULE": schedule}
    line = " ".join(recipe("paper.sh", size, **chosen).arguments)
    assert line.startswith(SIZES[size])
    assert f"--optimizer {optimizer} " in line
    assert ("--num-experts 8 " in line) == (experts == "8") == ("--moe-router-topk 2 " in line)
    assert ("--lr-decay-style WSD " in line) == (schedule == "wsd") == ("--lr-wsd-decay-iters " in line)
    assert ("--lr-decay-style cosine " in line) == (schedule == "cosine")
    assert f"--save runs/paper-{size}-{optimizer}-{schedule}-experts{experts}-unified-1234/" in line


# Hand counts. Per layer of a gated dense model: q, k, v, o; gate, up, down; two norms.
def llama(layers, hidden, ffn, kv, vocabulary, tables=2):
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * ffn + 2 * hidden
    return layers * layer + tables * vocabulary * hidden + hidden


# q and o with rows of their own, experts and their router in place of the MLP.
def mixture(layers, hidden, q, kv, experts, ffn, vocabulary, head_norms=0):
    layer = 2 * hidden * (q + kv) + experts * (3 * ffn + 1) * hidden + 2 * hidden + head_norms
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
    assert llama(24, 2560, 6912, 2560, 50304) == 2_160_847_360
    assert llama(12, 768, 2048, 768, 50304, tables=1) == 123_587_328
    assert mixture(32, 4096, 4096, 1024, 8, 14336, 32000) == 46_702_792_704
    assert mixture(48, 2048, 32 * 128, 512, 128, 768, 151936, 2 * 128) == 30_532_122_624
    assert llama(22, 1792, 4778, 1792, 50304) == 1_028_065_024
    # Its scale vectors: stock, and what unified has more than that.
    assert (2 * 22 + 1) * 1792 == 80_640
    assert 22 * (5 * (1792 + 1) + 2 * (4778 + 1) + 3 * (128 + 1) - 2 * 1792) + 1 == 337_173


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


@pytest.mark.parametrize("through", ["", "slurm.sh"], ids=["itself", "slurm.sh"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_is_explained(tmp_path, name, through):
    """DRY_RUN=1 hands the script, with its own arguments, to scalevec explain, and starts nothing else."""
    started = tmp_path / "started"
    for program in ("scalevec", "torchrun", "srun", "scontrol"):
        stub = tmp_path / program
        stub.write_text(f'#!/bin/bash\nprintf "%s\\n" {program} "${{DRY_RUN:-}}" "$@" >> "{started}"\n')
        stub.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"])
    words = [*([str(EXAMPLES / through)] if through else []), str(EXAMPLES / name), "0.12b"]
    done = subprocess.run(
        ["bash", *words], env={"PATH": path, "DRY_RUN": "1"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stderr == ""
    assert started.read_text().splitlines() == ["scalevec", "0", "explain", str(EXAMPLES / name), "0.12b"]


@pytest.mark.needs_training
@pytest.mark.parametrize(
    ("name", "arguments", "stock"),
    [
        ("paper.sh", ["0.12b"], 123_587_328),
        ("paper.sh", ["2b"], 2_160_847_360),
        ("mixtral-8x7b.sh", [], 46_702_792_704),
        ("qwen3-30b-a3b.sh", [], 30_532_122_624),
        # With the layer that predicts a second token; tests/test_layouts.py counts it by hand.
        ("deepseek-v3-like.sh", [], 682_636_472_320),
    ],
)
def test_the_other_recipes_are_explained(ranks, name, arguments, stock):
    """As the command does it, for every stage of a pipeline: nothing is refused, nothing is missing."""
    [found] = ranks.run(
        "explain_command", timeout=400, arguments=["--json", str(EXAMPLES / name), *arguments]
    )
    assert found["error"] is None and found["code"] == 0
    seen = json.loads(found["printed"])
    assert seen["problems"] == [] and seen["strategy"].startswith("unified")
    assert seen["parameters"]["stock"] == stock
    assert seen["whole_model"]["linears_converted"] == seen["whole_model"]["linears_expected"]


def in_bash(folder: Path, *words: str, **environment: str):
    """A recipe through bash, with this environment's torchrun and scalevec."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", *words],
        cwd=folder,
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.needs_training
def test_dry_run(tmp_path):
    """The recipe's own switch, through bash, in a folder with nothing in it; slurm.sh passes it on."""
    done = in_bash(tmp_path, str(EXAMPLES / "slurm.sh"), str(EXAMPLES / "llama3-8b.sh"), DRY_RUN="1")
    assert done.returncode == 0, done.stderr
    assert "whole model: 8,030,261,248 stock" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_training
def test_smoke_run(tmp_path):
    """And the other one, through torchrun: what test_a_shrunken_run starts from the same words without it."""
    done = in_bash(tmp_path, str(EXAMPLES / "llama3-8b.sh"), CPU_SMOKE="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert len(re.findall(r"iteration +[123]/ +3 .*lm loss: ", done.stdout)) == 3
    assert "unified" in done.stdout
