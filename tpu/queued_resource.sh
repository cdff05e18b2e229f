#!/usr/bin/env bash
# Asks Google Cloud for one TPU host with a queued resource, installs this checkout on it and starts a run there.
# usage: PROJECT=... ZONE=... tpu/queued_resource.sh NAME [train arguments ...]
#   PROJECT, ZONE          where; ZONE must offer v6e, as us-east5-b
#   ACCELERATOR            v6e-8 (default), v6e-4 or v6e-1: the slices that are one host
#   RUNTIME                software of the host
# Every step can be repeated: what exists already is used.
set -euo pipefail
name="${1:?usage: PROJECT=... ZONE=... tpu/queued_resource.sh NAME [train arguments ...]}"
shift
: "${PROJECT:?set PROJECT to the Google Cloud project}" "${ZONE:?set ZONE, as us-east5-b}"
accelerator="${ACCELERATOR:-v6e-8}"
case "$accelerator" in
  v6e-1 | v6e-4 | v6e-8) ;;
  *) echo "ACCELERATOR=$accelerator: slices of several hosts are not supported yet; v6e-1, v6e-4 or v6e-8" >&2; exit 2 ;;
esac
if [ $# -eq 0 ]; then
  set -- gemma4-tiny
fi
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
    FAILED | SUSPENDED)
      echo "$name is $state; see: gcloud compute tpus queued-resources describe $name --zone=$ZONE" >&2
      exit 42 ;;
  esac
  sleep 30
done
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
archive="$(mktemp -d)/maxtext-like.tar.gz"
git -C "$here/.." archive --format=tar.gz --output="$archive" HEAD
$gcloud compute tpus tpu-vm scp "$archive" "$name:maxtext-like.tar.gz" --zone="$ZONE"
# %q keeps every word one word on the other side.
words="$(printf '%q ' "$@")"
$gcloud compute tpus tpu-vm ssh "$name" --zone="$ZONE" --command="set -e
  mkdir -p maxtext-like && tar -xzf maxtext-like.tar.gz -C maxtext-like && cd maxtext-like
  test -d ../venv || python3 -m venv ../venv
  . ../venv/bin/activate && pip install -q -e '.[tpu]' && . tpu/env.sh
  python train.py $words"
