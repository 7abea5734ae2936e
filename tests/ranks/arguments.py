"""Command lines of the small Megatron runs in the tests."""

from __future__ import annotations

__all__ = ["EXPERT_LAYOUTS", "LAYOUTS", "tiny_gpt"]

_COMMON = """
--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64
--seq-length 32 --max-position-embeddings 32
--micro-batch-size 2 --global-batch-size 4 --train-iters 10
--lr 3e-3 --min-lr 3e-4 --lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-iters 2
--weight-decay 0.1 --clip-grad 0.5 --seed 1234
--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32
--mock-data --split 99,1,0 --attention-dropout 0 --hidden-dropout 0
--eval-iters 0 --eval-interval 100 --log-interval 1
--transformer-impl local --use-cpu-initialization
""".split()

_MODELS = {
    # As in current models: grouped queries, gated MLP, RMSNorm, no biases, untied output head.
    "llama": """--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights""".split(),
    # As in GPT-2: plain MLP, LayerNorm with bias, biases, tied output head.
    "gpt2": """--normalization LayerNorm --position-embedding-type learned_absolute""".split(),
    # Output-Norms on q and k.
    "qk-norm": """--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope --qk-layernorm
        --untie-embeddings-and-output-weights""".split(),
    # As Mixtral: every layer has experts, softmax over the chosen ones.
    "mixtral": """--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
        --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
        --moe-token-dispatcher-type alltoall --moe-router-dtype fp32""".split(),
    # As Qwen3's: norms on q and k, more and smaller experts, softmax over all of them.
    "qwen3-moe": """--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
        --qk-layernorm --num-experts 8 --moe-ffn-hidden-size 16 --moe-router-topk 2
        --moe-router-pre-softmax --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
        --moe-token-dispatcher-type allgather --moe-router-dtype fp32""".split(),
    # As DeepSeek's: a dense first layer, shared experts, sigmoid scores, balance by a bias.
    "shared-experts": """--group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
        --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-layer-freq [0,1,1,1]
        --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
        --moe-router-dtype fp32""".split(),
    # One group of keys and values for all query heads: with two tensor-parallel ranks a chunk of
    # the fused weight ends inside the group.
    "one-group": """--group-query-attention --num-query-groups 1 --swiglu --normalization RMSNorm
        --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights""".split(),
    # As DeepSeek's: latent attention with norms on the latents, and multi-token prediction.
    "deepseek": """--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8
        --qk-pos-emb-head-dim 6 --v-head-dim 4 --qk-layernorm --rope-type rope --mtp-num-layers 1 --swiglu
        --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights""".split(),
    # As DeepSeek-V3: that, with a dense first layer, shared experts, sigmoid scores and balance by a bias.
    "deepseek-v3": """--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8
        --qk-pos-emb-head-dim 6 --v-head-dim 4 --qk-layernorm --rope-type rope --mtp-num-layers 1 --swiglu
        --normalization RMSNorm --disable-bias-linear --position-embedding-type rope
        --untie-embeddings-and-output-weights
        --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-layer-freq [0,1,1,1]
        --moe-shared-expert-intermediate-size 32
        --moe-router-score-function sigmoid --moe-router-enable-expert-bias
        --moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall
        --moe-router-dtype fp32""".split(),
    # Attention, MLP, Mamba layers and gated delta nets; the pattern comes with the layout.
    "hybrid": """--mamba-state-dim 4 --mamba-head-dim 8 --mamba-num-groups 2
        --linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 6
        --linear-num-key-heads 2 --linear-num-value-heads 4
        --group-query-attention --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear
        --position-embedding-type rope --untie-embeddings-and-output-weights""".split(),
}
# As Qwen3-Next: gated delta nets, attention behind every few of them, and in between experts with a
# shared one; and a Mamba layer, for their way through a checkpoint.
_MODELS["qwen3-next"] = [
    *_MODELS["hybrid"],
    *"""--hybrid-layer-pattern GE*EM --seq-length 16 --max-position-embeddings 16
        --num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2
        --moe-shared-expert-intermediate-size 32 --moe-shared-expert-gate
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
        --moe-token-dispatcher-type alltoall --moe-router-dtype fp32""".split(),
]

LAYOUTS = {
    "serial": (1, []),
    "tp2": (2, ["--tensor-model-parallel-size", "2"]),
    "tp2-sp": (2, ["--tensor-model-parallel-size", "2", "--sequence-parallel"]),
    "pp2": (2, ["--pipeline-model-parallel-size", "2"]),
    "dp2-distopt": (
        2,
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
    "tp4": (4, ["--tensor-model-parallel-size", "4"]),
    "pp2-vpp": (
        2,
        ["--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"],
    ),
    "cp2": (2, ["--context-parallel-size", "2"]),
    "full-recompute": (
        2,
        "--tensor-model-parallel-size 2 --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1".split(),
    ),
    "selective-recompute": (
        2,
        "--tensor-model-parallel-size 2 --recompute-granularity selective --recompute-modules "
        "layernorm core_attn mlp".split(),
    ),
}
"""Name to number of ranks and the arguments that ask for them."""

EXPERT_LAYOUTS = {
    **{name: LAYOUTS[name] for name in ("serial", "tp2-sp", "pp2")},
    "ep2": (2, ["--expert-model-parallel-size", "2"]),
    "ep2-dp2": (
        4,
        "--expert-model-parallel-size 2 --use-distributed-optimizer --micro-batch-size 1".split(),
    ),
    "ep2-distopt": (
        2,
        "--expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather".split(),
    ),
    "tp2-sp-etp1": (
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1".split(),
    ),
    "etp2": (2, ["--expert-tensor-parallel-size", "2"]),
    "tp2-sp-ep2": (
        4,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2".split(),
    ),
    "pp2-ep2": (
        4,
        "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2 --use-distributed-optimizer".split(),
    ),
}
"""Layouts of models with experts."""


def tiny_gpt(model: str = "llama", *more: str) -> list[str]:
    """Arguments of a run that takes well under a second of computation."""
    return [*_COMMON, *_MODELS[model], *more]
