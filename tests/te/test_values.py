"""Numbers: TransformerEngine's own modules and autograd functions, with its kernels replaced."""

import pytest

STRATEGIES = [
    *("none", "iwd", "hg", "post-qkv", "dp", "dnp", "or", "unified", "unified-foldable"),
]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qk-norm"])
def test_values_and_gradients_equal_the_reference(te_ranks, kind, strategy):
    [found] = te_ranks.run("compare_with_reference", kind=kind, config={"strategy": strategy})
    if strategy not in ("dnp", "unified"):
        assert found["start"] < 1e-14
    tolerance = 1e-12 if kind == "gpt2" else 1e-6
    assert max(found["logits"], found["gradient"]) < tolerance
