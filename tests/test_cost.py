"""The cost formulas, against numbers derived by hand."""

from pathlib import Path

import pytest

from megatron_scalevec.cost import Holding, Schedule, cost, microbatches_in_flight
from megatron_scalevec.explain.display import in_bytes

# One layer of hidden size 4096, q/k/v of 6144 rows and gate/up of 28672, in bf16; unified's input scales on
# five branches (20,480 elements), two retired norm scales.
LAYER = Holding(
    weights=(6144 + 28672) * 4096, rows=34816, weight_bytes=2, vectors=20480, vector_bytes=2, retired=8192
)


def test_autograd_per_microbatch():
    found = cost(LAYER, Schedule(microbatches=8, in_flight=4), "autograd", bytes_per_second=1e12)
    assert LAYER.weights == 142_606_336
    assert found.fold_per_step == 8 * (2 + 2) * 142_606_336 == 4_563_402_752
    assert found.split_per_step == 8 * (2 + 2 + 2) * 142_606_336 == 6_845_104_128
    assert found.seconds == pytest.approx(0.01140850688)
    assert found.folded_weights == 4 * 285_212_672
    # bf16 parameter 2, gradient 4, master weight 4, two moments 8; a retired scale keeps its parameter.
    assert found.parameters_and_state == 20480 * 18 - 8192 * 16 == 237_568
    assert found.index_maps == 557_056
    assert found.memory == 237_568 + 557_056 + 1_140_850_688


def test_recomputed_layers_fold_twice_and_keep_nothing():
    plain = cost(LAYER, Schedule(microbatches=3, in_flight=2), "autograd")
    again = cost(LAYER, Schedule(microbatches=3, in_flight=2, full_recompute=True), "autograd")
    assert again.fold_per_step == 2 * plain.fold_per_step
    assert again.split_per_step == plain.split_per_step
    assert (again.folded_weights, plain.folded_weights) == (0, 2 * 285_212_672)


def test_in_the_optimizer_per_step_and_shard():
    schedule = Schedule(microbatches=64, in_flight=8, state_shards=16)
    found = cost(LAYER, schedule, "optimizer", bytes_per_second=3.35e12)
    # A sixteenth of the weights, 8,912,896: read 4, write 2; read 4 and 4, write 4.
    assert found.fold_per_step == 8_912_896 * 6 == 53_477_376
    assert found.split_per_step == 8_912_896 * 12 == 106_954_752
    assert found.seconds == pytest.approx(4.789e-5, rel=1e-3)
    assert found.folded_weights == 0
    assert found.parameters_and_state == 20480 * (2 + 4 + 12 / 16) - 8192 * (4 + 12 / 16) == 99_328
    assert found == cost(LAYER, Schedule(microbatches=1, in_flight=1, state_shards=16), "optimizer")


def test_float32_has_no_second_copy():
    wide = Holding(weights=100, rows=10, weight_bytes=4, vectors=10, vector_bytes=4, retired=0)
    assert cost(wide, Schedule(1, 1, master_weights=False), "autograd").parameters_and_state == 10 * 16
    # Vectors kept in float32 beside bf16 weights are their own masters.
    mixed = Holding(weights=100, rows=10, weight_bytes=2, vectors=10, vector_bytes=4, retired=0)
    assert cost(mixed, Schedule(1, 1), "optimizer").parameters_and_state == 10 * 16


def test_unknown_mode():
    with pytest.raises(ValueError, match="no execution mode 'forward'"):
        cost(LAYER, Schedule(1, 1), "forward")


@pytest.mark.parametrize(
    ("microbatches", "stage", "stages", "chunks", "expected"),
    [
        (32, 0, 1, 1, 1),
        (32, 0, 8, 1, 8),
        (32, 7, 8, 1, 1),
        (4, 0, 8, 1, 4),
        # 2 stages of 4 chunks: 2 * 1 + 3 * 2 warm-up chunks and one more; the last stage two fewer.
        (16, 0, 2, 4, 9 / 4),
        (16, 1, 2, 4, 7 / 4),
        (2, 0, 4, 2, 2),
    ],
)
def test_microbatches_in_flight(microbatches, stage, stages, chunks, expected):
    assert microbatches_in_flight(microbatches, stage, stages, chunks) == expected


# Layers, hidden size, rows of q/k/v, width of the MLP; tensor- and pipeline-parallel sizes and chunks;
# microbatches per step, ranks that share the optimizer's state. As in examples/megatron.
RECIPES = {
    "paper 1B, 8 ranks, 8": (22, 1792, 3 * 1792, 4778, 1, 1, 1, 8, 8),
    "Llama-3 8B, TP2, 8 ranks, 128": (32, 4096, 6144, 14336, 2, 1, 1, 128, 4),
    "Llama-3 70B, TP8 PP4 CP2, 128 ranks, 512": (80, 8192, 10240, 28672, 8, 4, 4, 512, 4),
}


def test_the_table_of_the_documentation():
    """First stage, unified, bf16, distributed optimizer."""
    text = (Path(__file__).resolve().parent.parent / "docs/running-at-scale.md").read_text(encoding="utf-8")
    rows = text.split("<!-- cost-table -->")[1].split("\n\n")[0].strip().splitlines()[2:]
    expected = []
    for name, (layers, hidden, qkv, ffn, tensor, stages, chunks, microbatches, shards) in RECIPES.items():
        here = layers // stages
        added = here * (5 * (hidden + 1) + 2 * (ffn + 1) + 3 * (128 + 1))
        linears = here * (qkv + 2 * ffn) // tensor
        holding = Holding(linears * hidden, linears, 2, added, 2, here * 2 * hidden)
        schedule = Schedule(
            microbatches, microbatches_in_flight(microbatches, 0, stages, chunks), state_shards=shards
        )
        for mode, label in (("autograd", "`autograd`"), ("optimizer", "in the optimizer")):
            found = cost(holding, schedule, mode)
            sizes = map(in_bytes, (found.fold_per_step, found.split_per_step, found.memory))
            fold, split, memory = sizes
            time = f"{1000 * found.seconds:.2f} ms"
            expected.append(f"| {name} | {label} | {fold} | {split} | {time} | {memory} |")
    assert rows == expected
