#!/usr/bin/env bash
# A model of DeepSeek-V3's shape (latent attention, 256 experts) on 128 nodes of 8 GPUs; start it
# through slurm.sh. Without its router bias updates across replicas, node-limited routing and FP8.
#
#   deepseek-v3-like.sh                  trains; DATA_PATH and TOKENIZER_MODEL name your data
#   STRATEGY=stock deepseek-v3-like.sh   the other half of an A/B pair: same data order, same seed
#   DRY_RUN=1 deepseek-v3-like.sh        says what would be built, without GPUs
#   CPU_SMOKE=1 deepseek-v3-like.sh      three iterations of a shrunken model, without GPUs
#
# Against a stock launch script one thing is different: "-m megatron_scalevec launch" before pretrain_gpt.py,
# and with it --scalevec-strategy. Above 2 billion parameters nothing is known about the gain: see
# docs/running-at-scale.md before you spend on it.
set -euo pipefail
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec env DRY_RUN=0 scalevec explain "$0" "$@"
fi

STRATEGY=${STRATEGY:-unified}
SEED=${SEED:-1234}
MEGATRON_DIR=${MEGATRON_DIR:-Megatron-LM}
RUN_DIR=${RUN_DIR:-runs/deepseek-v3-like-$STRATEGY-$SEED}

MODEL_ARGS=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432
    --num-attention-heads 128
    --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm
    --num-experts 256 --moe-layer-freq "([0]*3+[1]*58)" --moe-ffn-hidden-size 2048
    --moe-shared-expert-intermediate-size 2048
    --moe-router-topk 8 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-dtype fp32
    --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1
    --seq-length 4096 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 10000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl transformer_engine
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 16
    --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 1
    --expert-model-parallel-size 64
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)

TRAINING_ARGS=(
    --bf16 --seed "$SEED"
    --micro-batch-size 1 --global-batch-size 8192 --train-iters 100000
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.02
)

if [[ ${CPU_SMOKE:-0} == 1 ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
    OUTPUT_ARGS=(--eval-iters 0 --eval-interval 100 --log-interval 1)
    # The last of two equal flags counts.
    SMOKE_ARGS=(
        --num-layers 3 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4
        --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
        --num-experts 4 --moe-layer-freq "([0]*1+[1]*2)" --moe-ffn-hidden-size 24
        --moe-shared-expert-intermediate-size 24 --moe-router-topk 2
        --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1
        --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 1 --global-batch-size 4 --train-iters 3
        --lr-warmup-iters 1 --lr-decay-iters 3
        --make-vocab-size-divisible-by 32
    )
    LAUNCH=(torchrun --nproc-per-node 4 -m megatron_scalevec pretrain)
else
    DATA_ARGS=(
        --data-path "${DATA_PATH:?name an indexed dataset, without its .bin or .idx}"
        --data-cache-path "$RUN_DIR/cache"
        --split "99,1,0"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?name a tokenizer: a folder, or its name on the hub}"
        --vocab-size 129280
    )
    # Checkpoints are loaded from where they are saved, so that a restarted run goes on by itself.
    OUTPUT_ARGS=(
        --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints" --save-interval 1000
        --exit-signal-handler
        --tensorboard-dir "$RUN_DIR/tensorboard" --log-interval 10 --log-throughput
        --eval-interval 1000 --eval-iters 50
    )
    SMOKE_ARGS=()
    # Slurm's script sets the addresses; alone, this is one node.
    LAUNCH=(
        torchrun --nnodes "${NNODES:-128}" --nproc-per-node "${GPUS_PER_NODE:-8}"
        --rdzv-backend c10d --rdzv-id "${RDZV_ID:-single-node}"
        --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}"
        -m megatron_scalevec launch "$MEGATRON_DIR/pretrain_gpt.py"
    )
fi

exec "${LAUNCH[@]}" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${SMOKE_ARGS[@]}" \
    --scalevec-strategy "$STRATEGY"
