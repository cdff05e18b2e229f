#!/usr/bin/env bash
# Two steps of a model with the finiteness check: loss, every gradient, every parameter after the update, loss again.
# usage: tpu/finiteness_check.sh [MODEL or model file] [further files and key=value ...]
# Exit code 0: everything is finite; 3: something is not, with names and remedies; see docs for the others.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
. "$here/env.sh"
model="${1:-gemma3-4b}"
shift || true
cd "$here/.."
exec python train.py "$model" steps=2 finite_check_steps=2 enable_checkpointing=false \
  run_name="finiteness-$(basename "$model" .yml)" "$@"
