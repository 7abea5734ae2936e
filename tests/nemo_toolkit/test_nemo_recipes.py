"""nemo-toolkit 2.7: from a recipe's YAML to a model that trains."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "nemo"
LINE = "model.config.transformer_layer_spec: megatron_scalevec.nemo.{}\n"
DECAY = "optim.no_weight_decay_cond: megatron_scalevec.nemo.{}\n"


@pytest.fixture(scope="module")
def unified(nemo_ranks, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("unified"))
    [run] = nemo_ranks.run("train", factory="llama32_1b", yaml=LINE.format("unified"), folder=folder)
    return run


def test_yaml_alone_brings_the_strategy_and_its_weight_decay(unified):
    assert unified["error"] is None
    assert unified["config"] == "Llama32Config1B"
    decays = unified["decays"]
    assert decays["decoder.layers.0.self_attention.linear_qkv.gamma_in_q_alpha"] == 0.1
    assert decays["decoder.layers.0.self_attention.q_layernorm.gamma_alpha"] == 0.0
    assert decays["decoder.layers.1.mlp.linear_fc1.gamma_out_up_beta"] == 0.1
    assert decays["decoder.layers.1.mlp.linear_fc1.weight"] == 0.1


def test_the_model_trains(unified):
    """One batch over and over: far below ln(128) = 4.85 in twenty steps."""
    assert unified["losses"][0] == pytest.approx(4.85, abs=0.3)
    assert unified["losses"][-1] < 2.5


def test_stock_stays_stock(nemo_ranks, tmp_path):
    [run] = nemo_ranks.run("train", factory="llama32_1b", yaml="log.name: x\n", folder=str(tmp_path))
    assert run["error"] is None and run["losses"][-1] < 2.5
    assert not [name for name in run["decays"] if "gamma" in name]
    assert {decay for name, decay in run["decays"].items() if "norm" in name} == {0.0}


def test_the_decay_without_the_model_is_refused(nemo_ranks, tmp_path):
    yaml = DECAY.format("no_weight_decay")
    [run] = nemo_ranks.run("train", factory="llama32_1b", yaml=yaml, folder=str(tmp_path))
    assert run["error"][0] == "ScaleVecError" and "the model has none" in run["error"][1]


def test_a_condition_of_ones_own_is_refused(nemo_ranks, tmp_path):
    yaml = LINE.format("hg") + (
        "optim.no_weight_decay_cond: megatron_scalevec.nemo.no_weight_decay(policy=none)\n"
    )
    [run] = nemo_ranks.run("train", factory="llama32_1b", yaml=yaml, folder=str(tmp_path))
    assert run["error"][0] == "ScaleVecError" and "drop it" in run["error"][1]


@pytest.mark.parametrize(
    ("line", "value", "sentence"),
    [
        (LINE, "unifed", "Did you mean 'unified'?"),
        (LINE, "layer_spec(strategy=unifed)", "Did you mean 'unified'?"),
        (LINE, "layer_spec(stratgy=hg)", "Did you mean 'strategy'?"),
        (LINE, "layer_spec(strategy=hg,sites=mlp+haed)", "Did you mean 'head'?"),
        (LINE, "layer_spec(strategy=hg,placment=dual)", "Did you mean 'placement'?"),
        (LINE, "layer_spec(strategy=or,placement=output)", "nothing to share"),
        (LINE, "layer_spec", "unknown strategy ''"),
        (DECAY, "no_weight_decay(policy=splt)", "Did you mean 'split'?"),
        (DECAY, "no_weight_decay(polcy=split)", "Did you mean 'policy'?"),
        (DECAY, "no_wieght_decay", "Did you mean 'no_weight_decay'?"),
    ],
)
def test_a_misspelt_setting_stops_and_says_why(nemo_ranks, tmp_path, line, value, sentence):
    """nemo_run's own error has the YAML's line; the reason is logged before it."""
    yaml = line.format(value)
    [found] = nemo_ranks.run("resolve", factory="llama32_1b", yaml=yaml, folder=str(tmp_path))
    assert found["error"] is not None and f"megatron_scalevec.nemo.{value}" in found["error"][1]
    assert any(sentence in said for said in found["said"])


def test_components_and_clusters(nemo_ranks, tmp_path):
    yaml = LINE.format("layer_spec(strategy=unified,reparam=unit,sites=attention+mlp)")
    [found] = nemo_ranks.run("resolve", factory="llama3_8b", yaml=yaml, folder=str(tmp_path))
    assert found["error"] is None
    for component in ("strategy='unified'", "reparam='unit'", "sites='attention,mlp'"):
        assert component in found["spec"]
    assert found["sendable"]


def test_every_example_names_its_factory():
    for file in EXAMPLES.glob("*.yaml"):
        assert f"--yaml examples/nemo/{file.name}" in file.read_text()


def _described(nemo_ranks, tmp_path, name):
    text = (EXAMPLES / f"{name}.yaml").read_text()
    factory = text.split("--factory ")[1].split()[0]
    [found] = nemo_ranks.run("describe_recipe", factory=factory, yaml=text, folder=str(tmp_path))
    assert found["error"] is None
    assert found["audit"]["strategy"] == "unified"
    assert found["audit"]["built_vectors"] == found["audit"]["expected_vectors"]
    return found["audit"]


@pytest.mark.parametrize("name", ["gpt_0.12b", "gpt_1b", "llama3_8b"])
def test_dense_examples(nemo_ranks, tmp_path, name):
    assert _described(nemo_ranks, tmp_path, name)["linears_converted"] == 4


@pytest.mark.parametrize(("name", "experts"), [("moe_1b_a0.3b", 32), ("qwen3_30b_a3b", 128)])
def test_examples_of_mixtures(nemo_ranks, tmp_path, name, experts):
    """Two layers: attention, router and experts."""
    audit = _described(nemo_ranks, tmp_path, name)
    assert audit["linears_converted"] == 2 * (1 + 1 + experts)


@pytest.mark.parametrize("strategy", ["unified", None])
def test_the_slurm_example_sends_what_was_asked_for(nemo_ranks, strategy):
    given = {
        "account": "a",
        "partition": "p",
        "host": "login",
        "user": "u",
        "job-dir": "/jobs",
        "image": "image.sqsh",
        "nodes": "4",
    }
    argv = [item for name, value in given.items() for item in (f"--{name}", value)]
    if strategy is not None:
        argv += ["--strategy", strategy]
    [sent] = nemo_ranks.run("send_to_slurm", argv=argv)
    assert sent["sendable"]
    assert ("strategy='unified'" in sent["spec"]) == (strategy is not None)
    assert sent["devices"] == (4, 8) and sent["executor"] == (4, 8, 8)
    assert sent["account"] == ("a", "p", "image.sqsh")
    assert sent["tunnel"] == ("u", "login", "/jobs")
