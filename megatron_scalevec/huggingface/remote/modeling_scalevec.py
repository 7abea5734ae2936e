"""A Llama-like decoder with norms on any of q, k and v (made by megatron_scalevec).

``y = γ_out ⊙ Norm(W (γ_in ⊙ x̂))`` per head, on the branches that the config names (arXiv 2605.26895), before
RoPE; γ_in is part of W. All else is Qwen3's, as transformers has it.
"""

from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3RMSNorm

from .configuration_scalevec import ScaleVecConfig


class HeadNormalizedLinear(nn.Linear):
    """A linear whose output is normalized head by head.

    The norm on v lies here because transformers' attention has no place for it.
    """

    def __init__(self, columns, rows, bias, head_dim, eps):
        super().__init__(columns, rows, bias=bias)
        self.norm = Qwen3RMSNorm(head_dim, eps=eps)

    def forward(self, hidden_states):
        heads = super().forward(hidden_states).unflatten(-1, (-1, self.norm.weight.shape[0]))
        return self.norm(heads).flatten(-2)


class ScaleVecForCausalLM(Qwen3ForCausalLM):
    """Qwen3's model with its attention's norms and biases changed to those of the config."""

    config_class = ScaleVecConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            _adapt(layer.self_attn, config)
        # Once more, for the modules that are new.
        self.post_init()


def _adapt(attention, config):
    if "q" not in config.head_norms:
        attention.q_norm = nn.Identity()
    if "k" not in config.head_norms:
        attention.k_norm = nn.Identity()
    queries = config.num_attention_heads * attention.head_dim
    keys = config.num_key_value_heads * attention.head_dim
    if config.qkv_bias:
        attention.q_proj = nn.Linear(config.hidden_size, queries)
        attention.k_proj = nn.Linear(config.hidden_size, keys)
        attention.v_proj = nn.Linear(config.hidden_size, keys)
    if "v" in config.head_norms:
        attention.v_proj = HeadNormalizedLinear(
            config.hidden_size, keys, config.qkv_bias, attention.head_dim, config.rms_norm_eps
        )
