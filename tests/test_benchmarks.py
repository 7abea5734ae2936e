"""What the benchmarks count is what holds: operations, memory, traffic. Nothing is timed here but by them."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

FOLDABLE = [
    {"strategy": "hg"},
    {"strategy": "dp"},
    {"strategy": "post-qkv"},
    {"strategy": "or", "sites": ("attention", "mlp")},
    {"strategy": "unified-foldable", "sites": ("attention", "mlp")},
    {"strategy": "unified-foldable"},
    {"strategy": "unified"},
]


def test_forward_and_backward_pass_are_stock(ranks):
    """Operation by operation, with their shapes and in their order, as the profiler lists them."""
    [found] = ranks.run("list_operations", cases=FOLDABLE)
    stock, frozen = found["stock"], found["frozen"]
    *exact, with_final_norm, with_norms = found["cases"]
    assert len(frozen) > 500
    for case, own in zip(FOLDABLE, exact):
        # The scales of the norms in the layers are in the weights, so their gradients are not formed.
        assert own == frozen, case
    # Beyond that nothing but what stock itself does.
    assert not Counter(frozen) - Counter(stock)
    # γ of the final norm is a product of two vectors in `unified-foldable`, and acts in the forward pass:
    # products only, once per model and not per layer.
    more = Counter(with_final_norm) - Counter(frozen)
    assert 0 < sum(more.values()) < 80
    assert not {name for name, _ in more if any(part in name for part in ("mm", "norm", "cat", "index"))}
    # The norms of `dual-norm` do show: three in the one layer, that of the model itself as it was.
    added = Counter(name for name, _ in (Counter(with_norms) - Counter(frozen)).elements())
    assert (added["aten::linalg_vector_norm"], added["aten::rms_norm"]) == (3, 0)


def test_memory_of_the_optimizers_mode(ranks):
    """At hidden size 1024 on two data-parallel ranks: at most 0.2 % beside the vectors' own states."""
    for found in ranks.run("count_memory", 2, strategies=["unified-foldable", "unified"], hidden=1024):
        stock = found.pop("stock")["alive"]
        assert stock > 200e6
        for strategy, own in found.items():
            beside = own["alive"] - stock - own["vectors"]
            assert 0 < beside / stock <= 0.002, (strategy, beside, stock)
            # The formula counts all of it, the vectors and what is freed with the norms' scales included.
            assert own["alive"] - stock == pytest.approx(own["formula"], rel=0.1), strategy


def test_the_benchmark_of_steps(ranks):
    [found] = ranks.run("bench_tiny")
    assert [row["execution"] for row in found["times"]] == ["optimizer", "autograd"]
    assert all(row["processor"] > 0 and row["wall"] > 0 for row in found["times"])
    assert 0 < found["times"][0]["passes"] < 1 and found["times"][1]["passes"] is None
    assert len(found["lines"]) == 4 and "by formula" not in found["lines"][0]
    (one, _), (two, by_autograd) = found["counts"][1], found["counts"][2]
    # Of one more layer, what the formulas say in arithmetic; its traffic is that of plain torch.
    added = {key: two[key] - one[key] for key in ("flops", "flops_by_formula", "bytes", "bytes_by_formula")}
    assert added["flops"] == pytest.approx(added["flops_by_formula"], rel=0.15)
    # An operation at a time, where the formula has a fold that costs nothing beside the copy it replaces.
    assert added["bytes_by_formula"] < added["bytes"] < 7 * added["bytes_by_formula"]
    assert by_autograd["bytes"] > two["bytes"] and by_autograd["flops"] > two["flops"]
    norms = found["norms"]
    assert all(row["seconds"] > 0 for row in norms.values())
    assert norms["split_alone"]["bytes"] < norms["three_in_pieces"]["bytes"]


def test_products_in_float32(monkeypatch):
    """The same products to bf16's rounding, by other operations, and torch's own again afterwards."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "benchmarks"))
    monkeypatch.delitem(sys.modules, "products", raising=False)
    from products import float32_products

    def results(dtype=torch.bfloat16):
        generator = torch.Generator().manual_seed(7)
        shapes = [(4, 6, 64), (32, 64), (32,)]
        x, w, b = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
        out, plain = torch.nn.functional.linear(x, w, b), torch.nn.functional.linear(x, w)
        scores = torch.bmm(out, plain.transpose(1, 2))
        scaled = torch.baddbmm(torch.ones_like(scores), out, plain.transpose(1, 2), beta=0.5, alpha=0.25)
        with torch.profiler.profile() as profiler:
            gradients = torch.autograd.grad(scores.sum() + scaled.sum(), (x, w, b))
        kernels = Counter(event.name for event in profiler.events())
        return [out, plain, scores, scaled, *gradients], kernels["aten::_to_copy"]

    own, own_casts = results()
    with float32_products():
        found, casts = results()
        exact, _ = results(torch.float64)
    _, casts_after = results()
    for a, b, c in zip(own, found, exact):
        assert b.dtype == torch.bfloat16 and c.dtype == torch.float64
        torch.testing.assert_close(b, a, rtol=2**-6, atol=2**-6 * c.detach().abs().max().item())
    torch.testing.assert_close(exact, results(torch.float64)[0], rtol=0, atol=0)
    assert casts >= own_casts + 8 and casts_after == own_casts


@pytest.mark.needs_training  # writes for TensorBoard, which the main environment has
def test_the_benchmark_of_telemetry(ranks):
    [found] = ranks.run("bench_telemetry")
    assert [row["execution"] for row in found["rows"]] == ["optimizer", "autograd"]
    for row, line in zip(found["rows"], found["lines"]):
        assert 0 < row["logging_seconds"] and row["ratio"] > 0
        assert row["percent"] == pytest.approx(row["logging_seconds"] / row["step_seconds"])
        assert "every 100 steps" in line
