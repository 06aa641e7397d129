#!/bin/bash
# Two machines without a scheduler. The same command on both, in any order; the first address is that of one of them:
#   bash two_nodes.sh 10.0.0.1 train.py --my-argument
# They meet at its port 29400; the ranks connect to each other on ports that the system chooses.
set -eu
address="$1"
shift
exec unsloth-multigpu run --nnodes 2 --rdzv-endpoint "$address:29400" --rdzv-id two-nodes -- "$@"
