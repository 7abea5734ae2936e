"""Scale vectors on built models: against the float64 reference, and what is refused."""

import pytest

STRATEGIES = ["none", "iwd", "hg", "post-qkv", "dp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qk-norm", "one-group"])
def test_values_and_gradients_equal_the_reference(ranks, kind, strategy):
    """Megatron computes its rotary angles in float32, which bounds the models that use them."""
    [found] = ranks.run("compare_with_reference", kind=kind, config={"strategy": strategy})
    tolerance = 1e-13 if kind == "gpt2" else 1e-6
    assert found["start"] == 0.0, "conversion alone must not change a bit of the function"
    assert found["logits"] < tolerance
    assert found["gradient"] < tolerance


@pytest.mark.parametrize(
    "components",
    [
        {"placement": "dual", "branches": "shared"},
        {"sites": ("attention",)},
        {"sites": ("mlp", "head")},
        {"placement": "output", "sites": ("attention",)},
    ],
)
def test_components_equal_the_reference(ranks, components):
    [found] = ranks.run("compare_with_reference", kind="gpt2", config={"strategy": "hg", **components})
    assert found["start"] == 0.0
    assert max(found["logits"], found["gradient"]) < 1e-13


@pytest.mark.parametrize("strategy", ["hg", "dnp", "unified"])
def test_norms_over_apex(ranks, strategy):
    """Dual-norm builds more of them, of the model's kind."""
    [found] = ranks.run("compare_with_apex_norms", kind="gpt2", config={"strategy": strategy})
    assert max(found["logits"], found["gradient"]) < 1e-12


def test_a_trained_norm_scale_is_carried_over(ranks):
    """Conversion of a model whose norms are not at one keeps its function where that is possible."""
    for kind in ("llama", "gpt2"):
        for strategy in ("iwd", "hg", "dp", "or", "unified-foldable"):
            [found] = ranks.run("convert_trained", kind=kind, config={"strategy": strategy})
            assert found["difference"] < 1e-14
            assert (found["norms"] == {1.0}) == (strategy != "iwd")
    [refused] = ranks.run("convert_trained", config={"strategy": "post-qkv"})
    assert "trained scale, which 'post-qkv' would drop" in refused["error"]
    assert refused["unchanged"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("twice", "already carries scale vectors"),
        ("wrapped", "on a Wrapper"),
        ("linear", "linear_fc1 is a .*Other.*ColumnParallelLinear"),
        ("unknown-vector", r"decoder\.extra \(3,\) is a one-dimensional parameter of a kind"),
        ("attention", "self_attention is a .*Latent"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_was(ranks, case, message):
    [found] = ranks.run("convert_refused", case=case)
    import re

    assert re.search(message, found["error"])
    assert found["unchanged"]


@pytest.mark.parametrize(
    ("breakage", "message"),
    [
        (None, None),
        ("drop-layer", "linears with scale vectors: 3 built, 4 expected"),
        ("drop-vector", "vectors mlp gate in: 1 built, 2 expected"),
        ("thaw-norm", "norm scales retired: 3 built, 4 expected"),
        ("late-vector", "added after the scale vectors were"),
        ("other-config", "carries hg: .*, but dp: .* was asked for"),
        ("no-decay-rule", "gamma_in_q should decay, but the optimizer's group has wd_mult 0"),
        ("not-in-optimizer", "is in no parameter group, so it would never train"),
    ],
)
def test_the_audit_finds_what_is_missing(ranks, breakage, message):
    import re

    [found] = ranks.run("audit_broken", breakage=breakage)
    if message is None:
        assert found["error"] is None
        assert found["audit"]["linears_converted"] == found["audit"]["linears_expected"] == 4
        assert found["audit"]["parameters_added"] == 2 * (3 + 2) * 32 - 4 * 32
    else:
        assert re.search(message, found["error"])
