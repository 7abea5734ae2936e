"""Passes over a shard of a folded weight against float64 autograd, without Megatron."""

import pytest
import torch
from reference import effective_weight

from megatron_scalevec.execution.shard import (
    Part,
    Run,
    column_squares,
    fold_parts,
    rectangles,
    runs_of,
    split_parts,
    unfold_parts,
)
from megatron_scalevec.fold import fc1_row_map, fold_weight, qkv_row_map

ROWS = qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=3, tp_rank=0, tp_size=1)
COLUMNS = 10
# Where vectors lie in the flat tensors: three γ_in, then three γ_out.
INNER = tuple(COLUMNS * branch for branch in range(3))
OUTER = tuple(3 * COLUMNS + sum(ROWS.sizes[:branch]) for branch in range(3))
FLAT = 3 * COLUMNS + sum(ROWS.sizes)


def _part(start=0, stop=240, has_in=True, has_out=True):
    """A shard; one branch has no γ_in, another no γ_out."""
    inner = tuple(at if has_in and branch != 1 else None for branch, at in enumerate(INNER))
    outer = tuple(at if has_out and branch != 2 else None for branch, at in enumerate(OUTER))
    return Part(start, stop, COLUMNS, runs_of(ROWS), inner, outer)


def test_runs_of_fused_weights():
    assert [(r.start, r.stop, r.branch, r.channel) for r in runs_of(ROWS)] == [
        (0, 6, 0, 0),
        (6, 9, 1, 0),
        (9, 12, 2, 0),
        (12, 18, 0, 6),
        (18, 21, 1, 3),
        (21, 24, 2, 3),
    ]
    rows = fc1_row_map(ffn_hidden_size=8, gated=True, tp_rank=1, tp_size=2)
    assert runs_of(rows) == (Run(0, 4, 0, 4), Run(4, 8, 1, 4))


@pytest.mark.parametrize(("start", "stop"), [(0, 240), (0, 7), (13, 240), (58, 61), (5, 199), (60, 90)])
def test_rectangles_cover_a_shard_once(start, stop):
    """Within one run each, whole rows or a part of one, and never more than asked for."""
    covered = torch.zeros(24, COLUMNS, dtype=torch.int64)
    at = 0
    for piece in rectangles(_part(start, stop), elements=25):
        assert piece.flat.start == at and piece.shape[0] * piece.shape[1] == piece.flat.stop - at <= 25
        at = piece.flat.stop
        row = (start + piece.flat.start) // COLUMNS
        assert ROWS.branch_of_row[row : row + piece.shape[0]].unique().tolist() == [piece.branch]
        covered[row : row + piece.shape[0], piece.columns] += 1
    assert at == stop - start
    assert covered.view(-1)[start:stop].eq(1).all() and covered.sum() == stop - start


def _draw():
    """Gradient, weight, and all vectors."""
    generator = torch.Generator().manual_seed(0)
    gradient, weight = (torch.randn(24, COLUMNS, generator=generator) for _ in range(2))
    return gradient, weight, 1 + 0.3 * torch.randn(FLAT, generator=generator)


def _vectors(part, gamma):
    """γ_in and γ_out by branch, None for ones."""
    inner = [None if at is None else gamma[at : at + COLUMNS] for at in part.inner]
    outer = [None if at is None else gamma[at : at + size] for at, size in zip(part.outer, ROWS.sizes)]
    return inner, outer


def _oracle(part, weight, gamma):
    """W_eff in float64 by diagonal matrices, run by run, and the leaves it is a function of."""
    raw, own = weight.double().requires_grad_(), gamma.double().requires_grad_()
    inner, outer = _vectors(part, own)
    rows = []
    for run in runs_of(ROWS):
        scale = outer[run.branch]
        if scale is not None:
            scale = scale[run.channel : run.channel + run.stop - run.start]
        rows.append(effective_weight(raw[run.start : run.stop], inner[run.branch], scale))
    return torch.cat(rows), raw, own


@pytest.mark.parametrize("cuts", [(), (97,), (3, 60, 61, 200)], ids=str)
@pytest.mark.parametrize(("has_in", "has_out"), [(True, False), (False, True), (True, True)])
def test_splitting_a_gradient(has_in, has_out, cuts):
    """Shards cut anywhere together give what autograd gives; branches without a vector are left alone."""
    gradient, weight, gamma = _draw()
    folded, raw, own = _oracle(_part(has_in=has_in, has_out=has_out), weight, gamma)
    (folded * gradient.double()).sum().backward()
    edges = [0, *cuts, 240]
    parts = [_part(*ends, has_in=has_in, has_out=has_out) for ends in zip(edges, edges[1:])]
    found, totals = gradient.clone().view(-1), torch.zeros(FLAT, dtype=torch.float64)
    sizes = [part.stop - part.start for part in parts]
    split_parts(parts, found.split(sizes), weight.view(-1).split(sizes), gamma, totals)
    torch.testing.assert_close(found.view(24, COLUMNS).double(), raw.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(totals, own.grad, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folding_rounds_once_and_is_what_the_forward_pass_forms(dtype):
    _, weight, gamma = _draw()
    live, sizes = torch.empty(240, dtype=dtype), (97, 143)
    parts = [_part(0, 97), _part(97, 240)]
    fold_parts(parts, live.split(sizes), weight.view(-1).split(sizes), gamma)
    inner, outer = _vectors(_part(), gamma)
    gamma_in = torch.stack([torch.ones(COLUMNS) if v is None else v for v in inner])
    gamma_out = torch.cat([torch.ones(size) if v is None else v for v, size in zip(outer, ROWS.sizes)])
    expected = fold_weight(weight, gamma_in, gamma_out, ROWS.branch_of_row, ROWS.slot_of_row)
    assert torch.equal(live.view(24, COLUMNS), expected.to(dtype))


def test_unfolding_is_the_way_back():
    _, weight, gamma = _draw()
    live = torch.empty(240, dtype=torch.bfloat16)
    fold_parts([_part()], [live], [weight.view(-1)], gamma)
    master, again = live.float(), torch.empty_like(live)
    unfold_parts([_part()], [master], gamma)
    torch.testing.assert_close(master.view(24, COLUMNS), weight, rtol=2**-7, atol=0)
    fold_parts([_part()], [again], [master], gamma)
    assert torch.equal(again, live)


def test_squares_of_columns_by_branch():
    """Shards cut in the middle of a row together; a branch without γ_in is left out."""
    _, weight, _ = _draw()
    totals, sizes = torch.zeros(FLAT, dtype=torch.float64), (97, 143)
    column_squares([_part(0, 97), _part(97, 240)], weight.view(-1).split(sizes), totals)
    expected = torch.zeros_like(totals)
    for branch in (0, 2):
        own = weight.double()[ROWS.branch_of_row == branch]
        expected[INNER[branch] : INNER[branch] + COLUMNS] = (own * own).sum(0)
    torch.testing.assert_close(totals, expected, rtol=1e-6, atol=0)


def test_sums_over_many_rows_keep_their_digits():
    """10⁵ rows: float32 throughout would lose a digit or two."""
    rows, columns = 100_000, 8
    generator = torch.Generator().manual_seed(1)
    gradient, weight = (torch.rand(rows, columns, generator=generator) for _ in range(2))
    gamma = 1 + 0.1 * torch.rand(columns + rows)
    totals = torch.zeros(columns + rows, dtype=torch.float64)
    part = Part(0, rows * columns, columns, (Run(0, rows, 0, 0),), (0,), (columns,))
    product = gradient.double() * weight.double()
    split_parts([part], [gradient.view(-1).clone()], [weight.view(-1)], gamma, totals)
    inner, outer = gamma.double().split([columns, rows])
    over_rows, over_columns = (product * outer[:, None]).sum(0), (product * inner).sum(1)
    assert float((totals[:columns] / over_rows - 1).abs().max()) < 3e-7
    assert float((totals[columns:] / over_columns - 1).abs().max()) < 1e-6


def test_several_shards_add_to_the_vectors_they_share():
    gradient, weight, gamma = _draw()
    part, master = _part(13, 240), weight.view(-1)[13:]
    alone, together = (torch.zeros(FLAT, dtype=torch.float64) for _ in range(2))
    split_parts([part], [gradient.view(-1)[13:].clone()], [master], gamma, alone)
    gradients = [gradient.view(-1)[13:].clone() for _ in range(2)]
    split_parts([part, part], gradients, [master] * 2, gamma, together)
    torch.testing.assert_close(together, 2 * alone, rtol=1e-12, atol=0)
    assert torch.equal(*gradients)
    lives = [torch.empty(227, dtype=torch.bfloat16) for _ in range(3)]
    fold_parts([part, part], lives[:2], [master] * 2, gamma)
    fold_parts([part], lives[2:], [master], gamma)
    assert torch.equal(lives[0], lives[2]) and torch.equal(lives[1], lives[2])


def test_temporaries_are_bounded():
    """Whatever the size of the weight, no temporary is larger than one rectangle."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
                sizes.append(result.numel())
            return result

    rows, columns = 4096, 256
    gradient, weight = torch.randn(rows * columns), torch.randn(rows * columns)
    live = torch.empty(rows * columns, dtype=torch.bfloat16)
    gamma, totals = torch.rand(columns + rows), torch.zeros(columns + rows, dtype=torch.float64)
    part = Part(0, rows * columns, columns, (Run(0, rows, 0, 0),), (0,), (columns,))
    with Watch():
        split_parts([part], [gradient], [weight], gamma, totals)
        fold_parts([part], [live], [weight], gamma)
    assert max(sizes) == 1 << 17
