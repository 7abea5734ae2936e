"""The table of shapes says what the configurations of such models come to."""

from types import SimpleNamespace

import pytest

from megatron_scalevec import ScaleVecConfig
from megatron_scalevec.config import BRANCH_NAMES
from megatron_scalevec.convert import branches_at
from megatron_scalevec.convert.maps import HYBRID_LAYERS
from megatron_scalevec.shapes import SHAPES

GPT = {
    "num_layers": 2,
    "gated_linear_unit": True,
    "num_moe_experts": None,
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}
EXPERTS = {"num_moe_experts": 4}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 8}
LATENT = {"multi_latent_attention": True, "q_lora_rank": 8, "qk_layernorm": True}


def half(missing):
    return SimpleNamespace(no_op=missing)


# A configuration for each shape, by a word of its name.
CONFIGURATIONS = {
    "gated MLP": {},
    "plain MLP": {"gated_linear_unit": False},
    "attention with an output gate": {"attention_output_gate": True},
    "Mixtral": EXPERTS,
    "dense and expert": {**SHARED, "moe_shared_expert_gate": True, "moe_layer_freq": [0, 1]},
    "experts on latents": {**EXPERTS, "moe_latent_size": 8},
    "DeepSeek-V2": LATENT,
    "(DeepSeek-V3)": {**LATENT, **SHARED, "moe_layer_freq": [0, 1]},
    "Nemotron-H": {HYBRID_LAYERS: "M*-"},
    "Mamba, attention and expert": {HYBRID_LAYERS: "M*E", **EXPERTS},
    "Qwen3-Next": {
        HYBRID_LAYERS: "GE*E",
        **SHARED,
        "moe_shared_expert_gate": True,
        "attention_output_gate": True,
    },
    "hybrid with latent": {HYBRID_LAYERS: "M+-", **LATENT},
    "heterogeneous": {
        "per_block_parameters": [
            SimpleNamespace(attention=half(False), mlp=half(True)),
            SimpleNamespace(attention=half(True), mlp=half(False)),
        ]
    },
}


@pytest.mark.parametrize("word", CONFIGURATIONS)
def test_branches_are_those_of_the_configuration(word):
    [shape] = [shape for shape in SHAPES if word in shape.name]
    model_config = SimpleNamespace(**{**GPT, **CONFIGURATIONS[word]})
    found = branches_at(ScaleVecConfig(strategy="hg"), model_config)
    assert set(shape.branches) == {name for names in found.values() for name in names}
    assert len(set(shape.branches)) == len(shape.branches) and not shape.refused


def test_every_shape_is_looked_at():
    supported = [shape for shape in SHAPES if not shape.refused]
    assert len(supported) == len(CONFIGURATIONS)
    assert all(shape.refused or shape.branches for shape in SHAPES)
    # The way out of the norm over a delta net's heads is a scale at the norm, not a branch of a linear.
    named = {name for names in BRANCH_NAMES.values() for name in names}
    assert all(set(shape.branches) <= named for shape in supported)
