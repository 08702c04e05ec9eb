#!/usr/bin/env bash
# deploy/slurm/run.sbatch under a real Slurm of three virtual nodes on this machine.
#
#     tests/machines/slurm.sh
#
# Each node is a slurmd in a network namespace and with a host name of its own (10.77.0.1 to 3); they share this checkout, as
# the nodes of a cluster share a disk. A run of the quick start's settings with two rollout servers is requeued in its middle
# by `scontrol requeue`, then pre-empted by a job of a more urgent partition, and told that its time is up; each time it must
# go on from its checkpoint. At the end all steps must be there once, and the audit must pass.
# Needs root, and slurmctld, slurmd, munge and iproute2 (Debian's packages); without them it says so and ends with 0. It
# takes some eight minutes on two cores. What it makes is in a temporary folder or named sluice-slurm, and gone afterwards.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."

readonly NUM_NODES=3 STEPS=14 BRIDGE=sluice-slurm
for needed in slurmctld slurmd munged mungekey ip unshare; do
    command -v "$needed" >/dev/null || { echo "slurm: skipped: $needed is not installed"; exit 0; }
done
[[ $EUID == 0 ]] || { echo "slurm: skipped: network namespaces need root"; exit 0; }
ip netns add "$BRIDGE-probe" 2>/dev/null || { echo "slurm: skipped: no network namespace can be made here"; exit 0; }
ip netns delete "$BRIDGE-probe"

deploy/setup.sh
folder=$(mktemp -d /tmp/sluice-slurm.XXXXXX)
chmod 755 "$folder"
export SLURM_CONF=$folder/slurm.conf

clean_up() {
    local status=$?
    trap - EXIT
    scancel --user root --full 2>/dev/null && sleep 5 || true
    cat "$folder"/*.pid 2>/dev/null | xargs --no-run-if-empty kill 2>/dev/null || true
    for number in $(seq "$NUM_NODES"); do
        # What a killed job left in a node's namespace ends with the namespace's processes, and nothing else does.
        ip netns pids "$BRIDGE-$number" 2>/dev/null | xargs --no-run-if-empty kill -KILL || true
        ip netns delete "$BRIDGE-$number" 2>/dev/null || true
    done
    ip link delete "$BRIDGE" 2>/dev/null || true
    rm -rf "$PWD/.sluice/slurm/${job:-none}"
    if ((status == 0)); then rm -rf "$folder"; else echo "slurm: logs are in $folder" >&2; fi
    exit "$status"
}
trap clean_up EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

fail() { echo "slurm: $1" >&2; exit 1; }

# wait_until SECONDS WHAT CONDITION...: polls.
wait_until() {
    local seconds=$1 what=$2 began=$SECONDS
    shift 2
    until "$@"; do
        ((SECONDS - began < seconds)) || { tail -n 30 "$folder"/sluice-*.log >&2; fail "no $what within $seconds s"; }
        sleep 1
    done
    echo "slurm: $what after $((SECONDS - began)) s"
}

make_network() {
    ip link add "$BRIDGE" type bridge
    ip address add 10.77.0.254/24 dev "$BRIDGE"
    ip link set "$BRIDGE" up
    printf '127.0.0.1 localhost\n10.77.0.254 control\n' >"$folder/hosts"
    for number in $(seq "$NUM_NODES"); do
        local space=$BRIDGE-$number link=sluice-slurm$number
        printf '10.77.0.%d n%d\n' "$number" "$number" >>"$folder/hosts"
        ip netns add "$space"
        ip link add "$link" type veth peer name eth0 netns "$space"
        ip link set "$link" master "$BRIDGE" up
        ip -n "$space" address add "10.77.0.$number/24" dev eth0
        ip -n "$space" link set eth0 up
        ip -n "$space" link set lo up
    done
}

# as_host NAME CMD...: with the host name NAME, and the addresses of all.
as_host() {
    # shellcheck disable=SC2016  # expanded by the inner shell
    unshare --mount --uts bash -c 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"' \
        host "$1" "$folder/hosts" "${@:2}"
}

start_slurm() {
    mkdir "$folder/state" "$folder/spool"
    mungekey --create --keyfile="$folder/munge.key"
    mkdir -m 755 "$folder/munge"
    install --owner munge --mode 600 /dev/null "$folder/munge.pid"
    chown munge "$folder/munge.key" "$folder/munge"
    setpriv --reuid munge --regid munge --clear-groups munged --foreground --key-file="$folder/munge.key" \
        --socket="$folder/munge/socket" --pid-file="$folder/munge.pid" --log-file="$folder/munge/log" \
        --seed-file="$folder/munge/seed" 2>>"$folder/daemons.log" &
    cat >"$SLURM_CONF" <<CONF
ClusterName=sluice
SlurmctldHost=control(10.77.0.254)
SlurmctldPort=16817
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=5,bf_interval=5
MpiDefault=none
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$NUM_NODES] NodeAddr=10.77.0.[1-$NUM_NODES] Port=16818 CPUs=2
PartitionName=normal Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=9 PreemptMode=OFF
CONF
    as_host control slurmctld -D -f "$SLURM_CONF" 2>>"$folder/daemons.log" &
    for number in $(seq "$NUM_NODES"); do
        as_host "n$number" nsenter --net="/run/netns/$BRIDGE-$number" slurmd -D -f "$SLURM_CONF" -N "n$number" \
            2>>"$folder/daemons.log" &
    done
    wait_until 60 "answer of all nodes" nodes_are_idle
}

nodes_are_idle() { [[ $(as_host control sinfo --noheader --partition normal --states idle --format %D 2>/dev/null) == "$NUM_NODES" ]]; }

has_steps() { [[ -f $folder/runs/slurm/metrics.jsonl ]] && (($(wc -l <"$folder/runs/slurm/metrics.jsonl") >= $1)); }
has_started() { grep -q "start $1 on $NUM_NODES nodes" "$folder"/sluice-*.log 2>/dev/null; }
has_ended() { [[ -z $(as_host control squeue --noheader --jobs "$1" 2>/dev/null) ]]; }

submit() {
    as_host control sbatch --parsable --nodes "$NUM_NODES" --chdir "$PWD" --output "$folder/%x-%j.log" "$@"
}

make_network
start_slurm
export SLUICE_START_OPTIONS="--num-cpus 2"
job=$(submit deploy/slurm/run.sbatch --config quickstart --run.name slurm --run.dir "$folder/runs" --run.max_steps "$STEPS" \
    --policy.warm_start.max_steps 30 --rollout.num_servers 2 --learner.groups_per_step 4 \
    --learner.checkpoint_every_steps 2 --eval.every_steps 0)
wait_until 400 "4 steps" has_steps 4
as_host control scontrol requeue "$job"
wait_until 120 "start after scontrol requeue" has_started 1
wait_until 300 "7 steps" has_steps 7
urgent=$(submit --partition urgent --job-name urgent --wrap "sleep 5")
wait_until 120 "end of the urgent job" has_ended "$urgent"
wait_until 120 "start after pre-emption" has_started 2
wait_until 300 "10 steps" has_steps 10
as_host control scancel --batch --signal USR1 "$job"
wait_until 180 "start after the end of its time" has_started 3
wait_until 400 "end of the job" has_ended "$job"

cat "$folder"/sluice-*.log
.venv/bin/python -m learner.audit "$folder/runs/slurm" || fail "the audit failed"
grep -q "learner.run ended with 0" "$folder/sluice-$job.log" || fail "the run did not end by itself"
echo "slurm: passed"
