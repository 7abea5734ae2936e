"""Bridge's own training loop: what a recipe's YAML asks for is what is trained, saved and resumed."""

import json
from pathlib import Path

import pytest

SETTING = """
optimizer_config_override_provider:
  _target_: megatron.scalevec.Setting
  build_config_overrides: {}
"""
UNIFIED = SETTING.format("unified")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(bridge_ranks, folder):
    """Twenty steps of each, with checkpoints at ten and twenty."""
    found = {}
    for kind in ("llama", "qwen3"):
        for strategy in ("stock", "unified"):
            [found[kind, strategy]] = bridge_ranks.run(
                "pretrain",
                kind=kind,
                folder=str(folder / f"{kind}-{strategy}"),
                yaml=UNIFIED if strategy == "unified" else None,
                iterations=20,
                checkpoint={"save_interval": 10},
            )
    return found


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_yaml_alone_brings_the_strategy(runs, kind):
    run = runs[kind, "unified"]
    assert run["error"] is None and len(run["losses"]) == 20
    assert run["losses"][-1] < run["losses"][0]
    audit = json.loads(run["audit"])
    assert (audit["strategy"], audit["linears_converted"]) == ("unified", 4)
    assert audit["expected_vectors"] == audit["built_vectors"]
    decays = run["decays"]
    assert decays["decoder.layers.0.self_attention.linear_qkv.gamma_in_q_alpha"] == 1
    assert decays["decoder.layers.0.self_attention.q_layernorm.gamma_alpha"] == 0
    assert decays["decoder.layers.1.mlp.linear_fc1.gamma_out_up_alpha"] == 1


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_stock_stays_stock(runs, kind):
    run = runs[kind, "stock"]
    assert run["error"] is None and run["audit"] is None
    assert not [name for name in run["vectors"] if "gamma" in name]
    one_dimensional = {name for name in run["vectors"]}
    assert {run["decays"][name] for name in one_dimensional} == {0.0}


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
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


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_same_losses_as_through_the_flag(bridge_ranks, tmp_path, kind):
    """One set of initial values, the same mock data: Bridge's loop and Megatron's, to the last bit."""
    [by_flag] = bridge_ranks.run("pretrain_with_megatron", kind=kind, strategy="unified", iterations=20)
    [by_yaml] = bridge_ranks.run(
        "pretrain", kind=kind, folder=str(tmp_path), yaml=UNIFIED, iterations=20, by_name=True
    )
    assert len(by_yaml["losses"]) == 20
    assert by_yaml["losses"] == by_flag["losses"]
    assert by_yaml["norms"] == by_flag["grad_norms"]


def test_python_and_yaml_are_the_same(bridge_ranks, runs, folder):
    [run] = bridge_ranks.run(
        "pretrain",
        kind="llama",
        folder=str(folder / "applied"),
        iterations=20,
        apply={"strategy": "unified"},
    )
    assert run["losses"] == runs["llama", "unified"]["losses"]


def test_the_command_line_and_components(bridge_ranks, folder):
    setting = "{_target_:megatron.scalevec.Setting,build_config_overrides:{strategy:unified,reparam:unit}}"
    [run] = bridge_ranks.run(
        "pretrain",
        kind="llama",
        folder=str(folder / "command-line"),
        overrides=(f"+optimizer_config_override_provider={setting}",),
        iterations=1,
    )
    assert run["error"] is None
    assert json.loads(run["audit"])["components"]["reparam"] == "unit"


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
    yaml, kind, text = STOPS[case]
    [run] = bridge_ranks.run("pretrain", kind="llama", folder=str(tmp_path), yaml=yaml, iterations=1)
    assert run["losses"] == []
    assert run["error"][0] == kind and text in run["error"][1]


@pytest.mark.parametrize("yaml", [SETTING.format("hg"), None], ids=["another strategy", "no setting"])
def test_a_resume_without_the_strategy_stops(bridge_ranks, runs, folder, tmp_path, yaml):
    source = str(folder / "llama-unified")
    [run] = bridge_ranks.run(
        "pretrain", kind="llama", folder=str(tmp_path), yaml=yaml, iterations=22, load=source
    )
    assert run["losses"] == []
    assert run["error"] is not None
    if yaml is not None:  # otherwise the plugin is not there, and Bridge finds tensors missing
        assert run["error"][0] == "ScaleVecError" and "was trained with unified" in run["error"][1]


def test_the_setting_is_the_checkpoints(runs, folder):
    import yaml

    text = (Path(folder) / "llama-unified" / "iter_0000020" / "run_config.yaml").read_text()
    saved = yaml.safe_load(text)
    assert saved["optimizer_config_override_provider"] == {
        "_target_": "megatron.scalevec.Setting",
        "build_config_overrides": "unified",
    }
    spec = saved["model"]["transformer_layer_spec"]
    assert (spec["_target_"], spec["strategy"]) == ("megatron.scalevec.LayerSpec", "unified")
