"""Config of a Llama-like decoder with norms on any of q, k and v (made by megatron_scalevec)."""

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config


class ScaleVecConfig(Qwen3Config):
    """Qwen3's config with two entries more.

    ``head_norms``: which of ``q``, ``k`` and ``v`` are normalized per head, before RoPE. ``qkv_bias``:
    whether the maps q, k and v have biases.
    """

    model_type = "scalevec"

    def __init__(self, head_norms=("q", "k", "v"), qkv_bias=False, **kwargs):
        self.head_norms = list(head_norms)
        self.qkv_bias = qkv_bias
        super().__init__(**kwargs)
