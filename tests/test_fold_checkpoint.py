"""The way in and the way back, on tensors alone, against models built by megatron.core."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ranks.arguments import tiny_gpt
from runs import logits_tolerance, round_trips

from megatron_scalevec import ScaleVecError
from megatron_scalevec.checkpoint import commands, store, verify

ZERO_CENTERED = {"layernorm_zero_centered_gamma": True}
GATE = {"attention_output_gate": True}
BARE = {"q_lora_rank": None, "qk_layernorm": False}  # latent attention whose latents have no norms

# Name to kind of model, strategy, and the rest of a case.
SAME_FUNCTION = {
    "hg": ("llama", {"strategy": "hg"}, {}),
    "dp": ("llama", {"strategy": "dp"}, {}),
    "or": ("llama", {"strategy": "or"}, {}),
    "iwd": ("llama", {"strategy": "iwd"}, {}),
    "unified-foldable": ("llama", {"strategy": "unified-foldable"}, {}),
    "unit": ("llama", {"strategy": "unified-foldable", "reparam": "unit"}, {}),
    "sites": ("llama", {"strategy": "dp", "sites": "mlp,projections"}, {}),
    "one group": ("one-group", {"strategy": "dp"}, {}),
    "q/k norms kept": ("qk-norm", {"strategy": "unified", "branches_off": "v", "sites": "attention"}, {}),
    "layernorm": ("gpt2", {"strategy": "unified-foldable"}, {}),
    "layernorm, projections": ("gpt2", {"strategy": "dp", "sites": "attention,mlp,projections"}, {}),
    "mtp": ("llama", {"strategy": "unified-foldable"}, {"overrides": {"mtp_num_layers": 1}}),
    "zero-centered": ("llama", {"strategy": "dp"}, {"overrides": ZERO_CENTERED}),
    "zero-centered iwd": ("gpt2", {"strategy": "iwd"}, {"overrides": ZERO_CENTERED}),
    "output gate": ("llama", {"strategy": "dp"}, {"overrides": GATE}),
    "latent": ("mla", {"strategy": "unified"}, {}),
    "latent, iwd": ("mla", {"strategy": "iwd"}, {}),
    "latent, no latent of queries, unit": ("mla", {"strategy": "dp", "reparam": "unit"}, {"overrides": BARE}),
    "latent, zero-centered": ("mla", {"strategy": "or"}, {"overrides": ZERO_CENTERED}),
    "latent, experts, mtp": ("deepseek", {"strategy": "unified"}, {"overrides": {"mtp_num_layers": 1}}),
    "bf16": ("llama", {"strategy": "unified-foldable"}, {"dtype": "bfloat16"}),
    "bf16, fp32 vectors": ("llama", {"strategy": "hg", "vector_dtype": "fp32"}, {"dtype": "bfloat16"}),
}
# Divided and multiplied again, or one subtracted and added: the last bit may differ.
ROUNDED = {
    *("unit", "layernorm", "layernorm, projections", "zero-centered", "zero-centered iwd"),
    *("latent, no latent of queries, unit", "latent, zero-centered"),
}
NOT_KEPT = {"q/k norms kept"}  # v and the MLP would lose a trained scale


@pytest.fixture(scope="module")
def found(ranks, tmp_path_factory):
    """Every case once with and once without training in between."""
    return round_trips(ranks, tmp_path_factory.mktemp("round-trips"), SAME_FUNCTION)


@pytest.mark.parametrize("name", [name for name in SAME_FUNCTION if name not in NOT_KEPT])
def test_unfolded_is_what_conversion_makes_of_the_stock_model(found, name):
    """Every parameter, bit by bit: each lands where it belongs, none is left at its initial value."""
    result = found[name, False]
    assert result["initial"] == [] and result["dtypes"] == []
    assert result["unfolded"] < logits_tolerance(name)


@pytest.mark.parametrize("name", [name for name in SAME_FUNCTION if name not in NOT_KEPT])
def test_unfold_then_fold_is_the_identity(found, name):
    result = found[name, False]
    assert result["args"] and result["folded"] < logits_tolerance(name)
    if name not in ROUNDED:
        assert result["changed"] == []


@pytest.mark.parametrize("name", [name for name in SAME_FUNCTION if name not in NOT_KEPT])
def test_a_trained_model_folds_to_the_same_function(found, name):
    result = found[name, True]
    assert result["folded"] < logits_tolerance(name)
    assert result["product"] < logits_tolerance(name) and result["other"] > 2e-2


def test_a_scale_without_a_place_is_refused(found):
    message = found["q/k norms kept", False]["error"]
    assert "holds a trained scale" in message and "leaves no place for on v" in message


def test_models_that_stock_cannot_express_are_refused(ranks, tmp_path):
    cases = [
        {"kind": "llama", "config": {"strategy": "unified"}},
        {"kind": "qk-norm", "config": {"strategy": "dnp"}},
        {"kind": "llama", "config": {"strategy": "none"}},
        {"kind": "llama", "config": {"strategy": "post-qkv"}},
        {"kind": "llama", "config": {"strategy": "hg", "sites": "mtp"}},
    ]
    [results] = ranks.run("round_trips", folder=str(tmp_path), cases=cases)
    for result, words in zip(
        results,
        (
            "stock Megatron has no place for that: without the norm",
            "stock Megatron has no place for that: without the norm",
            "would drop|leaves no place",
            "leaves no place for on",
            "nothing at the sites mtp",
        ),
    ):
        assert any(word in result["error"] for word in words.split("|")), result["error"]
    assert results[0]["initial"] == [] and results[1]["initial"] == []


TURNS = {"moe_mlp_glu_interleave_size": 4, "moe_grouped_gemm": True, "swiglu": True}


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"moe_single_grouped_weight": True}, "experts in one tensor"),
        ({"use_grouped_gemm_for_shared_expert": True}, "shared experts in a grouped kernel"),
        ({**TURNS, "expert_tensor_parallel_size": 2}, "gate and up rows that take turns"),
        ({**TURNS, "tensor_model_parallel_size": 2}, "gate and up rows that take turns"),
        ({"hybrid_layer_pattern": "MD|*-"}, "hybrid layers of kind D"),
        ({"is_hybrid_model": True}, "hybrid layers of kind unknown"),
        ({"hybrid_layer_pattern": "M*-/*-"}, "multi-token prediction in a hybrid model"),
        ({"hybrid_layer_pattern": "M*", "apply_layernorm_1p": True}, "Mamba layers in a model that stores γ"),
        ({"experimental_attention_variant": "dsa"}, "experimental attention"),
        ({"use_legacy_models": True}, "a legacy model"),
    ],
)
def test_models_of_other_kinds_are_refused(arguments, kind):
    """Rather than a part of their linears left out."""
    with pytest.raises(ScaleVecError, match=rf"holds {kind}.*, which cannot be folded or unfolded yet"):
        commands.refuse_kinds(SimpleNamespace(**arguments))
    commands.refuse_kinds(SimpleNamespace(num_experts=8, hybrid_layer_pattern="M*-|GE+"))
    one_by_one = {**TURNS, "moe_grouped_gemm": False, "expert_tensor_parallel_size": 2}
    for served in (TURNS, one_by_one, {"moe_latent_size": 8}):
        commands.refuse_kinds(SimpleNamespace(**served))


def test_a_model_folds_in_place(ranks):
    cases = [
        {"kind": "llama", "config": {"strategy": "unified-foldable"}, "overrides": {"mtp_num_layers": 1}},
        {"kind": "gpt2", "config": {"strategy": "dp", "reparam": "unit", "sites": "attention,mlp,head"}},
        {"kind": "llama", "config": {"strategy": "hg"}, "dtype": "bfloat16"},
        {"kind": "llama", "config": {"strategy": "or"}, "overrides": ZERO_CENTERED},
        {"kind": "llama", "config": {"strategy": "unified-foldable", "execution": "optimizer"}},
        {"kind": "mla", "config": {"strategy": "dp", "reparam": "unit"}},
        {"kind": "mla", "config": {"strategy": "or"}},
        {"kind": "qk-norm", "config": {"strategy": "unified"}},
    ]
    [results] = ranks.run("fold_in_process", cases=cases)
    for case, result in zip(cases, results):
        assert result["difference"] < (2e-2 if "dtype" in case else 1e-5), case
        assert "there is nothing to fold" in result["stock"]
        assert "from under the optimizer" in result["training"]
    for result in results[:-1]:
        assert result["classes"] == [] and result["names"] == [] and result["frozen"] == []
    # The v norm has no counterpart in Megatron; with it stay its class, and the guard of checkpoints.
    assert "ScaleVecSelfAttention" in results[-1]["classes"]
    assert all(".v_layernorm." in name for name in results[-1]["names"])


def test_memory_is_bounded_by_the_largest_chunk(ranks, tmp_path):
    """Twelve layers of 36 MiB, so that a tensor more shows beside torch's own needs."""
    [found] = ranks.run("measure_memory", folder=str(tmp_path), layers=12, rows=4608, columns=2048)
    chunk = 36 << 20
    for step, used in found.items():
        tensors = verify.PEAK_TENSORS if step == "compare" else store.PEAK_TENSORS
        assert 0 < used < tensors * chunk + store.PEAK_BYTES < 12 * chunk, (step, used)


@pytest.mark.needs_training
def test_the_command_checks_its_result(ranks, tmp_path):
    """As installed, with the comparison of logits in a process of its own; and a result that is wrong."""
    argv = tiny_gpt("llama", "--save", str(tmp_path / "stock"), "--save-interval", "10")
    ranks.run("train", argv=argv)
    command = Path(sys.executable).parent / "scalevec"
    source, out = tmp_path / "stock", tmp_path / "out"

    def scalevec(*arguments):
        return subprocess.run(
            [str(command), *map(str, arguments)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )

    run = scalevec("unfold", source, out, "--strategy", "unified-foldable")
    assert run.returncode == 0, run.stderr
    assert "checked: logits on random tokens differ by" in run.stdout
    assert "weights keep their averages" in run.stdout
    again = scalevec("unfold", source, out, "--strategy", "hg")
    assert again.returncode == 2 and "exists already" in again.stderr and "Traceback" not in again.stderr
    back = scalevec("fold", out, tmp_path / "back")
    assert back.returncode == 0, back.stderr
    assert "checked: logits on random tokens differ by" in back.stdout
    for factor, difference in ((1.1, "differ by 1.0e-01"), (float("nan"), "differ by nan")):
        folder = str(tmp_path / f"wrong {factor}")
        [found] = ranks.run("verify_wrong", source=str(source), folder=folder, factor=factor)
        assert "would not compute what" in found["error"] and difference in found["error"], found
        assert found["left"] == []
