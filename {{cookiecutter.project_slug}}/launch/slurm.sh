#!/usr/bin/env bash
# sbatch launch/slurm.sh [section.key=value]...     from the project's folder, on a file system that all nodes share
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun a node; it starts a process for each GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue                  # a requeued job keeps its id, so it goes on with its own run
#SBATCH --output=%x-%j.out
set -euo pipefail
source .venv/bin/activate

# Nodes may count restarts differently, so each restart needs a store of its own rather than a prefix in an old one.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=gpu --max-restarts=3 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:29500" \
  train.py run.name="slurm-$SLURM_JOB_ID" run.resume=auto "$@"
