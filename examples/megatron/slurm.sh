#!/usr/bin/env bash
# Any of the recipes beside this file on several nodes:
#
#   sbatch --nodes 16 slurm.sh llama3-70b.sh
#   sbatch --nodes 16 --export ALL,STRATEGY=stock slurm.sh llama3-70b.sh     the other half of an A/B pair
#
# CONTAINER names an image for Slurm's container plug-in (pyxis), VENV a virtual environment; without either, the
# environment is that of sbatch. DRY_RUN=1 slurm.sh RECIPE needs neither Slurm nor GPUs.
#SBATCH --job-name=scalevec
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
# Ten minutes before the time is up every process is told so, saves and leaves (--exit-signal-handler).
#SBATCH --signal=TERM@600
set -euo pipefail

RECIPE=${1:?name a recipe, for example llama3-8b.sh}
shift
if [[ ${DRY_RUN:-0} == 1 ]]; then
    exec bash "$RECIPE" "$@"
fi

if [[ -n ${VENV:-} ]]; then
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
fi
CONTAINER_ARGS=()
if [[ -n ${CONTAINER:-} ]]; then
    CONTAINER_ARGS=(--container-image "$CONTAINER" --container-workdir "$PWD")
    CONTAINER_ARGS+=(--container-mounts "${MOUNTS:-$PWD:$PWD}")
fi

# One torchrun per node; they meet at the first node.
export NNODES=$SLURM_JOB_NUM_NODES
# No pipe into head: a list longer than a pipe holds would end the job here, by pipefail.
nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
RDZV_ENDPOINT=${nodes%%$'\n'*}:29500
export RDZV_ENDPOINT
# A requeued job keeps its number, and must not meet its own past.
export RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}

# A restarted job finds its checkpoints where it saved them, and goes on.
srun --kill-on-bad-exit=1 "${CONTAINER_ARGS[@]}" bash "$RECIPE" "$@"
