"""Row maps and W_eff, against hand-written layouts and closed forms."""

import pytest
import torch

from megatron_scalevec.fold import fc1_row_map, fold_weight, qkv_row_map, whole_row_map


def test_qkv_rows_are_interleaved_by_query_group():
    """Two groups of two query heads, head_dim 1: q0 q1 k0 v0 | q2 q3 k1 v1."""
    rows = qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=1, tp_rank=0, tp_size=1)
    assert rows.branches == ("q", "k", "v")
    assert rows.sizes == (4, 2, 2)
    assert rows.branch_of_row.tolist() == [0, 0, 1, 2, 0, 0, 1, 2]
    assert rows.slot_of_row.tolist() == [0, 1, 4, 6, 2, 3, 5, 7]


def test_more_ranks_than_query_groups_cut_inside_a_group():
    """One group of three query heads on two ranks: q0 q1 q2 | k v, cut after the fifth half."""
    parts = [
        qkv_row_map(num_query_groups=1, query_heads_per_group=2, head_dim=2, tp_rank=r, tp_size=2)
        for r in range(2)
    ]
    assert parts[0].branch_of_row.tolist() == [0, 0, 0, 0]
    assert parts[1].branch_of_row.tolist() == [1, 1, 2, 2]
    assert parts[1].slot_of_row.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_gated_rows_are_each_ranks_gate_then_its_up(tp_size):
    maps = [fc1_row_map(ffn_hidden_size=8, gated=True, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]
    half = 8 // tp_size
    for rank, rows in enumerate(maps):
        assert rows.branch_of_row.tolist() == [0] * half + [1] * half
        own = list(range(rank * half, (rank + 1) * half))
        assert rows.slot_of_row.tolist() == own + [8 + i for i in own]


def test_plain_mlp_has_one_branch():
    rows = fc1_row_map(ffn_hidden_size=6, gated=False, tp_rank=1, tp_size=2)
    assert rows.branches == ("up",)
    assert rows.slot_of_row.tolist() == [3, 4, 5]


@pytest.mark.parametrize("tp_size", [1, 2, 3, 4, 6])
def test_ranks_together_cover_every_output_channel_once(tp_size):
    slots = torch.cat(
        [
            qkv_row_map(
                num_query_groups=3, query_heads_per_group=2, head_dim=4, tp_rank=r, tp_size=tp_size
            ).slot_of_row
            for r in range(tp_size)
        ]
    )
    assert sorted(slots.tolist()) == list(range(3 * 4 * 4))


def test_w_eff_is_exact_on_powers_of_two():
    weight = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    gamma_in = torch.tensor([[2.0, 0.5], [4.0, 1.0]])
    gamma_out = torch.tensor([1.0, 8.0, 0.25])
    branch, slot = torch.tensor([0, 1, 1]), torch.tensor([2, 0, 1])
    expected = torch.tensor([[0.5, 0.25], [16.0, 8.0], [512.0, 256.0]])
    assert torch.equal(fold_weight(weight, gamma_in, gamma_out, branch, slot), expected)


def test_scales_of_one_change_no_bit():
    weight = torch.randn(6, 5, dtype=torch.bfloat16)
    branch, slot = torch.tensor([0, 0, 1, 1, 0, 1]), torch.arange(6)
    ones = torch.ones(2, 5, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)
    assert torch.equal(fold_weight(weight, *ones, branch, slot), weight)


@pytest.mark.parametrize(("has_in", "has_out"), [(True, False), (False, True), (True, True)])
def test_gradcheck(has_in, has_out):
    torch.manual_seed(0)
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    gamma_in = torch.randn(3, 4, dtype=torch.float64, requires_grad=True) if has_in else None
    gamma_out = torch.randn(8, dtype=torch.float64, requires_grad=True) if has_out else None
    branch, slot = torch.tensor([0, 2, 1, 1, 0, 2]), torch.tensor([7, 0, 3, 2, 5, 6])
    given = [t for t in (weight, gamma_in, gamma_out) if t is not None]

    def function(*tensors):
        tensors = list(tensors)
        w = tensors.pop(0)
        gi = tensors.pop(0) if has_in else None
        go = tensors.pop(0) if has_out else None
        return fold_weight(w, gi, go, branch, slot)

    assert torch.autograd.gradcheck(function, given)


def test_bfloat16_gradients_are_rounded_once():
    """A branch of many rows: sums in bfloat16 would lose most of their digits."""
    torch.manual_seed(0)
    rows, hidden = 512, 8
    exact = [torch.randn(rows, hidden), torch.rand(1, hidden) + 0.5, torch.rand(rows) + 0.5]
    half = [t.bfloat16().requires_grad_() for t in exact]
    double = [t.detach().double().requires_grad_() for t in half]
    branch, slot = torch.zeros(rows, dtype=torch.int64), torch.arange(rows)
    seed = torch.randn(rows, hidden).bfloat16()
    fold_weight(*half, branch, slot).backward(seed)
    fold_weight(*double, branch, slot).backward(seed.double())
    for ours, expected in zip(half, double):
        assert ours.grad.dtype is torch.bfloat16
        torch.testing.assert_close(ours.grad.double(), expected.grad, rtol=2**-8, atol=1e-6)


def test_the_weight_alone_is_kept_for_backward():
    """No second weight-sized tensor waits for backward: pipelines hold many microbatches in flight."""
    weight = torch.randn(64, 32, requires_grad=True)
    gammas = torch.ones(2, 32, requires_grad=True), torch.ones(64, requires_grad=True)
    branch, slot = torch.arange(64) % 2, torch.arange(64)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fold_weight(weight, *gammas, branch, slot)
    assert sum(t.numel() >= weight.numel() for t in kept) == 1


def test_row_maps_have_values_under_a_meta_device():
    """Models are also built on the meta device, to look at their layout."""
    with torch.device("meta"):
        maps = [
            qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=2, tp_rank=1, tp_size=2),
            fc1_row_map(ffn_hidden_size=4, gated=True, tp_rank=0, tp_size=2),
            fc1_row_map(ffn_hidden_size=4, gated=False, tp_rank=0, tp_size=2),
            whole_row_map("o", 4),
        ]
    for rows in maps:
        assert not rows.branch_of_row.is_meta and not rows.slot_of_row.is_meta


def test_an_output_gate_is_a_branch_between_q_and_k():
    rows = qkv_row_map(
        num_query_groups=2, query_heads_per_group=2, head_dim=1, tp_rank=0, tp_size=1, output_gate=True
    )
    assert rows.branches == ("q", "output_gate", "k", "v")
    assert rows.branch_of_row.tolist() == [0, 0, 1, 1, 2, 3] * 2
    assert rows.slot_of_row.tolist() == [0, 1, 4, 5, 8, 10, 2, 3, 6, 7, 9, 11]
