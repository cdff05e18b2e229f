#!/usr/bin/env bash
# Runs a command with a Slurm of two virtual nodes (n1, n2). Each node has eight GPUs, which are plain files. Nothing is left
# behind: daemons, configuration and, with INSTALL_SLURM=1, Debian's packages are in a namespace and on a tmpfs, which end with
# the command.
# usage: tests/launch/in_slurm.sh COMMAND ...        root, on Linux
# exit codes: 77 if Slurm is not available and cannot be set up (the reason is printed), otherwise that of the command
set -euo pipefail
if [ -z "${IN_SLURM:-}" ]; then
  [ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 77; }
  unshare --mount --pid --fork true || { echo "unshare is not allowed here" >&2; exit 77; }
  IN_SLURM=1 exec unshare --mount --pid --fork --kill-child --mount-proc "$0" "$@"
fi

cannot() { # cannot REASON
  echo "$1" >&2
  exit 77
}

trap 'cannot "$0:$LINENO: failed"' ERR
layers=/dev/shm # a tmpfs is mounted over it
mount -t tmpfs tmpfs "$layers" || cannot "no tmpfs can be mounted"
for place in etc usr var run; do
  mkdir "$layers/$place" "$layers/$place.work"
  mount -t overlay overlay -o "lowerdir=/$place,upperdir=$layers/$place,workdir=$layers/$place.work" "/$place" ||
    cannot "no overlay can be mounted over /$place"
done
export PATH="$PATH:/usr/sbin:/sbin"
if ! command -v slurmctld slurmd sbatch munged > /dev/null; then
  [ "${INSTALL_SLURM:-}" = 1 ] ||
    cannot "Slurm is not installed: apt-get install slurmctld slurmd slurm-client munge, or INSTALL_SLURM=1 for this test alone"
  printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d # no daemon is started by a package
  chmod +x /usr/sbin/policy-rc.d
  packages=(timeout 120 apt-get install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge)
  export DEBIAN_FRONTEND=noninteractive
  "${packages[@]}" > "$layers/apt" 2>&1 || { timeout 120 apt-get update -qq && "${packages[@]}"; } > "$layers/apt" 2>&1 ||
    cannot "apt-get cannot install Slurm: $(tail -n 1 "$layers/apt")"
fi

host="$(hostname -s)"
echo "127.0.0.1 n1 n2 $host" >> /etc/hosts
mkdir -p /etc/slurm /run/munge /var/spool/slurmctld /var/spool/slurmd.n1 /var/spool/slurmd.n2 /var/log/slurm "$layers/gpus"
touch "$layers/gpus/gpu"{0..7}
chown munge:munge /run/munge
[ -s /etc/munge/munge.key ] || install -o munge -g munge -m 400 <(head -c 1024 /dev/urandom) /etc/munge/munge.key
# A requeued job waits until its credentials expire. The default is two minutes, so cred_expire is set to 5 s.
cat > /etc/slurm/slurm.conf << END
ClusterName=ci
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmdPidFile=/run/slurmd.%n.pid
SlurmdLogFile=/var/log/slurm/slurmd.%n.log
SlurmctldLogFile=/var/log/slurm/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
JobRequeue=1
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2
NodeName=n[1-2] NodeHostname=$host NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=96 RealMemory=4000 Gres=gpu:h200:8
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
END
cat > /etc/slurm/gres.conf << END
AutoDetect=off
NodeName=n[1-2] Name=gpu Type=h200 File=$layers/gpus/gpu[0-7]
END
echo CgroupAutomount=no > /etc/slurm/cgroup.conf
runuser -u munge -- munged || cannot "munged does not start"
slurmctld || cannot "slurmctld does not start"
slurmd -N n1 && slurmd -N n2 || cannot "slurmd does not start"
for _ in {1..60}; do
  [ "$(sinfo --noheader --Node --states=idle 2> /dev/null | wc -l)" != 2 ] || break
  sleep 0.5
done
[ "$(sinfo --noheader --Node --states=idle | wc -l)" = 2 ] ||
  cannot "the nodes do not come up: $(sinfo --noheader -o '%N %T %E'; tail -n 5 /var/log/slurm/*)"
trap - ERR
"$@"
