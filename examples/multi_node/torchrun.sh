#!/usr/bin/env bash
# Starts the ranks of one node. Run the same command on each node:
#
#   HEAD_NODE=node-a NUM_NODES=2 RANKS_PER_NODE=2 \
#     bash examples/multi_node/torchrun.sh examples/multi_node/train.py --checkpoint /shared/run.pt
#
#   HEAD_NODE       name or address of the node that hosts the rendezvous (required)
#   NUM_NODES       2, or 2:4 for at least 2 and at most 4 nodes (default: 2)
#   RANKS_PER_NODE  a number, or auto: one for each GPU, else for each core (default: auto)
#   RDZV_PORT       a port that is free on the head node (default: 29400)
#   JOB_ID          the same text on all nodes of a job (default: ddpx)
#   MAX_RESTARTS    restarts of all ranks when a rank fails (default: 3)
#   LAUNCHER        torchrun, or "ddpx run" for a script that constructs DDP (default: torchrun)
set -euo pipefail

: "${HEAD_NODE:?set HEAD_NODE to the node that hosts the rendezvous}"

# Each attempt gets a store of its own. Otherwise gloo finds addresses of dead ranks after a restart.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# One thread a rank, unless the caller knows better.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

read -ra launcher <<<"${LAUNCHER:-torchrun}"
exec "${launcher[@]}" \
  --nnodes="${NUM_NODES:-2}" \
  --nproc-per-node="${RANKS_PER_NODE:-auto}" \
  --rdzv-backend=c10d \
  --rdzv-endpoint="$HEAD_NODE:${RDZV_PORT:-29400}" \
  --rdzv-id="${JOB_ID:-ddpx}" \
  --max-restarts="${MAX_RESTARTS:-3}" \
  "$@"
