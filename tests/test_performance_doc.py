"""docs/performance.md: generated, and its numbers against other derivations."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_scalevec.cost import Holding, Schedule, cost, microbatches_in_flight
from megatron_scalevec.explain.display import in_bytes

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs/performance.md").read_text(encoding="utf-8")


def cells(title, label):
    """Of the first row of the document for a model and a mode: the table of traffic."""
    for line in TEXT.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if row[0].startswith(title) and row[1:2] == [label]:
            return row
    raise AssertionError(f"no row for {title}, {label}")


def test_the_file_is_what_the_formulas_give():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/performance_doc.py"), "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


# Layers, hidden size, rows of q/k/v, width of the MLP; tensor- and pipeline-parallel sizes and chunks;
# microbatches per step, ranks that share the optimizer's state. As in examples/megatron.
RECIPES = {
    "1B of the paper, 8 ranks, 8": (22, 1792, 3 * 1792, 4778, 1, 1, 1, 8, 8),
    "Llama-3 8B, TP2, 8 ranks, 128": (32, 4096, 6144, 14336, 2, 1, 1, 128, 4),
    "Llama-3 70B, TP8 PP4 CP2, 128 ranks, 512": (80, 8192, 10240, 28672, 8, 4, 4, 512, 4),
}


@pytest.mark.parametrize("name", RECIPES)
def test_dense_models_by_hand(name):
    """First stage, unified, bf16, distributed optimizer."""
    layers, hidden, qkv, ffn, tensor, stages, chunks, microbatches, shards = RECIPES[name]
    here = layers // stages
    added = here * (5 * (hidden + 1) + 2 * (ffn + 1) + 3 * (128 + 1))
    linears = here * (qkv + 2 * ffn) // tensor
    holding = Holding(linears * hidden, linears, 2, added, 2, here * 2 * hidden)
    schedule = Schedule(
        microbatches, microbatches_in_flight(microbatches, 0, stages, chunks), state_shards=shards
    )
    for mode, label in (("autograd", "`autograd`"), ("optimizer", "in the optimizer")):
        found = cost(holding, schedule, mode)
        row = cells(name, label)
        assert row[2:4] == [in_bytes(found.fold_per_step), in_bytes(found.split_per_step)]
        assert row[4] == f"{1000 * found.seconds:.2f} ms"
        if mode == "optimizer":  # the split's alone: G and W read and dW written
            assert row[4] == f"{1000 * 12 * linears * hidden / shards / 3.35e12:.2f} ms"
        assert row[6] == f"{1000 * found.added_per_step / 4.8e12:.2f} ms"
        # 6 operations for each weight and token: 8.03e9 weights but the embedding's, and attention's.
        if name.startswith("Llama-3 8B"):
            flops = 512 * 8192 * (6 * (8.03e9 - 128256 * 4096) + 6 * 32 * 4096 * 8192) / 8
            share = 100 * found.seconds / (flops / (0.4 * 989.4e12))
            assert float(row[5].removesuffix(" %")) == pytest.approx(share, rel=0.01, abs=5e-4)


SCRIPTS = {
    "1B of the paper": ["paper.sh", "1b"],
    "Llama-3 8B": ["llama3-8b.sh"],
    "Llama-3 70B": ["llama3-70b.sh"],
    "Mixtral 8x7B": ["mixtral-8x7b.sh"],
}


@pytest.mark.needs_training
@pytest.mark.parametrize("title", SCRIPTS)
def test_every_model_is_the_one_of_its_script(ranks, title):
    """Built by ``scalevec explain``, on the meta device."""
    script, *rest = SCRIPTS[title]
    line = ["--json", str(ROOT / "examples/megatron" / script), *rest]
    [done] = ranks.run("explain_command", arguments=line, timeout=240)
    assert done["code"] == 0, done["error"]
    found = json.loads(done["printed"])["stages"][0]["costs"]["autograd"]
    row = cells(title, "`autograd`")
    assert row[2:4] == [in_bytes(found["fold_per_step"]), in_bytes(found["split_per_step"])]
