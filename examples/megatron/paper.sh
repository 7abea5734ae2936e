#!/usr/bin/env bash
# Models as in the paper (arXiv 2605.26895) on one node of 8 GPUs.
#
#   paper.sh 1b                  trains; DATA_PATH and TOKENIZER_MODEL name your data
#   STRATEGY=stock paper.sh 1b   the other half of an A/B pair: same data order, same seed
#   DRY_RUN=1 paper.sh 1b        says what would be built, without GPUs
#   CPU_SMOKE=1 paper.sh 1b      three iterations of a shrunken model, without GPUs
#
# Against a stock launch script one thing is different: "-m megatron_scalevec launch" before pretrain_gpt.py,
# and with it --scalevec-strategy. The shape of the 1B model is the paper's; those of 0.12B and 2B, learning
# rates, lengths and the experts are choices of this script: tune them.
set -euo pipefail
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec env DRY_RUN=0 scalevec explain "$0" "$@"
fi

STRATEGY=${STRATEGY:-unified}
SEED=${SEED:-1234}
MEGATRON_DIR=${MEGATRON_DIR:-Megatron-LM}
OPTIMIZER=${OPTIMIZER:-adam}    # or muon
SCHEDULE=${SCHEDULE:-wsd}       # or cosine
EXPERTS=${EXPERTS:-0}           # a number of experts instead of a dense MLP, two of them per token
SIZE=${1:-1b}                   # 0.12b, 1b, 2b
RUN_DIR=${RUN_DIR:-runs/paper-$SIZE-$OPTIMIZER-$SCHEDULE-experts$EXPERTS-$STRATEGY-$SEED}

case $SIZE in
    0.12b)
        SIZES=(--num-layers 12 --hidden-size 768 --num-attention-heads 12 --ffn-hidden-size 2048)
        LEARNING_RATE=1e-3 ITERATIONS=5000
        ;;
    1b)
        SIZES=(--num-layers 22 --hidden-size 1792 --num-attention-heads 14 --ffn-hidden-size 4778)
        SIZES+=(--untie-embeddings-and-output-weights)
        LEARNING_RATE=5e-4 ITERATIONS=20000
        ;;
    2b)
        SIZES=(--num-layers 24 --hidden-size 2560 --num-attention-heads 20 --ffn-hidden-size 6912)
        SIZES+=(--untie-embeddings-and-output-weights)
        LEARNING_RATE=3e-4 ITERATIONS=40000
        ;;
    *)
        echo "no size $SIZE: 0.12b, 1b or 2b" >&2
        exit 2
        ;;
esac

MODEL_ARGS=(
    "${SIZES[@]}"
    --seq-length 2048 --max-position-embeddings 2048
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0
    --transformer-impl transformer_engine
)
if [[ $EXPERTS != 0 ]]; then
    MODEL_ARGS+=(
        --num-experts "$EXPERTS" --moe-router-topk 2 --moe-aux-loss-coeff 1e-2
        --moe-router-load-balancing-type aux_loss --moe-grouped-gemm --moe-permute-fusion
        --moe-token-dispatcher-type alltoall
    )
fi

# Data parallel only: these models fit on one GPU.
PARALLEL_ARGS=()
if [[ $OPTIMIZER == adam ]]; then
    PARALLEL_ARGS+=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
fi

TRAINING_ARGS=(
    --bf16 --seed "$SEED"
    --micro-batch-size 8 --global-batch-size 512 --train-iters "$ITERATIONS"
    --optimizer "$OPTIMIZER" --lr "$LEARNING_RATE" --min-lr 1e-5 --lr-warmup-iters 500
    --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.02
)
if [[ $SCHEDULE == wsd ]]; then
    TRAINING_ARGS+=(--lr-decay-style WSD --lr-wsd-decay-style linear)
    TRAINING_ARGS+=(--lr-wsd-decay-iters "$((ITERATIONS / 5))")
else
    TRAINING_ARGS+=(--lr-decay-style cosine)
fi

if [[ ${CPU_SMOKE:-0} == 1 ]]; then
    DATA_ARGS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 127)
    OUTPUT_ARGS=(--eval-iters 0 --eval-interval 100 --log-interval 1)
    # The last of two equal flags counts.
    SMOKE_ARGS=(
        --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 96
        --seq-length 32 --max-position-embeddings 32
        --micro-batch-size 1 --global-batch-size 4 --train-iters 3
        --lr-warmup-iters 1 --lr-decay-iters 3 --lr-wsd-decay-iters 1
        --make-vocab-size-divisible-by 32
    )
    LAUNCH=(torchrun --nproc-per-node 2 -m megatron_scalevec pretrain)
else
    DATA_ARGS=(
        --data-path "${DATA_PATH:?name an indexed dataset, without its .bin or .idx}"
        --data-cache-path "$RUN_DIR/cache"
        --split "99,1,0"
        --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model "${TOKENIZER_MODEL:?name a tokenizer: a folder, or its name on the hub}"
        --vocab-size 50304
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
        torchrun --nnodes "${NNODES:-1}" --nproc-per-node "${GPUS_PER_NODE:-8}"
        --rdzv-backend c10d --rdzv-id "${RDZV_ID:-single-node}"
        --rdzv-endpoint "${RDZV_ENDPOINT:-localhost:29500}"
        -m megatron_scalevec launch "$MEGATRON_DIR/pretrain_gpt.py"
    )
fi

exec "${LAUNCH[@]}" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" "${OUTPUT_ARGS[@]}" "${SMOKE_ARGS[@]}" \
    --scalevec-strategy "$STRATEGY"
