"""Small GPT models built through megatron.core alone, and their parameters for the reference."""

from __future__ import annotations

import torch

from ranks.initial import name_of_expert

__all__ = ["EXPERTS", "ZeroCenteredNorm", "build_gpt", "initialize_parallel", "reference_of"]

EXPERTS = {
    # Softmax over the chosen experts.
    "mixtral": {"num_moe_experts": 4, "moe_ffn_hidden_size": 24},
    # Softmax over all experts; norms on q and k.
    "qwen3-moe": {
        "num_moe_experts": 8,
        "moe_ffn_hidden_size": 12,
        "moe_router_pre_softmax": True,
        "qk_layernorm": True,
    },
    # Sigmoid scores and a bias for the choice, a shared expert behind a gate, a dense first layer.
    "shared": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
        "moe_layer_freq": [0, 1],
    },
    # As DeepSeek-V3: latent attention, a dense first layer, a shared expert, sigmoid scores and a bias for
    # the choice.
    "deepseek": {
        "kind": "mla",
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_load_balancing_type": "none",
        "moe_router_topk_scaling_factor": 1.5,
        "moe_shared_expert_intermediate_size": 16,
        "moe_layer_freq": [0, 1],
    },
    # Routed experts on latents, which takes TransformerEngine; a shared expert on the tokens themselves.
    "latent": {
        "num_moe_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_latent_size": 20,
        "moe_shared_expert_intermediate_size": 16,
    },
}
"""Arguments of :func:`build_gpt` for small models with experts. The router computes in float64."""
for _overrides in EXPERTS.values():
    _overrides.update(moe_router_dtype="fp64", moe_token_dispatcher_type="alltoall")

SIZES = {"heads": 4, "head_dim": 8, "hidden": 32, "ffn": 48, "vocabulary": 64, "sequence": 16}

# Multi-latent attention; no two sizes are equal, and two ranks cut the down-projections inside a branch.
LATENT = {
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6,
    "v_head_dim": 4,
    "rope_type": "rope",
    "qk_layernorm": True,
}


def initialize_parallel(**sizes: int) -> None:
    """Process group and Megatron's groups; e.g. ``tensor_model_parallel_size=2``."""
    from megatron.core import parallel_state, tensor_parallel

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**sizes)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


class ZeroCenteredNorm(torch.nn.Module):
    """A norm that stores γ − 1, as TransformerEngine's and apex's can; torch's cannot."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.rms, self.eps = config.normalization == "RMSNorm", eps
        self.weight = torch.nn.Parameter(torch.zeros(hidden_size))
        self.bias = None if self.rms else torch.nn.Parameter(torch.zeros(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x):
        size = self.weight.shape
        if self.rms:
            return torch.nn.functional.rms_norm(x, size, self.weight + 1, self.eps)
        return torch.nn.functional.layer_norm(x, size, self.weight + 1, self.bias, self.eps)


def settings_of(kind: str, dtype: torch.dtype) -> dict:
    """Megatron's configuration of a kind of model."""
    modern = kind != "gpt2"
    return {
        "num_layers": 2,
        "hidden_size": SIZES["hidden"],
        "num_attention_heads": SIZES["heads"],
        "num_query_groups": {"gpt2": SIZES["heads"], "mla": SIZES["heads"], "one-group": 1}.get(kind, 2),
        "ffn_hidden_size": SIZES["ffn"],
        "normalization": "RMSNorm" if modern else "LayerNorm",
        "gated_linear_unit": modern,
        "activation_func": torch.nn.functional.silu if modern else torch.nn.functional.gelu,
        "add_bias_linear": not modern,
        "qk_layernorm": kind == "qk-norm",
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        **(LATENT if kind == "mla" else {}),
    }


def build_gpt(
    kind: str = "llama",
    dtype: torch.dtype = torch.float64,
    implementation: str = "local",
    norm_class: type | None = None,
    spec=None,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    **overrides,
):
    """A GPT: ``llama``, ``gpt2``, ``qk-norm``, ``one-group`` or ``mla``.

    ``implementation``: Megatron's name for the layers. ``norm_class``: for all norms of local layers.
    ``spec``: another layer spec. ``pre_process``, ``post_process``, ``vp_stage``: of one pipeline stage.
    ``overrides`` go into the TransformerConfig; ``layernorm_zero_centered_gamma`` brings norms of its own
    to local layers, ``mtp_num_layers`` a multi-token-prediction block.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    modern, latent = kind != "gpt2", kind == "mla"
    settings = {**settings_of(kind, dtype), **overrides}
    config = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    if spec is not None:
        pass
    elif config.num_moe_experts:
        spec = _experts_spec(config, implementation, vp_stage)
    elif implementation == "transformer_engine":
        spec = _transformer_engine_spec(config)
    else:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=latent,
            normalization=config.normalization,
        )
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, implementation == "transformer_engine")
    if config.layernorm_zero_centered_gamma and implementation == "local":
        norm_class = ZeroCenteredNorm
    if norm_class is not None:
        spec.submodules.input_layernorm = norm_class
        spec.submodules.pre_mlp_layernorm = norm_class
        if config.qk_layernorm:
            inner = spec.submodules.self_attention.submodules
            inner.q_layernorm = norm_class
            setattr(inner, "kv_layernorm" if latent else "k_layernorm", norm_class)
        spec = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=norm_class)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=SIZES["vocabulary"],
        max_sequence_length=SIZES["sequence"],
        parallel_output=False,
        share_embeddings_and_output_weights=not modern,
        position_embedding_type="rope" if modern else "learned_absolute",
        mtp_block_spec=mtp,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
    )
    # The torch norms and position tables are built in the default dtype.
    return model.to(dtype)


def _experts_spec(config, implementation: str, vp_stage: int | None = None):
    """Layers with and without experts, as ``moe_layer_freq`` says."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    te = implementation == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=config.normalization, vp_stage=vp_stage
    )
    for layer in block.layer_specs if te else ():
        layer.submodules.self_attention.submodules.core_attention = DotProductAttention
    return block


def _transformer_engine_spec(config):
    """TransformerEngine's layers, with Megatron's own attention: the weights are not in it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    fusion = {"mla_down_proj_fusion": True} if getattr(config, "mla_down_proj_fusion", False) else {}
    spec = get_gpt_layer_with_transformer_engine_spec(
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        **fusion,
    )
    spec.submodules.self_attention.submodules.core_attention = DotProductAttention
    return spec


def reference_of(model):
    """The reference's parameters, as views of a serial model's, so that gradients can be compared.

    Returns:
        (params for ``reference.gpt_logits``, ReferenceConfig, leaves: name of the model's parameter (see
        ``name_of_expert``) to the float64 leaf that stands for it)
    """
    from reference import Branch, ReferenceConfig, Routing, layer_norm, product, rms_norm, unit

    c = model.config
    leaves = {
        name_of_expert(name, 0): p.detach().double().cpu().requires_grad_()
        for name, p in model.named_parameters()
    }
    head_dim, groups = c.kv_channels, c.num_query_groups
    used: set[str] = set()

    def leaf(name):
        if name in leaves:
            used.add(name)
        return leaves.get(name)

    def vector(name):
        """A scale vector by the names the plugin gives its stored parts; None where there is none."""
        if f"{name}_beta" in leaves:
            return product(leaf(f"{name}_beta"), leaf(f"{name}_alpha"))
        if f"{name}_magnitude" in leaves:
            return unit(leaf(f"{name}_magnitude"), leaf(f"{name}_direction"))
        return leaf(name)

    def branches(path, names, rows_of, prefix="", owner=None):
        """Branches of a fused linear; ``owner`` holds the vectors, by default the linear."""
        weight, bias = leaf(f"{path}.weight"), leaf(f"{path}.bias")
        owner = owner or path
        of_all = vector(f"{owner}.gamma_in_shared")
        return {
            b: Branch(
                rows_of(weight, b),
                of_all if of_all is not None else vector(f"{owner}.gamma_in_{prefix}{b}"),
                vector(f"{owner}.gamma_out_{prefix}{b}"),
                None if bias is None else rows_of(bias, b),
            )
            for b in names
        }

    latent = bool(c.multi_latent_attention)
    gated_output = bool(getattr(c, "attention_output_gate", False))
    queries = (c.num_attention_heads // groups) * head_dim
    blocks = {"q": queries, "output_gate": queries, "k": head_dim, "v": head_dim}
    if not gated_output:
        del blocks["output_gate"]

    def qkv_rows(tensor, branch):
        """Query groups one after the other, each with its branches one after the other."""
        grouped = tensor.view(groups, sum(blocks.values()), *tensor.shape[1:])
        start = sum(list(blocks.values())[: list(blocks).index(branch)])
        return grouped[:, start : start + blocks[branch]].flatten(0, 1)

    def fc1_rows(tensor, branch):
        return tensor.chunk(2)[branch == "up"] if c.gated_linear_unit else tensor

    def expert_rows(tensor, branch):
        """Of grouped experts, where blocks of gate and up rows may take turns."""
        turns = getattr(c, "moe_mlp_glu_interleave_size", None)
        if not turns or not c.moe_grouped_gemm:
            return fc1_rows(tensor, branch)
        blocks = tensor.view(-1, 2, turns, *tensor.shape[1:])
        return blocks[:, int(branch == "up")].flatten(0, 1)

    def norm(path, fused=None):
        """γ ⊙ Norm(x) + β, and a vector of ours on all of that. ``fused``: the linear it may be part of."""
        weight, beta, gamma = leaf(f"{path}.weight"), leaf(f"{path}.bias"), vector(f"{path}.gamma")
        if weight is None and fused is not None:
            weight, beta = leaf(f"{fused}.layer_norm_weight"), leaf(f"{fused}.layer_norm_bias")
        if weight is None:
            return None
        own = weight + 1 if c.layernorm_zero_centered_gamma else weight

        def apply(x):
            if c.normalization == "RMSNorm":
                y = rms_norm(x, own, c.layernorm_epsilon)
            else:
                y = layer_norm(x, own, beta, c.layernorm_epsilon)
            return y if gamma is None else gamma * y

        return apply

    fc1_names = ("gate", "up") if c.gated_linear_unit else ("up",)

    def dense(path, prefix="", owner=None, rows=fc1_rows):
        return {
            **branches(f"{path}.linear_fc1", fc1_names, rows, prefix, owner),
            **branches(f"{path}.linear_fc2", ("down",), lambda t, b: t, prefix, owner),
        }

    def experts(path):
        """The parts of a mixture, where every expert is a module of its own."""
        whole = lambda t, b: t  # noqa: E731
        inner = f"{path}.experts"
        held = any(name.startswith(f"{inner}.gamma_") for name in leaves)  # one set for all experts
        paths = [f"{inner}.local_experts.{expert}" for expert in range(c.num_moe_experts)]
        found = {
            **branches(f"{path}.router", ("router",), whole),
            "experts": [dense(p, "expert_", inner if held else None, expert_rows) for p in paths],
            "bias": dict(model.named_buffers()).get(f"{path}.router.expert_bias"),
        }
        if f"{path}.fc1_latent_proj.weight" in leaves:
            found["latent"] = [
                branches(f"{path}.{linear}", (branch,), whole)[branch]
                for linear, branch in (("fc1_latent_proj", "latent_down"), ("fc2_latent_proj", "latent_up"))
            ]
        if f"{path}.shared_experts.linear_fc1.weight" in leaves:
            found["shared"] = dense(f"{path}.shared_experts", "shared_")
        if f"{path}.shared_experts.gate_weight" in leaves:
            gate = f"{path}.shared_experts"
            name = "shared_expert_gate"
            found["shared_gate"] = Branch(
                leaf(f"{gate}.gate_weight"),
                vector(f"{gate}.gamma_in_{name}"),
                vector(f"{gate}.gamma_out_{name}"),
            )
        return found

    def in_heads(heads, sizes):
        """Each head's branches one after the other."""

        def rows(tensor, branch):
            parts = tensor.view(heads, sum(sizes.values()), *tensor.shape[1:]).split(list(sizes.values()), 1)
            return parts[list(sizes).index(branch)].flatten(0, 1)

        return rows

    def grouped_attention(path):
        return {
            **branches(f"{path}.linear_qkv", blocks, qkv_rows),
            "head_norms": {b: norm(f"{path}.{b}_layernorm") for b in ("q", "k", "v")},
        }

    def latent_attention(path):
        down = {"kv_down": c.kv_lora_rank, "k_rope": c.qk_pos_emb_head_dim}
        up = {"k_up": c.qk_head_dim, "v_up": c.v_head_dim}
        of_queries = {"q": "linear_q_proj"}
        if c.q_lora_rank:
            of_queries = {"q_down": "linear_q_down_proj", "q_up": "linear_q_up_proj"}
        found = {}
        for name, linear in of_queries.items():
            if f"{path}.{linear}.weight" in leaves:
                found.update(branches(f"{path}.{linear}", (name,), lambda t, b: t))
        if f"{path}.linear_qkv_down_proj.weight" in leaves:
            all_down = {"q_down": c.q_lora_rank, **down}
            found.update(branches(f"{path}.linear_qkv_down_proj", all_down, in_heads(1, all_down)))
        else:
            found.update(branches(f"{path}.linear_kv_down_proj", down, in_heads(1, down)))
        found.update(branches(f"{path}.linear_kv_up_proj", up, in_heads(c.num_attention_heads, up)))
        norms = {b: norm(f"{path}.{b}_layernorm", f"{path}.linear_{b}_up_proj") for b in ("q", "kv")}
        return {**found, "latent_norms": norms}

    layers = []
    for index in range(c.num_layers):
        path = f"decoder.layers.{index}"
        with_experts = f"{path}.mlp.router.weight" in leaves
        attention = f"{path}.self_attention"
        fused = "linear_qkv_down_proj" if latent else "linear_qkv"
        layers.append(
            {
                "attention_norm": norm(f"{path}.input_layernorm", f"{attention}.{fused}"),
                "mlp_norm": norm(f"{path}.pre_mlp_layernorm", f"{path}.mlp.linear_fc1"),
                **(latent_attention if latent else grouped_attention)(attention),
                **branches(f"{attention}.linear_proj", ("o",), lambda t, b: t),
                **(experts(f"{path}.mlp") if with_experts else dense(f"{path}.mlp")),
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
        rope=params["position"] is None,
        rope_dim=c.qk_pos_emb_head_dim if latent else 0,
        routing=Routing(
            chosen=c.moe_router_topk,
            score=c.moe_router_score_function,
            before_choice=c.moe_router_pre_softmax,
            factor=c.moe_router_topk_scaling_factor or 1.0,
        ),
    )
    return params, config, leaves
