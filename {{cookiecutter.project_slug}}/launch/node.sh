#!/usr/bin/env bash
# One node of a job: checks config, data and model, then starts torchrun. Run it on every node, in the project's folder:
#     PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_RDZV_ENDPOINT=first-node:29500 RUN_NAME=a bash launch/node.sh data.batch_size=512
# torchrun takes its options from PET_<OPTION>. RUN_FOLDER (default: runs) must be the same folder on all nodes.
# ONLY=check and ONLY=train do one half.
#
# Exit codes: 0 the run is finished; 2 a person has to change something, nothing was started; 143 (or STOP_CODE) asked to
# stop, start it again to go on; 1 torchrun gave up.
set -euo pipefail
: "${PET_NNODES:?number of nodes}" "${PET_NPROC_PER_NODE:?number of GPUs of a node}" "${RUN_NAME:?name of the run}"
export PET_RDZV_BACKEND=c10d       # the default, static, does not bring nodes together again after a restart
export PET_RDZV_ENDPOINT=${PET_RDZV_ENDPOINT:-${PET_MASTER_ADDR:?name of the first node}:${PET_MASTER_PORT:-29500}}
export PET_RDZV_ID=${PET_RDZV_ID:-$RUN_NAME}
export PET_MAX_RESTARTS=${PET_MAX_RESTARTS:-3}
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR2      # to be passed on: the ranks save and stop
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # nodes may count restarts differently, so every restart needs a new store
run=${RUN_FOLDER:-runs}/$RUN_NAME
set -- train.py run.folder="${RUN_FOLDER:-runs}" run.name="$RUN_NAME" run.resume=auto "$@"

# torchrun restarts whatever fails, so a mistake must show before it starts.
if [ "${ONLY:-check}" = check ]; then
  WORLD_SIZE=$((PET_NNODES * PET_NPROC_PER_NODE)) LOCAL_WORLD_SIZE=$PET_NPROC_PER_NODE python "$@" --check
fi
if [ "${ONLY:-train}" != train ]; then
  exit
fi

torchrun "$@" &
trap 'kill -TERM $!' TERM INT      # a shell does not pass signals on by itself
code=0
wait $! || code=$?
if kill -0 $! 2>/dev/null; then    # the signal interrupted the wait; the ranks are saving
  code=0
  wait $! || code=$?
fi
# If one node is asked to stop, all ranks save and end with 0, and so does torchrun on the other nodes: a job would take
# them for finished and go on without them. The file in the folder of the run tells the difference.
if [ -e "$run/stopped.json" ]; then
  code=${STOP_CODE:-143}
fi
exit "$code"
