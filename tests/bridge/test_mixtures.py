"""Mixtures of experts: examples, and a small one in Bridge's own loop."""

import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "bridge"
SETTING = """
optimizer_config_override_provider:
  _target_: megatron.scalevec.Setting
  build_config_overrides: unified
"""
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


def test_a_small_mixture_trains(bridge_ranks, tmp_path):
    [run] = bridge_ranks.run("pretrain", kind="qwen3_moe", folder=str(tmp_path), yaml=SETTING, iterations=20)
    assert run["error"] is None and len(run["losses"]) == 20
    assert run["losses"][-1] < run["losses"][0]
    audit = json.loads(run["audit"])
    assert audit["expected_vectors"] == audit["built_vectors"]
