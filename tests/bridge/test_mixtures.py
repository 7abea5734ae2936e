"""Mixtures of experts among the examples, merged into the recipes that they are for, and audited."""

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "bridge"
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
MIXTURES = {
    "moe_1b_a0.3b": ("vanilla_gpt_pretrain_config", None, 16),
    "qwen3_30b_a3b": ("qwen3_30b_a3b_pretrain_config", QWEN3_30B_A3B, 48),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_examples(bridge_ranks, name):
    recipe, hf, layers = MIXTURES[name]
    files = [str(EXAMPLES / f"{name}.yaml"), str(EXAMPLES / "unified.yaml")]
    [found] = bridge_ranks.run("recipe_of_example", recipe=recipe, files=files, hf=hf, layers=2)
    assert found["error"] is None and found["layers"] == layers
    audit = found["audit"]
    assert audit["strategy"] == "unified" and audit["built_vectors"] == audit["expected_vectors"]
    assert any("expert_gate" in kind for kind in audit["built_vectors"])
    [stock] = bridge_ranks.run("recipe_of_example", recipe=recipe, files=files[:1], hf=hf, layers=2)
    assert stock["error"] is None and stock["audit"] is None
    assert stock["parameters"] == audit["parameters_stock"]
