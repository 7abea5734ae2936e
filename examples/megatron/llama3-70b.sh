#!/usr/bin/env bash
# Llama-3 70B on 16 nodes of 8 GPUs; start it through slurm.sh.
#
#   llama3-70b.sh                  trains; DATA_PATH and TOKENIZER_MODEL name your data
#   STRATEGY=stock llama3-70b.sh   the other half of an A/B pair: same data order, same seed
#   DRY_RUN=1 llama3-70b.sh        says what would be built, without GPUs
#   CPU_SMOKE=1 llama3-70b.sh      three iterations of a shrunken model, without GPUs
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
RUN_DIR=${RUN_DIR:-runs/llama3-70b-$STRATEGY-$SEED}

MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
    --num-attention-heads 64 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl transformer_engine
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5
    --context-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)

TRAINING_ARGS=(
    --bf16 --seed "$SEED"
    --micro-batch-size 1 --global-batch-size 1024 --train-iters 250000
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.02
)

if [[ ${CPU_SMOKE:-0} == 1 ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
    OUTPUT_ARGS=(--eval-iters 0 --eval-interval 100 --log-interval 1)
    # The last of two equal flags counts.
    SMOKE_ARGS=(
        --num-layers 4 --hidden-size 64 --ffn-hidden-size 224 --num-attention-heads 8 --num-query-groups 4
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --context-parallel-size 1
        --num-layers-per-virtual-pipeline-stage 1
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
        --vocab-size 128256
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
        torchrun --nnodes "${NNODES:-16}" --nproc-per-node "${GPUS_PER_NODE:-8}"
        --rdzv-backend c10d --rdzv-id "${RDZV_ID:-single-node}"
        --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}"
        -m megatron_scalevec launch "$MEGATRON_DIR/pretrain_gpt.py"
    )
fi

exec "${LAUNCH[@]}" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${SMOKE_ARGS[@]}" \
    --scalevec-strategy "$STRATEGY"
