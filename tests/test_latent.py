"""Multi-latent attention: against the float64 reference, parallel against serial, what is refused."""

import itertools
import re

import numpy as np
import pytest
from ranks.arguments import LAYOUTS as LAYOUTS_OF_RUNS
from ranks.arguments import tiny_gpt
from ranks.pool import RankFailure
from runs import worst_gradient

PLACEMENTS = ["input", "output", "dual", "dual-norm"]
FORMS = [
    {"strategy": "hg", "placement": placement, "reparam": reparam, "branches": branches}
    for placement, reparam, branches in itertools.product(
        PLACEMENTS, ["none", "product", "unit"], ["split", "shared"]
    )
    if (placement, branches) != ("output", "shared")
]
KINDS = {
    "latents of queries, keys and values": {},
    "no norms on latents": {"qk_layernorm": False},
    "no latent of queries": {"q_lora_rank": None, "qk_layernorm": False},
    "LayerNorm": {"normalization": "LayerNorm"},
    "zero-centered": {"layernorm_zero_centered_gamma": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_equals_the_reference(ranks, kind):
    """Values and all gradients of placements x reparameterizations x branches, and what builds no vectors."""
    forms = [*FORMS, {"strategy": "none"}, {"strategy": "dp", "sites": ("attention", "mlp")}]
    if kind == "latents of queries, keys and values":
        every = ("attention", "latent", "mlp", "projections", "head")
        forms.append({"strategy": "dp", "sites": every, "branches_off": ("k_rope", "q_up", "gate")})
    cases = [{"kind": "mla", "config": form, "overrides": KINDS[kind]} for form in forms]
    [found] = ranks.run("compare_with_reference", cases=cases)
    assert len(found) == len(forms) >= 23
    for case, result in zip(cases, found):
        # Dual-norm has no norm to add here, so conversion never changes the function.
        assert result["start"] < 1e-15, case
        assert result["logits"] < 1e-10, case
        assert result["gradient"] < 1e-10, case


LAYOUTS = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "tp2-sp": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tp4": (4, {"tensor_model_parallel_size": 4}),
}
EVERY_SITE = ("attention", "latent", "mlp", "head", "projections")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        {"strategy": "unified"},
        {"strategy": "or", "reparam": "unit"},
        {"strategy": "dp", "sites": EVERY_SITE},
        {"strategy": "iwd"},
    ],
    ids=lambda config: config["strategy"],
)
def test_gradients_are_the_serial_ones(ranks, config, layout):
    """Of every vector and norm, in float64; two ranks cut the down-projections inside of a branch."""
    world_size, sizes = LAYOUTS[layout]
    [serial] = ranks.run("gradients", config=config, kind="mla")
    for result in ranks.run("gradients", world_size, config=config, kind="mla", **sizes):
        np.testing.assert_allclose(result["loss"], serial["loss"], rtol=1e-12)
        assert result["gradients"].keys() == serial["gradients"].keys()
        for name, gradient in result["gradients"].items():
            np.testing.assert_allclose(
                gradient, serial["gradients"][name], rtol=1e-8, atol=1e-12, err_msg=name
            )


@pytest.mark.parametrize("sabotage", ["tensor-parallel-sum", "rope-key-gradient", "latent-row-map"])
def test_the_comparison_sees_what_is_broken(ranks, sabotage):
    config = {"strategy": "dp"}
    [serial] = ranks.run("gradients", config=config, kind="mla")
    for result in ranks.run(
        "gradients", 2, config=config, kind="mla", sabotage=sabotage, tensor_model_parallel_size=2
    ):
        assert worst_gradient(result, serial) > 1e-3


# Per layer of the model in ranks.models: down-projections (q_down; kv_down, k_rope), up-projections (q_up;
# k_up, v_up) and fc1 (gate, up). Two layers.
TABLES = {
    "unified": {
        "linears": 2 * 5,
        "retired": 2 * 4 + 1,
        "vectors": {
            **{
                f"{site} {branch} {side} {part}": 2
                for site, branches in (
                    ("attention", ("q_down", "kv_down", "k_rope")),
                    ("latent", ("q_up", "k_up", "v_up")),
                    ("mlp", ("gate", "up")),
                )
                for branch in branches
                for side in ("in", "out")
                for part in ("beta", "alpha")
            },
            "head logits in beta": 1,
            "head logits in alpha": 1,
        },
    },
    # The scale of two down-projections stays at their norm; those of the latents are on the linears.
    "iwd": {
        "linears": 2 * 2,
        "retired": 2 * 2,
        "vectors": {
            "attention shared in": 2,
            "latent shared in": 4,
            "mlp shared in": 2,
            "head logits in": 1,
        },
    },
    "none": {"linears": 0, "retired": 2 * 4 + 1, "vectors": {}},
}


@pytest.mark.parametrize("strategy", TABLES)
def test_the_audit_counts_what_the_table_says(ranks, strategy):
    [record] = ranks.run("audit_record", config={"strategy": strategy}, kind="mla")
    table = TABLES[strategy]
    assert record["linears_converted"] == record["linears_expected"] == table["linears"]
    assert record["norm_scales_retired"] == record["norm_scales_expected"] == table["retired"]
    assert record["built_vectors"] == record["expected_vectors"] == table["vectors"]
    assert all(vector["weight_decay_class"] == "input" for vector in record["vectors"])
    assert any("latent attention gets dual" in note for note in record["notes"]) == (strategy == "unified")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("cached latents", r"caches latents for inference \(cache_mla_latents\).*fold the model"),
        ("subclass", "self_attention is a .*Other.*SelfAttention or MLASelfAttention"),
        ("linear", "linear_kv_down_proj is a .*Other"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_was(ranks, case, message):
    [found] = ranks.run("latent_refused", case=case)
    assert re.search(message, found["error"]), found["error"]
    assert found["unchanged"]


def test_a_trained_scale_is_carried_to_every_linear_that_the_norm_feeds(ranks):
    for strategy in ("iwd", "hg", "or", "unified"):
        [found] = ranks.run("convert_trained", kind="mla", config={"strategy": strategy})
        assert found["difference"] < 1e-14, strategy


@pytest.fixture(scope="module")
def deepseek(ranks, tmp_path_factory):
    """Twenty iterations of a small DeepSeek in a layout, once; ``load``: from another layout's tenth."""
    runs = {}
    folders = {}

    def run(layout, load=None):
        if (layout, load) not in runs:
            world_size, arguments = LAYOUTS_OF_RUNS[layout]
            argv = ["--train-iters", "20", "--scalevec-strategy", "unified", *arguments]
            if load is None:
                folders[layout] = str(tmp_path_factory.mktemp(layout))
                argv += ["--save", folders[layout], "--save-interval", "10"]
            else:
                argv += ["--load", folders[load], "--ckpt-step", "10"]
            argv = tiny_gpt("deepseek", *argv)
            runs[layout, load] = ranks.run("train", world_size, argv=argv, by_name=load is None)[-1]
        return runs[layout, load]

    return run


@pytest.mark.needs_training
@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_twenty_iterations_of_the_training_loop(deepseek, layout):
    """Latent attention and multi-token prediction under the paper's strategy."""
    serial, run = deepseek("serial"), deepseek(layout)
    assert len(run["losses"]) == 20 and run["losses"][-1] < run["losses"][0]
    np.testing.assert_allclose(run["losses"], serial["losses"], rtol=1e-5)
    np.testing.assert_allclose(run["grad_norms"], serial["grad_norms"], rtol=1e-5)
    # Four layers and the one of multi-token prediction.
    assert run["audit"]["linears_converted"] == 5 * 5
    assert run["audit"]["built_vectors"]["latent k_up out alpha"] == 5
    assert run["audit"]["built_vectors"]["mtp enorm in alpha"] == 1
    assert run["audit"]["vectors"] == serial["audit"]["vectors"]


@pytest.mark.needs_training
def test_resume_at_another_layout(deepseek):
    """Saved by two tensor-parallel ranks, continued by two pipeline stages."""
    whole = deepseek("tp2")
    resumed = deepseek("pp2", load="tp2")
    np.testing.assert_allclose(resumed["losses"], whole["losses"][10:], rtol=1e-5)


@pytest.mark.needs_training
@pytest.mark.parametrize("flag", ["--cache-mla-latents", "--scalevec-decay-v-norm=output"])
def test_refusals_come_before_the_model_is_built(ranks, flag):
    with pytest.raises(RankFailure) as caught:
        ranks.run("train", argv=tiny_gpt("deepseek", flag, "--scalevec-strategy", "unified"))
    assert "or drop --scalevec-strategy." in str(caught.value)
    assert "building GPT" not in str(caught.value)
