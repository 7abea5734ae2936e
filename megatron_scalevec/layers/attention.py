"""Self-attention with a norm on the values, beside Megatron's own norms on queries and keys."""

from __future__ import annotations

from megatron.core.transformer.attention import SelfAttention

__all__ = ["ScaleVecSelfAttention"]


class ScaleVecSelfAttention(SelfAttention):
    """``SelfAttention`` whose values pass through ``v_layernorm``, per head, before anything else.

    Megatron has slots for norms on q and k only. They are applied in the same function, before RoPE; the
    key-value cache of inference is filled afterwards. A built attention gets this class and a
    ``v_layernorm`` by :mod:`megatron_scalevec.convert`.
    """

    def get_query_key_value_tensors(self, *args, **kwargs):
        """As Megatron's, with normalized values [sequence, batch, groups, head_dim].

        Raises:
            RuntimeError: The unsplit q/k/v tensor is asked for (fused RoPE), in which no norm can act.
        """
        result = super().get_query_key_value_tensors(*args, **kwargs)
        if len(result) < 3:
            raise RuntimeError(
                "the unsplit q/k/v tensor was asked for (--fused-single-qkv-rope), but this model has norms "
                "on q, k and v; turn that option off"
            )
        query, key, value, *rest = result
        return (query, key, self.v_layernorm(value), *rest)
