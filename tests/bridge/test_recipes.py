"""Every YAML in examples/bridge, merged into the recipe of Bridge that it is for, and audited."""

import re
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "bridge"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "nemo.md"

# What the recipe would fetch from Hugging Face.
LLAMA3_8B = {
    "class": "LlamaConfig",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_30B_A3B = {
    "class": "Qwen3MoeConfig",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
# File to recipe, Hugging Face config, its layers, layers built, and parameters of stock where all are.
RECIPES = {
    "gpt_0.12b": ("vanilla_gpt_pretrain_config", None, 12, 12, 123_587_328),
    "gpt_1b": ("vanilla_gpt_pretrain_config", None, 22, 22, 1_028_065_024),
    "llama3_8b": ("llama3_8b_pretrain_config", LLAMA3_8B, 32, 2, None),
    "moe_1b_a0.3b": ("vanilla_gpt_pretrain_config", None, 16, 2, None),
    "qwen3_30b_a3b": ("qwen3_30b_a3b_pretrain_config", QWEN3_30B_A3B, 48, 2, None),
}
# A layer's linears with vectors: attention and an MLP, or attention, a router and so many experts.
LINEARS = {"moe_1b_a0.3b": 1 + 1 + 32, "qwen3_30b_a3b": 1 + 1 + 128}


@pytest.mark.parametrize("name", RECIPES)
def test_examples(bridge_ranks, name):
    recipe, hf, layers, built, parameters = RECIPES[name]
    files = [str(EXAMPLES / f"{name}.yaml"), str(EXAMPLES / "unified.yaml")]
    [found] = bridge_ranks.run("recipe_of_example", recipe=recipe, files=files, hf=hf, layers=built)
    assert found["error"] is None and found["layers"] == layers
    audit = found["audit"]
    assert (audit["strategy"], audit["linears_converted"]) == ("unified", built * LINEARS.get(name, 2))
    assert audit["built_vectors"] == audit["expected_vectors"]
    if parameters is not None:
        assert audit["parameters_stock"] == parameters
    [stock] = bridge_ranks.run("recipe_of_example", recipe=recipe, files=files[:1], hf=hf, layers=built)
    assert stock["error"] is None and stock["audit"] is None
    assert stock["parameters"] == audit["parameters_stock"]


def test_the_commands_of_the_docs_are_those_that_were_audited():
    """Recipe and file of every command, for stock and unified."""
    commands = re.findall(r"pretrain\.py --recipe (\S+)((?:\s+\\?\s*--config \S+)+)", DOCS.read_text())
    shown = {tuple(re.findall(r"--config (\S+)\.yaml", files)): recipe for recipe, files in commands}
    audited = {name: table[0] for name, table in RECIPES.items()}
    assert shown == {(name, "unified"): recipe for name, recipe in audited.items()}
    assert {file.stem for file in EXAMPLES.glob("*.yaml")} == {"unified", *audited}


@pytest.mark.parametrize("files", [["unified"], []], ids=["unified", "stock"])
def test_the_script(bridge_ranks, tmp_path, files):
    argv = [item for name in files for item in ("--config", str(EXAMPLES / f"{name}.yaml"))]
    [run] = bridge_ranks.run(
        "example_script",
        recipe="llama3_8b_pretrain_config",
        kind="llama",
        folder=str(tmp_path),
        argv=[*argv, "train.train_iters=2"],
        iterations=9,
    )
    assert run["saved"] == ["iter_0000002"]
    assert (run["audit"] is not None) == bool(files)
