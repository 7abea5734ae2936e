"""The cost formulas, against numbers derived by hand."""

import pytest

from megatron_scalevec.cost import Holding, ModelSizes, Schedule, cost, microbatches_in_flight

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
    assert found.replaced_per_step == 0
    assert found.seconds == pytest.approx(0.01140850688)
    assert found.folded_weights == 4 * 285_212_672
    # bf16 parameter 2, gradient 4, master weight 4, two moments 8; a retired scale keeps its parameter.
    assert found.parameters_and_state == 20480 * 18 - 8192 * 16 == 237_568
    assert found.index_maps == 557_056
    assert found.tables == 0
    assert found.beside_the_vectors == 557_056 + 1_140_850_688
    assert found.memory == 237_568 + 557_056 + 1_140_850_688
    # Two to fold, seven to split.
    assert found.flops_per_step == 8 * 9 * 142_606_336


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
    # Megatron's own copy, which is left out, moves what the fold does.
    assert found.replaced_per_step == found.fold_per_step and found.added_per_step == 106_954_752
    assert found.seconds == pytest.approx(3.193e-5, rel=1e-3)
    assert found.folded_weights == 0
    assert found.flops_per_step == 9 * 8_912_896
    # Stored parts, γ, and the gradients of both in float32; eleven int64 for 32 rows.
    assert found.beside_the_vectors == 16 * 20480 + 34816 / 32 * 88
    assert found.parameters_and_state == 20480 * (2 + 4 + 12 / 16) - 8192 * (4 + 12 / 16) == 99_328
    assert found == cost(LAYER, Schedule(microbatches=1, in_flight=1, state_shards=16), "optimizer")


def test_costs_of_two_sets_of_weights_add_up():
    one, two = (cost(LAYER, Schedule(2, 1, state_shards=s), "optimizer") for s in (2, 8))
    both = one + two
    assert both.fold_per_step == one.fold_per_step + two.fold_per_step
    assert both.memory == one.memory + two.memory


def test_a_shape_by_hand():
    """Two layers of eight channels; one of four experts of twelve channels per token."""
    shape = ModelSizes(2, 8, 2, 1, 4, 12, 32, 16, experts=4, chosen=1)
    assert shape.qkv_rows == 16
    matrices = 2 * (8 * 16 + 8 * 8 + 3 * 8 * 12 + 8 * 4) + 8 * 32
    assert shape.flops_per_token() == 6 * matrices + 6 * 2 * 8 * 16
    dense, experts = shape.unified(layers=2, tensor=2, expert=2)
    # Half of q/k/v and the whole router; per layer three times 9, three norms of 5, router 9 and 5.
    assert dense == Holding(2 * (8 + 4) * 8, 2 * 12, 2, 2 * (27 + 15 + 14), 2, 2 * 16)
    # Two experts in each layer: gate and up, 24 rows; vectors twice 9 and twice 13.
    assert experts == Holding(4 * 24 * 8, 4 * 24, 2, 4 * (18 + 26), 2, 0)


def test_float32_has_no_second_copy():
    wide = Holding(weights=100, rows=10, weight_bytes=4, vectors=10, vector_bytes=4, retired=0)
    assert cost(wide, Schedule(1, 1, master_weights=False), "autograd").parameters_and_state == 10 * 16
    assert cost(wide, Schedule(1, 1, master_weights=False), "optimizer").replaced_per_step == 0
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
