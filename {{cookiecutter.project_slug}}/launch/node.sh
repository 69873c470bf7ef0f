#!/usr/bin/env bash
# One node of a job: checks config, data and model with one process, then starts torchrun. Run it on every node, in the project's folder:
#     PET_NNODES=2 PET_NPROC_PER_NODE=8 PET_RDZV_ENDPOINT=first-node:29500 RUN_NAME=a bash launch/node.sh data.batch_size=512
# torchrun takes its options from PET_<OPTION>. RUN_FOLDER (default: runs) must be the same folder on all nodes.
# LAUNCH_STEP=check only checks, LAUNCH_STEP=train only trains. PET_NNODES=1:2: nodes may leave and join while the job runs,
# but the node of PET_RDZV_ENDPOINT must stay.
#
# Exit codes: 0 the run is finished; 2 a person has to change something, nothing was started; 143 (or STOP_CODE) stopped on
# request, start the script again to continue; 1 torchrun gave up.
set -euo pipefail
: "${PET_NNODES:?number of nodes}" "${PET_NPROC_PER_NODE:?number of GPUs of a node}" "${RUN_NAME:?name of the run}"
: "${PET_RDZV_ENDPOINT:?name of the first node, and a port}"
export PET_RDZV_BACKEND=c10d       # the default, static, does not reconnect nodes after a restart
export PET_RDZV_ID=${PET_RDZV_ID:-$RUN_NAME}
if [[ $PET_NNODES == *:* ]]; then
  export PET_MAX_RESTARTS=${PET_MAX_RESTARTS:-30}        # each node that leaves costs one, each that joins costs none
  export PET_RDZV_CONF=${PET_RDZV_CONF:-last_call_timeout=5}     # seconds to wait for more nodes; they may come later
fi
export PET_MAX_RESTARTS=${PET_MAX_RESTARTS:-3}
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGUSR2      # torchrun passes these on: the ranks save and stop
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # nodes may count restarts differently, so every restart needs a new store
# torchrun gives the ranks the name of its machine, and waits forever if this name has no address.
if [ -z "${PET_LOCAL_ADDR:-}" ] && ! python -c "import socket; socket.getaddrinfo(socket.gethostname(), None)" 2>/dev/null; then
  if [ "$PET_NNODES" = 1 ]; then
    export PET_LOCAL_ADDR=127.0.0.1
  else
    echo "warning: the host name of this node has no address; set PET_LOCAL_ADDR to one that the other nodes can reach" >&2
  fi
fi
run=${RUN_FOLDER:-runs}/$RUN_NAME
set -- train.py run.folder="${RUN_FOLDER:-runs}" run.name="$RUN_NAME" run.resume=auto "$@"

# torchrun restarts any failure, so a mistake must be found before it starts. This process takes the number of ranks from
# PET_NNODES and PET_NPROC_PER_NODE, and checks the sizes for it (for min:max nodes, for both numbers).
if [ "${LAUNCH_STEP:-check}" = check ]; then
  python "$@" run.check=true
fi
if [ "${LAUNCH_STEP:-train}" != train ]; then
  exit
fi

# Each rank runs on the CPUs next to its GPU. NUMA_BINDING= leaves the ranks free.
numa=""
if nvidia-smi -L >/dev/null 2>&1; then
  numa=${NUMA_BINDING-node}
fi
if [ -n "$numa" ] && ! command -v numactl >/dev/null; then
  echo "warning: numactl is not installed, so the ranks are not bound to the CPUs next to their GPUs" >&2
  numa=""
fi
if [ -n "$numa" ] && [[ $(torchrun --help) != *--numa-binding* ]]; then
  echo "warning: torchrun of this version does not bind ranks to the CPUs next to their GPUs" >&2
  numa=""
fi
torchrun ${numa:+"--numa-binding=$numa"} "$@" &
asked=0
trap 'asked=1; kill -TERM $!' TERM INT     # a shell does not pass signals on by itself
code=0
wait $! || code=$?
if kill -0 $! 2>/dev/null; then    # the signal interrupted the wait; the ranks are saving
  code=0
  wait $! || code=$?
fi
# torchrun ends with 1 if it was asked to stop, and with 0 if its ranks were asked. A file in the run's folder says that the
# ranks have saved.
if [ -e "$run/stopped.json" ]; then
  code=${STOP_CODE:-143}
elif [ "$((asked * code))" != 0 ]; then    # before the first step
  code=143
fi
exit "$code"
