"""Small GPT models built through megatron.core alone, and their parameters for the reference."""

from __future__ import annotations

import torch

__all__ = ["build_gpt", "initialize_parallel", "reference_of"]

SIZES = {"heads": 4, "head_dim": 8, "hidden": 32, "ffn": 48, "vocabulary": 64, "sequence": 16}


def initialize_parallel(**sizes: int) -> None:
    """Process group and Megatron's groups; e.g. ``tensor_model_parallel_size=2``."""
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def build_gpt(kind: str = "llama", **overrides):
    """A float64 GPT with local layers: ``llama``, ``gpt2``, ``qk-norm`` or ``one-group``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    modern = kind != "gpt2"
    settings = {
        "num_layers": 2,
        "hidden_size": SIZES["hidden"],
        "num_attention_heads": SIZES["heads"],
        "num_query_groups": {"gpt2": SIZES["heads"], "one-group": 1}.get(kind, 2),
        "ffn_hidden_size": SIZES["ffn"],
        "normalization": "RMSNorm" if modern else "LayerNorm",
        "gated_linear_unit": modern,
        "activation_func": torch.nn.functional.silu if modern else torch.nn.functional.gelu,
        "add_bias_linear": not modern,
        "qk_layernorm": kind == "qk-norm",
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        **overrides,
    }
    config = TransformerConfig(**settings)
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm, normalization=config.normalization
        ),
        vocab_size=SIZES["vocabulary"],
        max_sequence_length=SIZES["sequence"],
        share_embeddings_and_output_weights=not modern,
        position_embedding_type="rope" if modern else "learned_absolute",
    )
    # The torch norms and position tables are built in the default dtype.
    return model.double()


def reference_of(model):
    """The reference's parameters, as views of a serial model's, so that gradients can be compared.

    Returns:
        (params for ``reference.gpt_logits``, ReferenceConfig, leaves: name of the model's parameter to
        the float64 leaf that stands for it)
    """
    from reference import Branch, ReferenceConfig

    c = model.config
    leaves = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    head_dim, groups = c.kv_channels, c.num_query_groups
    per_group = (c.num_attention_heads // groups) * head_dim
    used: set[str] = set()

    def leaf(name):
        if name in leaves:
            used.add(name)
        return leaves.get(name)

    def branches(path, names, rows_of):
        """Branches of a fused linear; vectors are looked up by the names the plugin gives them."""
        weight, bias = leaf(f"{path}.weight"), leaf(f"{path}.bias")
        return {
            b: Branch(
                rows_of(weight, i),
                leaf(f"{path}.gamma_in_{b}"),
                leaf(f"{path}.gamma_out_{b}"),
                None if bias is None else rows_of(bias, i),
            )
            for i, b in enumerate(names)
        }

    def qkv_rows(tensor, index):
        blocks = tensor.view(groups, per_group + 2 * head_dim, *tensor.shape[1:])
        start = (0, per_group, per_group + head_dim)[index]
        stop = (per_group, per_group + head_dim, per_group + 2 * head_dim)[index]
        return blocks[:, start:stop].flatten(0, 1)

    def fc1_rows(tensor, index):
        return tensor.chunk(2)[index] if c.gated_linear_unit else tensor

    def plain(path):
        return Branch(leaf(f"{path}.weight"), bias=leaf(f"{path}.bias"))

    def norm(path):
        return leaf(f"{path}.weight"), leaf(f"{path}.bias")

    layers = []
    for index in range(c.num_layers):
        path = f"decoder.layers.{index}"
        layers.append(
            {
                "attention_norm": norm(f"{path}.input_layernorm"),
                "mlp_norm": norm(f"{path}.pre_mlp_layernorm"),
                **branches(f"{path}.self_attention.linear_qkv", ("q", "k", "v"), qkv_rows),
                "o": plain(f"{path}.self_attention.linear_proj"),
                **branches(
                    f"{path}.mlp.linear_fc1",
                    ("gate", "up") if c.gated_linear_unit else ("up",),
                    fc1_rows,
                ),
                "down": plain(f"{path}.mlp.linear_fc2"),
                "q_gamma": leaf(f"{path}.self_attention.q_layernorm.weight"),
                "k_gamma": leaf(f"{path}.self_attention.k_layernorm.weight"),
            }
        )
    embedding = leaf("embedding.word_embeddings.weight")
    head = leaf("output_layer.weight")
    params = {
        "embedding": embedding,
        "position": leaf("embedding.position_embeddings.weight"),
        "layers": layers,
        "final": norm("decoder.final_layernorm"),
        "head": embedding if head is None else head,
    }
    unused = set(leaves) - used
    assert not unused, f"the reference does not know {sorted(unused)}"
    config = ReferenceConfig(
        heads=c.num_attention_heads,
        groups=groups,
        head_dim=head_dim,
        gated=c.gated_linear_unit,
        rms=c.normalization == "RMSNorm",
        rope=params["position"] is None,
        eps=c.layernorm_epsilon,
    )
    return params, config, leaves
