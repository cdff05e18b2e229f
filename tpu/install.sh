#!/usr/bin/env bash
# Installs this checkout on a TPU VM, into ~/venv, with a Python of at least 3.11: the machine's own, or, where that is older
# (Ubuntu 22.04, on which v6e VMs are made, has 3.10), one that uv brings along. It can be repeated.
# usage: tpu/install.sh && . ~/venv/bin/activate
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv="$HOME/venv"
if ! "$venv/bin/python" -m pip --version > /dev/null 2>&1; then
  rm -rf "$venv" # what a call that failed has left
  for python in python3 python3.13 python3.12 python3.11 uv; do
    if "$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' > /dev/null 2>&1; then
      break
    fi
  done
  if [ "$python" = uv ]; then
    python3 -m pip install -q --user uv
    python3 -m uv venv -q --seed --python 3.12 "$venv"
  else
    "$python" -m venv "$venv"
  fi
fi
"$venv/bin/python" -m pip install -q -e '.[tpu,gcs]'
