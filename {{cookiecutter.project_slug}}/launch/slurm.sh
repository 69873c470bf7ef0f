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
#SBATCH --signal=TERM@120          # two minutes before the time is over, the run saves its step and stops
#SBATCH --open-mode=append         # a requeued job goes on in the same log
#SBATCH --output=%x-%j.out
set -euo pipefail
source .venv/bin/activate

# Nodes may count restarts differently, so every restart needs a new store; a prefix in the old store is not enough.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
code=0
srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=gpu --max-restarts=3 \
  --signals-to-handle=SIGTERM,SIGINT,SIGUSR2 \
  --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first_node:29500" \
  train.py run.name="slurm-$SLURM_JOB_ID" run.resume=auto "$@" || code=$?

# The file is there if the run was asked to stop before it was done. `runs` is run.folder. scancel ends the job for good.
if [ -e "runs/slurm-$SLURM_JOB_ID/stopped.json" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
