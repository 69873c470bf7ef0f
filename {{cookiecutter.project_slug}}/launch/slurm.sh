#!/usr/bin/env bash
# Trains on several nodes with Slurm. Submit it in the project's folder, on a file system that all nodes share:
#     sbatch launch/slurm.sh [section.key=value]...
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun per node; it starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue                  # a requeued job keeps its job id, so it continues its own run
#SBATCH --output=%x-%j.out
set -euo pipefail
source .venv/bin/activate

# Nodes may count restarts differently, so every restart needs a new store; a prefix in the old store is not enough.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=gpu --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:29500" \
  train.py run.name="slurm-$SLURM_JOB_ID" run.resume=auto "$@"
