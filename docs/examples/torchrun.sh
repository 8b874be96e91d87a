#!/bin/bash
# On each node: NODES=2 NODE=0 HEAD=host0 WORKERS=8 docs/examples/torchrun.sh SRC DST [OPTIONS of reshard]
set -euo pipefail
source=$1 destination=$2
shift 2
torchrun --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${WORKERS:-2}" \
  --master-addr "${HEAD:-localhost}" --master-port "${PORT:-29511}" --no-python \
  shardctl reshard "$source" "$destination" --worker auto "$@"
# torchrun ends on every node when all workers have ended; one node finishes.
if [ "${NODE:-0}" = 0 ]; then shardctl finish "$destination"; fi
