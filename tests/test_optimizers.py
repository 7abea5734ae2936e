"""Megatron's optimizers: what they do to vectors and matrices in one step, and which groups are refused."""

from importlib import metadata

import numpy as np
import pytest

# µP's rules and emerging-optimizers are there in the main environment alone.
LATEST = metadata.version("megatron-core") >= "0.19"
LR, DECAY = 0.1, 0.1

OPTIMIZERS = {
    "plain": {},
    "distributed": {"use_distributed_optimizer": True},
}


def shrink(values, steps):
    """What AdamW of torch does to a parameter without gradients: one product in float32 per step."""
    for lr, decay in steps:
        values = values * np.float32(1 - lr * decay)
    return values


def class_of(name):
    """By the method, not by the code: what decays under ``split``."""
    if "norm" in name:
        # The final norm feeds the output head, q and k norms RoPE, the v norm attention (our reading).
        return "final_layernorm" in name or "v_layernorm" in name
    return True


@pytest.mark.parametrize("strategy", ["stock", "iwd", "hg", "dnp", "unified"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_without_gradients_shrinks_what_decays_and_nothing_else(ranks, strategy, optimizer):
    [found] = ranks.run(
        "steps_without_gradients", strategy={"strategy": strategy}, settings=dict(OPTIMIZERS[optimizer])
    )
    moved = set()
    for name, before in found["before"].items():
        after = found["after"][name]
        if np.array_equal(after, before):
            continue
        moved.add(name)
        np.testing.assert_array_equal(after, shrink(before, [(LR, DECAY)]), err_msg=name)
    vectors = {name for name, value in found["before"].items() if value.ndim == 1}
    matrices = set(found["before"]) - vectors
    trained = {name for name in vectors if name in found["groups"]}
    if strategy == "stock":
        assert moved == matrices
    else:
        norms = ("input_layernorm", "pre_mlp_layernorm")
        decaying = {n for n in trained if class_of(n) or (strategy == "iwd" and any(k in n for k in norms))}
        assert moved == matrices | decaying
        assert 0 < len(decaying) < len(trained)


def test_a_direction_does_not_shrink_and_its_magnitude_does(ranks):
    strategy = {"strategy": "unified", "reparam": "unit"}
    [found] = ranks.run("steps_without_gradients", strategy=strategy, settings={})
    kinds = {True: 0, False: 0}
    for name, before in found["before"].items():
        if name.endswith(("_magnitude", "_direction")) and name in found["groups"]:
            moved = not np.array_equal(found["after"][name], before)
            assert moved == (name.endswith("_magnitude") and class_of(name)), name
            kinds[moved] += 1
    assert all(kinds.values())


def test_the_policy_all_decays_norms_of_q_and_k_as_well(ranks):
    """With Megatron's own flag for them, which ``split`` does not go together with."""
    [found] = ranks.run(
        "steps_without_gradients",
        strategy={"strategy": "hg", "weight_decay": "all"},
        settings={"apply_wd_to_qk_layernorm": True},
    )
    still = {n for n in found["groups"] if np.array_equal(found["after"][n], found["before"][n])}
    assert not still and any("q_layernorm" in name for name in found["groups"])


def test_in_bfloat16_it_is_the_master_that_shrinks(ranks):
    """Rounded once, on the way back to the model."""
    [found] = ranks.run(
        "steps_without_gradients",
        strategy={"strategy": "hg"},
        settings={"use_distributed_optimizer": True},
        steps=3,
        bf16=True,
    )
    name = "decoder.layers.0.mlp.linear_fc1.gamma_in_up"
    import torch

    exact = shrink(found["before"][name], [(LR, DECAY)] * 3)
    rounded = torch.from_numpy(exact).bfloat16().float().numpy()
    np.testing.assert_array_equal(found["after"][name], rounded)
    assert not np.array_equal(found["after"][name], found["before"][name])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_schedules_of_weight_decay_and_decoupled_learning_rates(ranks, optimizer):
    """The vectors follow the weights' decay from step to step; embeddings have rates of their own."""
    settings = {"min_lr": 0.02, **OPTIMIZERS[optimizer]}
    if LATEST:  # before, such groups are refused (below)
        settings |= {"decoupled_lr": 0.2, "decoupled_min_lr": 0.04}
    [found] = ranks.run(
        "steps_without_gradients",
        strategy={"strategy": "dnp"},
        settings=settings,
        schedule={
            "start_wd": 0.1,
            "end_wd": 0.3,
            "wd_incr_steps": 4,
            "wd_incr_style": "linear",
            "lr_decay_style": "linear",
            "lr_decay_steps": 4,
        },
        steps=4,
    )
    wd = [0.1, 0.15, 0.2, 0.25]
    lr = {False: [0.1, 0.08, 0.06, 0.04], True: [0.2, 0.16, 0.12, 0.08]}
    for name, steps in found["groups"].items():
        decoupled = LATEST and ("embedding" in name or "output_layer" in name)
        decays = found["before"][name].ndim > 1 or class_of(name)
        np.testing.assert_allclose([step[0] for step in steps], lr[decoupled], err_msg=name)
        np.testing.assert_allclose([step[1] for step in steps], wd if decays else [0.0] * 4, err_msg=name)
        expected = shrink(found["before"][name], steps)
        np.testing.assert_array_equal(found["after"][name], expected, err_msg=name)


@pytest.mark.needs_training  # for the environment
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_mup_leaves_the_vectors_their_learning_rate_and_their_decay(ranks, optimizer):
    """µP divides the rate of hidden matrices by the width multiplier (Adam) or multiplies that of vectors
    (SGD)."""
    [found] = ranks.run(
        "steps_without_gradients",
        strategy={"strategy": "dnp"},
        settings={"mup": 4.0, "min_lr": 0.1, "optimizer": optimizer},
    )
    for name, [(lr, decay)] in found["groups"].items():
        vector = found["before"][name].ndim == 1
        if optimizer == "adam":
            wide = not vector and "embedding" not in name
            assert lr == pytest.approx(0.025 if wide else 0.1), name
        else:
            assert lr == pytest.approx(0.4 if vector or "embedding" in name else 0.1), name
        assert decay == (DECAY if not vector or class_of(name) else 0.0), name


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("none", ""),
        ("equal-groups", "differ in nothing that Megatron compares when it loads their state"),
        ("second-rule", "ValueError: Conflicting overrides for wd_mult: 0.0 and 1.0"),
        ("missing-key", "a parameter group has no 'wd_mult', without which Megatron cannot load its state"),
        ("matrix-optimizer", "not known to treat its entries one by one (muon)"),
    ],
)
def test_groups_that_would_not_do_are_refused(ranks, case, expected):
    [found] = ranks.run("groups_refused", case=case)
    assert found == expected or (expected and expected in found)


def test_learning_rates_that_megatron_cannot_tell_apart_on_loading(ranks):
    """0.19 compares them; before, two groups that differ in nothing else are one to it."""
    cases = ["learning-rate", "decoupled-lr", *(["mup"] if LATEST else [])]
    found = {case: ranks.run("groups_refused", case=case)[0] for case in cases}
    if LATEST:
        assert found == dict.fromkeys(cases, "")
        # Epsilon is not compared in any version.
        [both] = ranks.run("groups_refused", case="mup-and-decoupled-lr")
        assert "differ in nothing that Megatron compares" in both
    else:
        assert all("differ in nothing that Megatron compares" in text for text in found.values())


@pytest.mark.needs_training  # for the environment
@pytest.mark.parametrize("strategy", ["hg", "unified"])
def test_muon_sees_the_gradient_of_the_raw_weight(ranks, strategy):
    """Of W, not of W_eff; q, k and v stay separate; vectors are Adam's."""
    [found] = ranks.run("muon_gradients", strategy={"strategy": strategy}, kind="llama")
    assert len(found["difference"]) == 8
    assert max(found["difference"].values()) < 2e-5, found["difference"]
    # The comparison would see the difference.
    assert len(found["effective"]) == 4 and min(found["effective"].values()) > 0.05
    fused = [f"decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in (0, 1)]
    assert found["qkv"] == {name: [16, 8, 8] for name in fused}
    assert set(found["vectors"].values()) == {"adam"} and len(found["vectors"]) >= 11
