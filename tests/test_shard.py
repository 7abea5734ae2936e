"""Passes over a shard of a folded weight against float64 autograd, without Megatron."""

import pytest
import torch
from reference import effective_weight

from megatron_scalevec.execution.shard import (
    Part,
    Run,
    Scales,
    fold_into,
    fold_parts,
    rectangles,
    runs_of,
    split_gradient,
    split_parts,
    unfold_into,
)
from megatron_scalevec.fold import fc1_row_map, fold_weight, qkv_row_map

ROWS = qkv_row_map(num_query_groups=2, query_heads_per_group=2, head_dim=3, tp_rank=0, tp_size=1)
COLUMNS = 10


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
    for piece in rectangles(start, stop, COLUMNS, runs_of(ROWS), elements=25):
        assert piece.flat.start == at and piece.shape[0] * piece.shape[1] == piece.flat.stop - at <= 25
        at = piece.flat.stop
        row = (start + piece.flat.start) // COLUMNS
        assert ROWS.branch_of_row[row : row + piece.shape[0]].unique().tolist() == [piece.branch]
        covered[row : row + piece.shape[0], piece.columns] += 1
    assert at == stop - start
    assert covered.view(-1)[start:stop].eq(1).all() and covered.sum() == stop - start


def _draw(has_in, has_out):
    generator = torch.Generator().manual_seed(0)

    def some(*shape):
        return torch.randn(*shape, generator=generator)

    inner = [1 + 0.3 * some(COLUMNS) if has_in and b != 1 else None for b in range(3)]
    outer = [1 + 0.3 * some(size) if has_out and b != 2 else None for b, size in enumerate(ROWS.sizes)]
    return some(24, COLUMNS), some(24, COLUMNS), Scales(inner, outer)


def _zeros(scales):
    def like(vectors):
        return [None if v is None else torch.zeros(v.numel(), dtype=torch.float64) for v in vectors]

    return Scales(like(scales.inner), like(scales.outer))


def _oracle(weight, scales):
    """W_eff in float64 by diagonal matrices, run by run, and the leaves it is a function of."""

    def leaves(vectors):
        return [None if v is None else v.double().requires_grad_() for v in vectors]

    raw, own = weight.double().requires_grad_(), Scales(leaves(scales.inner), leaves(scales.outer))
    rows = []
    for run in runs_of(ROWS):
        outer = own.outer[run.branch]
        if outer is not None:
            outer = outer[run.channel : run.channel + run.stop - run.start]
        rows.append(effective_weight(raw[run.start : run.stop], own.inner[run.branch], outer))
    return torch.cat(rows), raw, own


@pytest.mark.parametrize("cuts", [(), (97,), (3, 60, 61, 200)], ids=str)
@pytest.mark.parametrize(("has_in", "has_out"), [(True, False), (False, True), (True, True)])
def test_split_gradient(has_in, has_out, cuts):
    """Shards cut anywhere together give what autograd gives; branches without a vector are left alone."""
    gradient, weight, scales = _draw(has_in, has_out)
    folded, raw, own = _oracle(weight, scales)
    (folded * gradient.double()).sum().backward()
    sums, edges = _zeros(scales), [0, *cuts, 240]
    found = gradient.clone().view(-1)
    for start, stop in zip(edges, edges[1:]):
        split_gradient(
            found[start:stop], weight.view(-1)[start:stop], start, COLUMNS, runs_of(ROWS), scales, sums
        )
    torch.testing.assert_close(found.view(24, COLUMNS).double(), raw.grad, rtol=1e-6, atol=1e-6)
    for ours, leaf in zip([*sums.inner, *sums.outer], [*own.inner, *own.outer]):
        if leaf is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, leaf.grad, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_folding_rounds_once_and_is_what_the_forward_pass_forms(dtype):
    _, weight, scales = _draw(True, True)
    live = torch.empty(240, dtype=dtype)
    for start, stop in ((0, 97), (97, 240)):
        fold_into(live[start:stop], weight.view(-1)[start:stop], start, COLUMNS, runs_of(ROWS), scales)
    ones = torch.ones(COLUMNS)
    gamma_in = torch.stack([ones if v is None else v for v in scales.inner])
    blocks = zip(scales.outer, ROWS.sizes)
    gamma_out = torch.cat([torch.ones(size) if v is None else v for v, size in blocks])
    expected = fold_weight(weight, gamma_in, gamma_out, ROWS.branch_of_row, ROWS.slot_of_row)
    assert torch.equal(live.view(24, COLUMNS), expected.to(dtype))


def test_unfolding_is_the_way_back():
    _, weight, scales = _draw(True, True)
    live = torch.empty(240, dtype=torch.bfloat16)
    fold_into(live, weight.view(-1), 0, COLUMNS, runs_of(ROWS), scales)
    master, again = live.float(), torch.empty_like(live)
    unfold_into(master, 0, COLUMNS, runs_of(ROWS), scales)
    torch.testing.assert_close(master.view(24, COLUMNS), weight, rtol=2**-7, atol=0)
    fold_into(again, master, 0, COLUMNS, runs_of(ROWS), scales)
    assert torch.equal(again, live)


def test_sums_over_many_rows_keep_their_digits():
    """10⁵ rows: float32 throughout would lose a digit or two."""
    rows, columns = 100_000, 8
    generator = torch.Generator().manual_seed(1)
    gradient, weight = (torch.rand(rows, columns, generator=generator) for _ in range(2))
    inner, outer = 1 + 0.1 * torch.rand(columns), 1 + 0.1 * torch.rand(rows)
    scales, runs = Scales([inner], [outer]), (Run(0, rows, 0, 0),)
    sums = _zeros(scales)
    product = gradient.double() * weight.double()
    split_gradient(gradient.view(-1).clone(), weight.view(-1), 0, columns, runs, scales, sums)
    over_rows = (product * outer.double()[:, None]).sum(0)
    assert float(((sums.inner[0] - over_rows) / over_rows).abs().max()) < 3e-7
    over_columns = (product * inner.double()).sum(1)
    assert float(((sums.outer[0] - over_columns) / over_columns).abs().max()) < 1e-6


def test_several_shards_add_to_their_vectors():
    """Vectors in flat tensors; one γ_in and one γ_out that two weights share."""
    gradient, weight, scales = _draw(True, True)
    flat = torch.cat([v for v in (*scales.inner, *scales.outer) if v is not None])
    sizes = [0, COLUMNS, 2 * COLUMNS, 2 * COLUMNS + ROWS.sizes[0]]
    part = Part(13, 240, COLUMNS, runs_of(ROWS), (sizes[0], None, sizes[1]), (sizes[2], sizes[3], None))
    sums, totals = _zeros(scales), torch.zeros(flat.numel(), dtype=torch.float64)
    split_gradient(
        gradient.view(-1)[13:].clone(), weight.view(-1)[13:], 13, COLUMNS, runs_of(ROWS), scales, sums
    )
    gradients = [gradient.view(-1)[13:].clone() for _ in range(2)]
    split_parts([part, part], gradients, [weight.view(-1)[13:]] * 2, flat, totals)
    expected = torch.cat([v for v in (*sums.inner, *sums.outer) if v is not None])
    torch.testing.assert_close(totals, 2 * expected, rtol=1e-12, atol=0)
    assert torch.equal(*gradients)
    lives = [torch.empty(227, dtype=torch.bfloat16) for _ in range(2)]
    fold_parts([part, part], lives, [weight.view(-1)[13:]] * 2, flat)
    alone = torch.empty(227, dtype=torch.bfloat16)
    fold_into(alone, weight.view(-1)[13:], 13, COLUMNS, runs_of(ROWS), scales)
    assert torch.equal(lives[0], alone) and torch.equal(lives[1], alone)


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
    scales, runs = Scales([torch.rand(columns)], [torch.rand(rows)]), (Run(0, rows, 0, 0),)
    sums = _zeros(scales)
    with Watch():
        split_gradient(gradient, weight, 0, columns, runs, scales, sums)
        fold_into(live, weight, 0, columns, runs, scales)
    assert max(sizes) == 1 << 19
