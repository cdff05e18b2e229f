#!/usr/bin/env bash
# Runs a command, and again while it ends with an exit code that a restart can mend: 42, 137 and 143, as gpu/train.sbatch.
# All hosts of a run end with the same code, and wait for each other at the start. After a signal that came to this script too,
# as Ctrl-C or the end of the machine, there is no restart.
# usage: tpu/restarting.sh python train.py MODEL ... run_name=NAME
#   MAX_RESTARTS   100 by default
#   PAUSE          seconds before a restart, 10 by default
set -uo pipefail
stop=
trap 'stop=1' TERM INT HUP # heard when the command has ended, which was told itself
for ((restart = 1; ; restart++)); do
  "$@"
  code=$?
  case "$code" in
    42 | 137 | 143) ;;
    *) exit "$code" ;;
  esac
  if [ -n "$stop" ] || [ "$restart" -gt "${MAX_RESTARTS:-100}" ]; then
    exit "$code"
  fi
  echo "exit code $code: restart $restart in ${PAUSE:-10} s"
  sleep "${PAUSE:-10}"
done
