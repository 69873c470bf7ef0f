#!/usr/bin/env bash
# Trains on several nodes with Slurm. Submit it in the project's folder, on a file system that all nodes share:
#     sbatch launch/slurm.sh [section.key=value]...
#     PROCS=4 sbatch --gpus-per-node=0 launch/slurm.sh           nodes without GPUs: four processes on each
#     RUN_NAME=a sbatch --job-name=a --dependency=singleton --no-requeue launch/slurm.sh
#                          submitted several times: a chain of jobs; each continues where the last one stopped
#     SWEEP=sweep.txt sbatch --array=1-8 launch/slurm.sh         a run for each line of the file, such as optim.lr=0.1
#     CONTAINER="apptainer exec --nv image.sif" sbatch launch/slurm.sh          in a container; docs/clusters.md has Pyxis, too
# A job that ends early (time limit, preemption, a lost node, a killed torchrun) is queued again and continues its run.
# After a mistake (exit code 2), a failure that torchrun gave up on (1) or scancel, the job is not queued again.
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun per node; it starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue                  # a requeued job keeps its job id, so it continues its own run
#SBATCH --signal=TERM@120          # two minutes before the time is over, the run saves its step and stops
#SBATCH --open-mode=append         # a requeued job continues the same log
#SBATCH --output=%x-%j.out
set -euo pipefail
read -ra container <<< "${CONTAINER:-}"
if [ -z "${CONTAINER:-}" ]; then     # a container has packages of its own
  # shellcheck source=/dev/null
  source .venv/bin/activate
fi

port=29500
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
  line=$(sed -n "${SLURM_ARRAY_TASK_ID}p" "${SWEEP:?a file with the words of one run in each line}")
  : "${line:?"$SWEEP has no line $SLURM_ARRAY_TASK_ID"}"
  read -ra words <<< "$line"
  set -- "$@" "${words[@]}"
  RUN_NAME=${RUN_NAME:-slurm-$SLURM_ARRAY_JOB_ID}-$SLURM_ARRAY_TASK_ID
  port=$((port + SLURM_ARRAY_TASK_ID % 1000))        # jobs of an array may share a node
fi
export RUN_NAME=${RUN_NAME:-slurm-$SLURM_JOB_ID}
export PET_NNODES=$SLURM_NNODES
export PET_NPROC_PER_NODE=${PROCS:-${SLURM_GPUS_ON_NODE:?"no GPU in this job; PROCS=4 sbatch ... sets the number of processes of a node"}}
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT:-$first_node:$port}
export PET_RDZV_ID=$SLURM_JOB_ID
export STOP_CODE=0                 # a node that has stopped must not make srun kill nodes that are still saving

code=0
LAUNCH_STEP=check srun --output=0 "${container[@]}" bash launch/node.sh "$@" || code=$?
if [ "$code" = 0 ]; then
  LAUNCH_STEP=train srun --kill-on-bad-exit=1 --wait=60 "${container[@]}" bash launch/node.sh "$@" || code=$?
fi

# stopped.json exists if the run was asked to stop before its end. A code above 128: a process was killed, or a node is lost.
if [ "$code" = 0 ] && [ -e "${RUN_FOLDER:-runs}/$RUN_NAME/stopped.json" ] || [ "$code" -gt 128 ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "${MAX_REQUEUES:-50}" ]; then
    echo "error: the job was queued again $SLURM_RESTART_COUNT times; MAX_REQUEUES allows more" >&2
    exit 1
  fi
  scontrol requeue "$SLURM_JOB_ID" || code=143       # refused where --no-requeue was given
fi
exit "$code"
