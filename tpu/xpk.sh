#!/usr/bin/env bash
# Starts a run on a GKE cluster with XPK (pip install xpk). XPK restarts it on exit codes 42 and 127 to 255, which is what
# a run gives that a restart can mend; wrong configuration (2), non-finite numbers (3) and too little memory (4) end it.
# usage: PROJECT=... ZONE=... CLUSTER=... IMAGE=... tpu/xpk.sh WORKLOAD [train arguments ...]
#   IMAGE        container image with this checkout in /maxtext-like and `pip install -e '.[tpu,gcs]'` done
#   TPU_TYPE     the slice: v6e-4 (default), v6e-32, ...; XPK starts a pod for every four chips, and GKE tells them of each other
#   NUM_SLICES   how many of them, 1 by default
#   OUTPUT_DIR   where runs and checkpoints lie, so that all hosts and a restart find them: gs://bucket/runs, or a bucket mounted
#                into every container; /runs by default. output_dir=... and run_name=... among the arguments come before it and WORKLOAD
#   DRY_RUN=1    only writes the manifest, to WORKLOAD.yaml
set -euo pipefail
workload="${1:?usage: PROJECT=... ZONE=... CLUSTER=... IMAGE=... tpu/xpk.sh WORKLOAD [train arguments ...]}"
shift
: "${PROJECT:?set PROJECT}" "${ZONE:?set ZONE}" "${CLUSTER:?set CLUSTER}" "${IMAGE:?set IMAGE}"
if [ $# -eq 0 ]; then
  set -- gemma4-tiny
fi
# Words of the caller stand last, and count.
model="$1"
shift
words="$(printf '%q ' "$model" run_name="$workload" output_dir="${OUTPUT_DIR:-/runs}" "$@")"
command="cd /maxtext-like && . tpu/env.sh && exec python train.py ${words% }"
options=(--project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" --workload="$workload" --tpu-type="${TPU_TYPE:-v6e-4}"
  --num-slices="${NUM_SLICES:-1}" --docker-image="$IMAGE" --max-restarts=100 --restart-on-exit-codes=42 --termination-grace-period-seconds=300
  --command="$command")
if [ "${DRY_RUN:-}" = 1 ]; then
  options+=(--dry-run --skip-validation --output-manifest-file="$workload.yaml")
fi
exec xpk workload create "${options[@]}"
