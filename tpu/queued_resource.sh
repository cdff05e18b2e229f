#!/usr/bin/env bash
# Asks Google Cloud for a TPU slice with a queued resource, installs this checkout on its hosts and starts a run on all of them.
# What a restart can mend is started again there (tpu/restarting.sh). With several hosts, run_name and an output_dir that all
# of them share are needed: a bucket, output_dir=gs://..., or a mounted disk.
# usage: PROJECT=... ZONE=... tpu/queued_resource.sh NAME [train arguments ...]
#   PROJECT, ZONE          where; ZONE must offer v6e, as us-east5-b
#   ACCELERATOR            v6e-8 (default), v6e-4 or v6e-1: one host; v6e-16 to v6e-256: a host for every four chips
#   RUNTIME                software of the host
# Every step can be repeated: what exists already is used.
set -euo pipefail
name="${1:?usage: PROJECT=... ZONE=... tpu/queued_resource.sh NAME [train arguments ...]}"
shift
: "${PROJECT:?set PROJECT to the Google Cloud project}" "${ZONE:?set ZONE, as us-east5-b}"
accelerator="${ACCELERATOR:-v6e-8}"
case "$accelerator" in
  v6e-1 | v6e-4 | v6e-8)
    if [ $# -eq 0 ]; then
      set -- gemma4-tiny
    fi
    ;;
  v6e-16 | v6e-32 | v6e-64 | v6e-128 | v6e-256)
    case " $*" in
      *[\ .]output_dir=* | *" base_output_directory="*) ;;
      *) echo "$accelerator has several hosts: name a directory that all of them share, as output_dir=gs://bucket/runs" >&2; exit 2 ;;
    esac
    ;;
  *) echo "ACCELERATOR=$accelerator: v6e-1, 4, 8, 16, 32, 64, 128 or 256" >&2; exit 2 ;;
esac
gcloud="gcloud --project=$PROJECT"
if ! $gcloud compute tpus queued-resources describe "$name" --zone="$ZONE" > /dev/null 2>&1; then
  $gcloud compute tpus queued-resources create "$name" --zone="$ZONE" --node-id="$name" \
    --accelerator-type="$accelerator" --runtime-version="${RUNTIME:-v2-alpha-tpuv6e}"
fi
echo "waiting for $name; Ctrl-C and a later call go on from here" >&2
while true; do
  state="$($gcloud compute tpus queued-resources describe "$name" --zone="$ZONE" --format='value(state.state)')"
  case "$state" in
    ACTIVE) break ;;
    FAILED | SUSPENDING | SUSPENDED | DELETING)
      echo "$name is $state; see: gcloud compute tpus queued-resources describe $name --zone=$ZONE" >&2
      exit 42 ;;
  esac
  sleep 30
done
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
archive="$(mktemp -d)/maxtext-like.tar.gz"
git -C "$here/.." archive --format=tar.gz --output="$archive" HEAD
$gcloud compute tpus tpu-vm scp "$archive" "$name:maxtext-like.tar.gz" --zone="$ZONE" --worker=all
# %q keeps every word one word on the other side.
words="$(printf '%q ' "$@")"
$gcloud compute tpus tpu-vm ssh "$name" --zone="$ZONE" --worker=all --command="set -e
  mkdir -p maxtext-like && tar -xzf maxtext-like.tar.gz -C maxtext-like && cd maxtext-like
  tpu/install.sh && . ~/venv/bin/activate && . tpu/env.sh
  tpu/restarting.sh python train.py $words"
