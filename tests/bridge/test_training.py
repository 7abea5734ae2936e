"""Bridge's own training loop: what a recipe's YAML asks for is what is trained, saved and resumed."""

import json
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parents[2] / "docs" / "nemo.md"
SETTING = """
optimizer_config_override_provider:
  _target_: megatron.scalevec.Setting
  build_config_overrides: {}
"""
UNIFIED = SETTING.format("unified")
KINDS = {"llama": 4, "qwen3": 4, "qwen3_moe": 2 + 2 * (1 + 4)}
"""Small models, and their linears with scale vectors: in two layers, with a router and four experts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(bridge_ranks, folder):
    """From values by name: twenty steps of unified with checkpoints at ten and twenty, five of stock."""
    found = {}
    for kind in KINDS:
        for strategy in ("stock", "unified"):
            [found[kind, strategy]] = bridge_ranks.run(
                "pretrain",
                kind=kind,
                folder=str(folder / f"{kind}-{strategy}"),
                yaml=UNIFIED if strategy == "unified" else None,
                iterations=20 if strategy == "unified" else 5,
                checkpoint={"save_interval": 10},
                by_name=True,
            )
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_yaml_alone_brings_the_strategy(runs, kind):
    run = runs[kind, "unified"]
    assert run["error"] is None and len(run["losses"]) == 20
    assert run["losses"][-1] < run["losses"][0]
    audit = json.loads(run["audit"])
    assert (audit["strategy"], audit["linears_converted"]) == ("unified", KINDS[kind])
    assert audit["expected_vectors"] == audit["built_vectors"]
    decays = run["decays"]
    assert decays["decoder.layers.0.self_attention.linear_qkv.gamma_in_q_alpha"] == 1
    assert decays["decoder.layers.0.self_attention.q_layernorm.gamma_alpha"] == 0
    ups = [name for name in decays if ".layers.1.mlp." in name and "gamma_out_" in name and "up_" in name]
    assert len(ups) == 2 * (4 if kind == "qwen3_moe" else 1)
    assert {decays[name] for name in ups} == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_stock_stays_stock(runs, kind):
    run = runs[kind, "stock"]
    assert run["error"] is None and run["audit"] is None
    assert not [name for name in run["vectors"] if "gamma" in name]
    one_dimensional = {name for name in run["vectors"]}
    assert {run["decays"][name] for name in one_dimensional} == {0.0}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_goes_on_as_the_one_that_never_stopped(bridge_ranks, runs, folder, kind):
    whole = folder / f"{kind}-unified"
    half = folder / f"{kind}-resumed"
    half.mkdir()
    (half / "iter_0000010").symlink_to(whole / "iter_0000010")
    (half / "latest_train_state.pt").write_bytes((whole / "iter_0000010" / "train_state.pt").read_bytes())
    [run] = bridge_ranks.run(
        "pretrain", kind=kind, folder=str(half), yaml=UNIFIED, iterations=20, load=str(half)
    )
    assert run["error"] is None
    assert run["losses"] == pytest.approx(runs[kind, "unified"]["losses"][10:], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_losses_as_through_the_flag(bridge_ranks, runs, kind):
    """One set of initial values, the same mock data: Bridge's loop and Megatron's, to the last bit."""
    [by_flag] = bridge_ranks.run("pretrain_with_megatron", kind=kind, strategy="unified", iterations=20)
    by_yaml = runs[kind, "unified"]
    assert len(by_yaml["losses"]) == 20
    assert by_yaml["losses"] == by_flag["losses"]
    assert by_yaml["norms"] == by_flag["grad_norms"]


def test_python_and_yaml_are_the_same(bridge_ranks, runs, folder):
    [run] = bridge_ranks.run(
        "pretrain",
        kind="llama",
        folder=str(folder / "applied"),
        iterations=5,
        apply={"strategy": "unified"},
        by_name=True,
    )
    assert run["losses"] == runs["llama", "unified"]["losses"][:5]


SHARDED = "ddp: {use_distributed_optimizer: true}\noptimizer: {use_distributed_optimizer: true}\n"


@pytest.mark.parametrize(
    ("kind", "model", "more"),
    [
        ("llama", {"tensor_model_parallel_size": 2, "sequence_parallel": True}, ""),
        ("qwen3_moe", {"expert_model_parallel_size": 2}, SHARDED),
    ],
    ids=["tensor parallel", "data and expert parallel"],
)
def test_two_ranks_train_as_one(bridge_ranks, runs, tmp_path, kind, model, more):
    ranks = bridge_ranks.run(
        "pretrain",
        2,
        kind=kind,
        folder=str(tmp_path),
        yaml=UNIFIED + more,
        iterations=5,
        model=model,
        by_name=True,
    )
    assert [run["error"] for run in ranks] == [None, None]
    assert json.loads(ranks[0]["audit"])["linears_converted"] == KINDS[kind]
    whole = runs[kind, "unified"]
    for run in ranks:
        assert run["losses"] == pytest.approx(whole["losses"][:5], rel=1e-5)
        assert run["norms"] == pytest.approx(whole["norms"][:5], rel=1e-5)


NODE = "+optimizer_config_override_provider"


@pytest.mark.parametrize(
    ("overrides", "reparam"),
    [
        (
            (f"{NODE}._target_=megatron.scalevec.Setting", f"{NODE}.build_config_overrides=unified"),
            "product",
        ),
        (
            (
                NODE + "={_target_:megatron.scalevec.Setting,"
                "build_config_overrides:{strategy:unified,reparam:unit}}",
            ),
            "unit",
        ),
    ],
    ids=["two arguments", "one argument with components"],
)
def test_the_command_line(bridge_ranks, tmp_path, overrides, reparam):
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), overrides=overrides, iterations=1
    )
    assert run["error"] is None
    assert json.loads(run["audit"])["components"]["reparam"] == reparam
    if len(overrides) == 2:  # these two are what docs/nemo.md shows
        assert all(override in DOCS.read_text() for override in overrides)


FAMILIES = {
    "gemma2": ("Gemma2ModelProvider", 4),
    # Two latent attentions of four linears, a dense MLP; router, four experts, the shared one.
    "deepseek": ("MLAModelProvider", 2 * 4 + 1 + 1 + 4 + 1),
    # M*-M-: two Mamba layers of two linears, one attention, two MLPs.
    "nemotron_h": ("HybridModelProvider", 2 * 2 + 1 + 2),
}
"""Classes of their providers, and their linears with scale vectors."""


@pytest.fixture(scope="module")
def families(bridge_ranks, folder):
    """Three steps of each under unified."""
    given = {"yaml": UNIFIED, "iterations": 3}
    return {
        kind: bridge_ranks.run("pretrain", kind=kind, folder=str(folder / kind), **given)[0]
        for kind in FAMILIES
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_other_families_keep_their_provider(families, folder, kind):
    run = families[kind]
    provider, linears = FAMILIES[kind]
    assert run["error"] is None and len(run["losses"]) == 3
    assert run["provider"] == provider
    audit = json.loads(run["audit"])
    assert audit["linears_converted"] == linears
    assert audit["expected_vectors"] == audit["built_vectors"]
    saved = yaml.safe_load((folder / kind / "iter_0000003" / "run_config.yaml").read_text())["model"]
    field = "hybrid_stack_spec" if kind == "nemotron_h" else "transformer_layer_spec"
    assert saved["_target_"].rpartition(".")[2] == provider
    assert saved[field]["_target_"] == "megatron.scalevec.LayerSpec"


def test_a_refusal_names_the_field_to_change(bridge_ranks, tmp_path):
    """As docs/nemo.md says: DeepSeek's recipes start with this field on."""
    field = "moe_shared_expert_overlap"
    given = {"kind": "deepseek", "folder": str(tmp_path), "yaml": UNIFIED, "model": {field: True}}
    [run] = bridge_ranks.run("pretrain", iterations=1, **given)
    assert run["losses"] == [] and run["error"][0] == "ScaleVecError"
    assert f"--{field.replace('_', '-')}" in run["error"][1]
    assert f"`model.{field}: false`" in DOCS.read_text()


def test_a_hybrid_resume_with_another_strategy_stops(bridge_ranks, families, folder, tmp_path):
    [run] = bridge_ranks.run(
        "pretrain",
        kind="nemotron_h",
        folder=str(tmp_path),
        yaml=SETTING.format("hg"),
        iterations=4,
        load=str(folder / "nemotron_h"),
    )
    assert run["losses"] == []
    assert run["error"][0] == "ScaleVecError" and "was trained with unified" in run["error"][1]


def test_a_recipe_with_its_own_spec_of_known_layers_keeps_it(bridge_ranks, tmp_path):
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), yaml=UNIFIED, iterations=1, layer_spec="one spec"
    )
    assert run["error"] is None and json.loads(run["audit"])["linears_converted"] == 4


@pytest.mark.parametrize(
    ("layer_spec", "text"),
    [
        ("without attention", "a layer without self-attention"),
        ("strange linear", "mlp.linear_fc1 is a "),
        ("another strategy", "the layer spec asks for hg"),
    ],
)
def test_a_recipe_with_another_spec_stops(bridge_ranks, tmp_path, layer_spec, text):
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), yaml=UNIFIED, iterations=1, layer_spec=layer_spec
    )
    assert run["losses"] == []
    assert run["error"][0] == "ScaleVecError" and text in run["error"][1]


# Where a run must stop: the YAML, and what its last line says.
STOPS = {
    "a misspelt strategy": (SETTING.format("unifed"), "ScaleVecError", "Did you mean 'unified'?"),
    "an unknown component": (
        SETTING.format("{strategy: unified, placment: dual}"),
        "ScaleVecError",
        "Did you mean 'placement'?",
    ),
    "an unknown key": (UNIFIED + "  strategy: hg\n", "ScaleVecError", "has no key 'strategy'"),
    "no strategy": (
        "optimizer_config_override_provider: {_target_: megatron.scalevec.Setting}",
        "ScaleVecError",
        "give a strategy's name",
    ),
    # Bridge's own error: docs/nemo.md says what it means.
    "a package that Bridge does not allow": (
        UNIFIED.replace("megatron.scalevec", "megatron_scalevec.bridge"),
        "TypeError",
        "'str' object is not callable",
    ),
    "a misspelt class": (UNIFIED.replace("Setting", "Settings"), "TypeError", "object is not callable"),
    "something that is refused": (
        UNIFIED + "model:\n  qk_l2_norm: true\n",
        "ScaleVecError",
        "normalizes q and k already",
    ),
}


@pytest.mark.parametrize("case", STOPS)
def test_a_wrong_setting_stops_the_run(bridge_ranks, tmp_path, case):
    text_of_yaml, kind, text = STOPS[case]
    [run] = bridge_ranks.run("pretrain", kind="llama", folder=str(tmp_path), yaml=text_of_yaml, iterations=1)
    assert run["losses"] == []
    assert run["error"][0] == kind and text in run["error"][1]


# How a run goes on from a checkpoint of unified, and what its last line says. Where the plugin is not in the
# process the error is Bridge's own, and docs/nemo.md shows it.
RESUMES = {
    "another strategy": ({"yaml": SETTING.format("hg")}, "ScaleVecError", "was trained with unified"),
    "no setting": ({}, "CheckpointException", "linear_qkv.weight"),
    "no setting, new optimizer": (
        {"checkpoint": {"load_optim": False}},
        "CheckpointException",
        "linear_qkv.weight",
    ),
    "no package": ({"yaml": UNIFIED, "absent": True}, "TypeError", "'str' object is not callable"),
    "no package, no setting": ({"absent": True}, "CheckpointException", "linear_qkv.weight"),
}


@pytest.mark.parametrize("case", RESUMES)
def test_a_resume_without_the_strategy_stops(bridge_ranks, runs, folder, tmp_path, case):
    given, kind, text = RESUMES[case]
    source = str(folder / "llama-unified")
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), iterations=22, load=source, **given
    )
    assert run["losses"] == []
    assert run["error"][0] == kind and text in run["error"][1], run["error"]
    assert kind in DOCS.read_text() and (kind == "ScaleVecError" or text in DOCS.read_text())


def test_a_run_without_the_package_stops(bridge_ranks, tmp_path):
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), yaml=UNIFIED, iterations=1, absent=True
    )
    assert run["losses"] == []
    assert run["error"] == ("TypeError", "'str' object is not callable")


@pytest.mark.parametrize("stock", [False, True], ids=["load", "export"])
def test_a_checkpoint_is_not_loaded_without_the_package(bridge_ranks, runs, folder, tmp_path, stock):
    checkpoint = str(folder / "llama-unified" / "iter_0000020")
    given = {"kind": "llama", "checkpoint": checkpoint, "folder": str(tmp_path / "hf"), "stock": stock}
    [found] = bridge_ranks.run("exported_checkpoint", absent=True, **given)
    text = "Error locating target 'megatron.scalevec.LayerSpec'"
    assert found["error"][0] == "InstantiationException" and text in found["error"][1]
    assert f"InstantiationException: {text}" in DOCS.read_text()


def test_stock_weights_of_another_run_are_refused(bridge_ranks, runs, folder, tmp_path):
    stock = str(folder / "llama-stock" / "iter_0000005")
    [run] = bridge_ranks.run(
        "pretrain",
        kind="llama",
        folder=str(tmp_path),
        yaml=UNIFIED,
        iterations=1,
        checkpoint={"pretrained_checkpoint": stock},
    )
    assert run["losses"] == []
    assert run["error"][0] == "ScaleVecError"
    assert "was trained with stock" in run["error"][1] and "load_weights=True" in run["error"][1]


def test_the_setting_is_the_checkpoints(runs, folder):
    text = (Path(folder) / "llama-unified" / "iter_0000020" / "run_config.yaml").read_text()
    saved = yaml.safe_load(text)
    assert saved["optimizer_config_override_provider"] == {
        "_target_": "megatron.scalevec.Setting",
        "build_config_overrides": "unified",
    }
    spec = saved["model"]["transformer_layer_spec"]
    assert (spec["_target_"], spec["strategy"]) == ("megatron.scalevec.LayerSpec", "unified")
