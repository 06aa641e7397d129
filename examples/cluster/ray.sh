#!/bin/bash
# A cluster of Ray by hand. First on one machine, then on each of the others:
#   bash ray.sh head
#   bash ray.sh worker 10.0.0.1
# Then on the first, with as many workers as there are GPUs, and a folder that all machines see:
#   bash ray.sh train 16 /shared/run1
set -eu
here="$(cd "$(dirname "$0")" && pwd)"
case "$1" in
    head) ray start --head --port=6379 ;;
    worker) ray start --address="$2:6379" ;;
    train) python "$here/../ray_train.py" --address auto --workers "$2" --folder "$3" ;;
    *) echo "usage: ray.sh head | worker HEAD | train WORKERS FOLDER" >&2; exit 2 ;;
esac
