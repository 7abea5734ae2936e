"""Hybrid models, heterogeneous layers, and kinds of models without vectors."""

import itertools
import re

import numpy as np
import pytest
from ranks.arguments import EXPERT_LAYOUTS, tiny_gpt
from ranks.arguments import LAYOUTS as LAYOUTS_OF_RUNS
from ranks.pool import RankFailure
from runs import logits_tolerance, round_trips, worst_gradient

# Hybrid models are there from 0.18 on, which the light environment is older than.
pytestmark = pytest.mark.needs_training

FORMS = [
    {"strategy": "hg", "placement": placement, "reparam": reparam, "branches": branches}
    for placement, reparam, branches in itertools.product(
        ["input", "output", "dual"], ["none", "product", "unit"], ["split", "shared"]
    )
    if (placement, branches) != ("output", "shared")
]


def test_mamba_layers_equal_their_definition(ranks):
    """Values and all gradients in float64, in every form."""
    forms = [*FORMS, {"strategy": "none"}, {"strategy": "dp", "branches_off": ("B", "dt")}]
    for form, found in zip(forms, ranks.run("mamba_by_definition", configs=forms)[0], strict=True):
        assert found["start"] < 1e-15, form
        assert found["logits"] < 1e-10, form
        assert found["gradient"] < 1e-10, form


def test_gated_delta_nets_equal_their_definition(ranks):
    """Values and all gradients in every form; Megatron's delta rule computes in float32."""
    forms = [*FORMS, {"strategy": "none"}, {"strategy": "dp", "branches_off": ("delta_z", "delta_b")}]
    for form, found in zip(forms, ranks.run("delta_by_definition", configs=forms)[0], strict=True):
        assert found["start"] < 1e-6, form
        assert found["logits"] < 1e-5 and found["gradient"] < 1e-4, (form, found)


LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2-sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["hybrid", "delta", "latent hybrid", "heterogeneous"])
def test_gradients_are_the_serial_ones(ranks, kind, layout):
    for strategy in ("unified", "iwd"):
        config = {"strategy": strategy}
        [serial] = ranks.run("gradients", config=config, kind=kind)
        for result in ranks.run("gradients", 2, config=config, kind=kind, **LAYOUTS[layout]):
            np.testing.assert_allclose(result["loss"], serial["loss"], rtol=1e-12)
            assert result["gradients"].keys() == serial["gradients"].keys()
            for name, gradient in result["gradients"].items():
                np.testing.assert_allclose(
                    gradient, serial["gradients"][name], rtol=1e-8, atol=1e-12, err_msg=name
                )


@pytest.mark.parametrize("kind", ["hybrid with experts", "qwen3-next"])
def test_gradients_of_experts_in_a_hybrid(ranks, kind):
    """With sequence parallelism: without it, Megatron trains no experts on several tensor-parallel ranks."""
    for strategy in ("unified", "iwd"):
        given = {"config": {"strategy": strategy}, "kind": kind}
        [serial] = ranks.run("gradients", **given)
        assert strategy == "iwd" or any("experts.local_experts.3." in name for name in serial["gradients"])
        for result in ranks.run("gradients", 2, **given, **LAYOUTS["tp2-sp"]):
            assert result["gradients"].keys() == serial["gradients"].keys()
            for name, gradient in result["gradients"].items():
                # The router's softmax is Megatron's, in float32.
                limit = 1e-6 * abs(serial["gradients"][name]).max() + 1e-9
                np.testing.assert_allclose(
                    gradient, serial["gradients"][name], rtol=0, atol=limit, err_msg=name
                )


@pytest.mark.parametrize("sabotage", ["tensor-parallel-sum", "mamba-row-map"])
def test_the_comparison_sees_what_is_broken(ranks, sabotage):
    config = {"strategy": "dp", "sites": ("mamba",)}
    [serial] = ranks.run("gradients", config=config, kind="hybrid")
    for result in ranks.run(
        "gradients", 2, config=config, kind="hybrid", sabotage=sabotage, tensor_model_parallel_size=2
    ):
        assert worst_gradient(result, serial) > 1e-3


# M*-M-: two Mamba layers of two linears, one attention layer, two MLP layers.
HYBRID = {
    "linears": 2 * 2 + 1 + 2,
    "retired": 2 * 2 + 1 + 2,
    "vectors": {
        **{f"mamba {b} {side}": 2 for b in ("z", "x", "B", "C", "dt", "out") for side in ("in", "out")},
        **{f"attention {b} {side}": 1 for b in ("q", "k", "v") for side in ("in", "out")},
        **{f"mlp {b} {side}": 2 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}
# G-*-: one gated delta net, one attention layer, two MLP layers.
DELTA = {
    "linears": 1 + 1 + 2,
    "retired": 2 + 1 + 2,
    "vectors": {
        **{f"delta delta_{b} {side}": 1 for b in ("q", "k", "v", "z", "b", "a") for side in ("in", "out")},
        "delta delta_out in": 1,
        **{f"attention {b} {side}": 1 for b in ("q", "k", "v") for side in ("in", "out")},
        **{f"mlp {b} {side}": 2 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}
# M+-: latent attention has two down- and two up-projections, behind three norms.
LATENT = {
    "linears": 2 + 4 + 1,
    "retired": 2 + 3 + 1,
    "vectors": {
        **{f"mamba {b} {side}": 1 for b in ("z", "x", "B", "C", "dt", "out") for side in ("in", "out")},
        **{f"attention {b} {side}": 1 for b in ("q_down", "kv_down", "k_rope") for side in ("in", "out")},
        **{f"latent {b} {side}": 1 for b in ("q_up", "k_up", "v_up") for side in ("in", "out")},
        **{f"mlp {b} {side}": 1 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}
# The same without --qk-layernorm.
BARE_LATENT = {
    "linears": LATENT["linears"] - 2,
    "retired": LATENT["retired"] - 2,
    "vectors": {name: number for name, number in LATENT["vectors"].items() if not name.startswith("latent")},
}
# M*E: a Mamba layer, an attention layer, and the router and 4 experts.
EXPERTS = {
    "linears": 2 + 1 + (1 + 4),
    "retired": 2 + 1 + 1,
    "vectors": {
        **{f"mamba {b} {side}": 1 for b in ("z", "x", "B", "C", "dt", "out") for side in ("in", "out")},
        **{f"attention {b} {side}": 1 for b in ("q", "k", "v") for side in ("in", "out")},
        **{f"mlp router {side}": 1 for side in ("in", "out")},
        **{f"mlp expert_{b} {side}": 4 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}
# GE*E, as Qwen3-Next: a gated delta net, attention with an output gate, and twice the router, 4 experts, a
# shared one and its gate.
QWEN3_NEXT = {
    "linears": 1 + 1 + 2 * (1 + 4 + 1 + 1),
    "retired": 2 + 1 + 2,
    "vectors": {
        **{f"delta delta_{b} {side}": 1 for b in ("q", "k", "v", "z", "b", "a") for side in ("in", "out")},
        "delta delta_out in": 1,
        **{f"attention {b} {side}": 1 for b in ("q", "output_gate", "k", "v") for side in ("in", "out")},
        **{f"mlp {b} {side}": 2 for b in ("router", "shared_gate", "shared_up") for side in ("in", "out")},
        **{f"mlp shared_expert_gate {side}": 2 for side in ("in", "out")},
        **{f"mlp expert_{b} {side}": 2 * 4 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}
# Two layers with attention, two with an MLP.
HETEROGENEOUS = {
    "linears": 2 + 2,
    "retired": 2 + 2,
    "vectors": {
        **{f"attention {b} {side}": 2 for b in ("q", "k", "v") for side in ("in", "out")},
        **{f"mlp {b} {side}": 2 for b in ("gate", "up") for side in ("in", "out")},
        "head logits in": 1,
    },
}


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("hybrid", HYBRID),
        ("delta", DELTA),
        ("latent hybrid", LATENT),
        ("latent hybrid, bare", BARE_LATENT),
        ("hybrid with experts", EXPERTS),
        ("qwen3-next", QWEN3_NEXT),
        ("heterogeneous", HETEROGENEOUS),
    ],
)
def test_the_audit_counts_what_the_table_says(ranks, kind, table):
    [record] = ranks.run("audit_record", config={"strategy": "dp"}, kind=kind)
    assert record["linears_converted"] == record["linears_expected"] == table["linears"]
    assert record["norm_scales_retired"] == record["norm_scales_expected"] == table["retired"]
    assert record["built_vectors"] == record["expected_vectors"] == table["vectors"]


def test_what_is_no_scale_in_a_mamba_layer_stays_as_megatron_has_it(ranks):
    [record] = ranks.run("audit_record", config={"strategy": "dp"}, kind="hybrid")
    stock = {name for name, role in record["roles"].items() if role == "stock"}
    assert {name.split("mixer.")[1] for name in stock} in (
        {"conv1d_bias", "dt_bias", "A_log", "D"},
        {"conv1d.bias", "dt_bias", "A_log", "D"},
    )
    assert len(stock) == 2 * 4


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("replaced", r"layers\.3\.self_attention is a .*ColumnParallelLinearGathered"),
        ("mixer", r"layers\.0\.mixer is a .*Other.*MambaMixer"),
        ("ungated", "a mixer with its gated norm"),
        ("zero-centered", "which its gated norm does not"),
        ("attention", r"layers\.1\.self_attention is a .*Other"),
        ("sparse", "has layers of kind D"),
        ("cross-attention", r"layers\.1\.cross_attention is a .*Linear, where .* on no cross-attention only"),
    ],
)
def test_what_cannot_be_converted_is_left_as_it_was(ranks, case, message):
    [found] = ranks.run("mixed_refused", case=case)
    assert re.search(message, found["error"]), found["error"]
    assert found["unchanged"]


@pytest.mark.parametrize("kind", ["T5Model", "BertModel"])
def test_models_of_other_kinds_are_stopped(ranks, kind):
    """They are not trained as stock models in silence."""
    [said] = ranks.run("other_model", kind=kind, by="call")
    assert f"asked for on a {kind}" in said and "GPTModel and on hybrid models of megatron-core 0.18" in said
    [said] = ranks.run("other_model", kind=kind, by="flag")
    assert f"a {kind} was built" in said and "stopped before training" in said


PATTERNS = {"serial": "M*-G-*", "tp2-sp": "M*-G-*", "pp2": "M*-|G-*"}


@pytest.fixture(scope="module")
def hybrid(ranks, tmp_path_factory):
    """Twenty iterations of a small hybrid in a layout, once; ``load``: from another layout's tenth."""
    runs = {}
    folders = {}

    def run(layout, load=None):
        if (layout, load) not in runs:
            world_size, arguments = LAYOUTS_OF_RUNS[layout]
            argv = ["--train-iters", "20", "--scalevec-strategy", "unified", *arguments]
            argv += ["--hybrid-layer-pattern", PATTERNS[layout]]
            if load is None:
                folders[layout] = str(tmp_path_factory.mktemp(layout))
                argv += ["--save", folders[layout], "--save-interval", "10"]
            else:
                argv += ["--load", folders[load], "--ckpt-step", "10"]
            more = {"script": "pretrain_hybrid.py", "by_name": load is None}
            runs[layout, load] = ranks.run("train", world_size, argv=tiny_gpt("hybrid", *argv), **more)[-1]
        return runs[layout, load]

    return run


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2"])
def test_twenty_iterations_of_the_training_loop(hybrid, layout):
    serial, run = hybrid("serial"), hybrid(layout)
    assert len(run["losses"]) == 20 and run["losses"][-1] < run["losses"][0]
    np.testing.assert_allclose(run["losses"], serial["losses"], rtol=1e-5)
    np.testing.assert_allclose(run["grad_norms"], serial["grad_norms"], rtol=1e-5)
    assert run["audit"]["linears_converted"] == 2 + 1 + 2 + 2
    assert run["audit"]["vectors"] == serial["audit"]["vectors"]


def test_explain_says_what_the_run_finds(ranks, hybrid):
    """The audit of the run to the last entry, from its launch line."""
    argv = tiny_gpt("hybrid", "--scalevec-strategy", "unified", *LAYOUTS_OF_RUNS["pp2"][1])
    argv += ["--train-iters", "20", "--hybrid-layer-pattern", PATTERNS["pp2"]]
    spec = ["--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"]
    [found] = ranks.run("explain_line", arguments=["pretrain_hybrid.py", *argv, *spec], of=2)
    assert found["error"] is None and found["problems"] == []
    assert found["whole_model"] == hybrid("pp2")["audit"]
    assert found["place"]["layers"] == "1-3"
    assert any("-> megatron_scalevec.cpu.hybrid_stack stack" in note for note in found["notes"])


@pytest.mark.parametrize("norms", [True, False])
def test_explain_knows_whether_latents_have_norms(ranks, norms):
    """--qk-layernorm means them in a hybrid as well."""
    words = "--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --v-head-dim 4"
    words += " --qk-pos-emb-head-dim 6 --rope-type rope --hybrid-layer-pattern M+-"
    queries = tiny_gpt("hybrid").index("--group-query-attention")
    argv = tiny_gpt("hybrid", "--scalevec-strategy", "hg", *words.split(), *["--qk-layernorm"] * norms)
    del argv[queries : queries + 3]
    [found] = ranks.run("explain_line", arguments=["pretrain_hybrid.py", *argv])
    assert found["error"] is None and found["problems"] == []
    assert ("latent q_up in" in found["whole_model"]["built_vectors"]) == norms


def test_resume_at_another_layout(hybrid):
    whole, resumed = hybrid("tp2-sp"), hybrid("pp2", load="tp2-sp")
    np.testing.assert_allclose(resumed["losses"], whole["losses"][10:], rtol=1e-5)


def test_forgotten_mamba_layers_stop_the_run(ranks):
    argv = tiny_gpt("hybrid", "--hybrid-layer-pattern", PATTERNS["serial"], "--scalevec-strategy", "unified")
    with pytest.raises(RankFailure, match="linears with scale vectors: 5 built, 7 expected"):
        ranks.run("train", argv=argv, script="pretrain_hybrid.py", sabotage="mamba-forgotten")


# Name to kind of model, strategy, and the rest of a case, as in test_fold_checkpoint.py.
CONVERTED = {
    "mamba": ("hybrid", {"strategy": "unified-foldable"}, {}),
    "mamba, iwd": ("hybrid", {"strategy": "iwd"}, {}),
    "mamba, branches off": (
        "hybrid",
        {"strategy": "post-qkv", "sites": "mamba", "branches_off": "B,dt"},
        {"fresh": True},
    ),
    "delta": ("delta", {"strategy": "unified-foldable"}, {}),
    "latent": ("latent hybrid", {"strategy": "dp"}, {}),
    "experts, bf16": ("hybrid with experts", {"strategy": "hg", "experts": "shared"}, {"dtype": "bfloat16"}),
    "heterogeneous": ("heterogeneous", {"strategy": "unified-foldable"}, {}),
}


@pytest.fixture(scope="module")
def converted(ranks, tmp_path_factory):
    """Every case once with and once without training in between."""
    return round_trips(ranks, tmp_path_factory.mktemp("round-trips"), CONVERTED)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_stock_model_unfolds_and_comes_back(converted, name):
    """Unfolded, every parameter is what conversion makes of the stock model; folded, every bit is back."""
    result = converted[name, False]
    assert result["initial"] == [] and result["dtypes"] == [] and result["changed"] == []
    assert result["args"] and max(result["unfolded"], result["folded"]) < logits_tolerance(name)


@pytest.mark.parametrize("name", CONVERTED)
def test_a_trained_model_folds_to_the_same_function(converted, name):
    result = converted[name, True]
    assert max(result["folded"], result["product"]) < logits_tolerance(name) and result["other"] > 2e-2


def test_conversions_that_would_lose_something_are_refused(ranks, tmp_path):
    off = {"strategy": "unified", "branches_off": "v"}
    cases = [
        {"kind": "hybrid", "config": {"strategy": "unified"}},
        {"kind": "hybrid", "config": off, "fresh": True},
        {"kind": "hybrid", "config": {"strategy": "dp", "branches_off": "B"}},
    ]
    [results] = ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    said = (
        r"normalizes its values .* Train with --scalevec-placement dual to have",
        r"normalizes q and k .*, and the attention layers of Megatron's hybrid models do not",
        r"decoder\.layers\.0\.norm\.weight holds a trained scale.* leaves no place for on B",
    )
    for result, sentence in zip(results, said, strict=True):
        assert re.search(sentence, result["error"]), result["error"]


def test_models_fold_in_place(ranks):
    cases = [
        {"kind": kind, "config": {"strategy": "unified-foldable"}} for kind in ("delta", "latent hybrid")
    ]
    [results] = ranks.run("fold_in_process", cases=cases)
    for result in results:
        assert result["difference"] < 1e-5
        assert result["classes"] == [] and result["names"] == [] and result["frozen"] == []


def run_next(ranks, layout, *more, **options):
    """A run of the model like Qwen3-Next, in a layout of experts."""
    world_size, arguments = EXPERT_LAYOUTS[layout]
    reshardable = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    argv = tiny_gpt("qwen3-next", *arguments, *reshardable, *more)
    return ranks.run("train", world_size, argv=argv, script="pretrain_hybrid.py", **options)[-1]


def test_experts_in_a_hybrid_resume_in_another_layout(ranks, tmp_path):
    """Twenty iterations, and the last ten of them again from the checkpoint, which does not fold: Megatron
    has no place for the v norm of its attention layer."""
    flags = ["--scalevec-strategy", "unified", "--train-iters", "20"]
    whole = run_next(ranks, "ep2", *flags, "--save", str(tmp_path), "--save-interval", "10")
    assert len(whole["losses"]) == 20 and whole["losses"][-1] < whole["losses"][0]
    # G 1, each E router, 4 experts, shared expert and its gate, * 1, M 2.
    assert whole["audit"]["linears_converted"] == 1 + 2 * (1 + 4 + 1 + 1) + 1 + 2
    load = ["--load", str(tmp_path), "--ckpt-step", "10"]
    resumed = run_next(ranks, "tp2-sp-etp1", *flags, *load, by_name=False)
    np.testing.assert_allclose(resumed["losses"], whole["losses"][10:], rtol=1e-5)
    np.testing.assert_allclose(resumed["grad_norms"], whole["grad_norms"][10:], rtol=1e-4)
    with pytest.raises(RankFailure, match="normalizes its values"):
        ranks.run("scalevec", arguments=["fold", str(tmp_path), str(tmp_path / "out")])


def test_a_hybrid_goes_on_in_stock_megatron(ranks, tmp_path):
    """With the optimizer's averages: stock, to a strategy, and back."""
    flags = ["--scalevec-strategy", "unified-foldable", "--save", str(tmp_path), "--save-interval", "5"]
    whole = run_next(ranks, "ep2", *flags)
    out, again = tmp_path / "out", tmp_path / "again"
    ranks.run("scalevec", arguments=["fold", str(tmp_path), str(out), "--ckpt-step", "5"])
    stock = run_next(ranks, "ep2", "--load", str(out), plugin=False, by_name=False)
    assert stock["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)
    np.testing.assert_allclose(stock["losses"], whole["losses"][5:], rtol=0.05)
    ranks.run("scalevec", arguments=["unfold", str(out), str(again), "--strategy", "unified-foldable"])
    load = ["--load", str(again), "--use-checkpoint-args"]
    unfolded = run_next(ranks, "tp2-sp-etp1", *load, by_name=False)
    assert unfolded["losses"][0] == pytest.approx(whole["losses"][5], rel=1e-6)
    np.testing.assert_allclose(unfolded["losses"], whole["losses"][5:], rtol=0.05)


@pytest.mark.parametrize("kind", ["hybrid", "delta", "latent hybrid"])
def test_a_trained_stock_model_is_taken_over(ranks, kind):
    """As --finetune does, on two ranks, where Mamba's gated norm holds a rank's own channels."""
    configs = [{"strategy": strategy} for strategy in ("unified-foldable", "iwd")]
    for differences in ranks.run(
        "start_from_stock", 2, configs=configs, kind=kind, tensor_model_parallel_size=2
    ):
        assert max(differences) < 1e-6
