# Hosts of one machine that share no folder, for a script that sources this file from the checkout.
#
# Each host has its own network, host name, processes, /tmp, /dev/shm, home and checkout (namespaces, joined by a bridge);
# only the installed packages in .venv are common to all, as on machines that are set up alike, and /tmp/shared where a
# script says `share_folder`. Host N is 10.78.0.N (is_ipv6: fd00:78::N) with SLUICE_HOME=/tmp/home-N, so that no path of a home is on two hosts.
# Needs root, iproute2 and the right to make namespaces. What it makes is in a temporary folder or, on this machine's
# network, has the script's pid in its name, so that two scripts may run at once. It is gone at the script's end; where
# that is not 0 the folder stays.

readonly BRIDGE=sluice-$$ LINK=sl-$$h CHECKOUT=$PWD MAX_HOSTS=4  # names of at most 15 characters
declare -A init=() holder=()  # of each host that has power: its first process, and what ends with it, as this machine numbers them
learner=                      # the process of a run's command while one runs
disk_size=                    # of the hosts' own disks, as mount takes it; empty: this machine's disk is theirs
is_ipv6=                      # not empty: hosts have IPv6 addresses alone, but for loopback
is_kept=                      # not empty: what ends is begun again, a node as by systemd, the run's command as by its user

# why_impossible: prints why this machine cannot have hosts, nothing where it can.
why_impossible() {
    local needed
    for needed in ip unshare nsenter; do
        command -v "$needed" >/dev/null || { echo "$needed is not installed"; return; }
    done
    [[ $EUID == 0 ]] || { echo "namespaces need root"; return; }
    unshare --mount --uts --pid --fork --mount-proc --net true 2>/dev/null || echo "no namespaces can be made here"
}

# address N: of a host.
address() { if [[ -n $is_ipv6 ]]; then echo "fd00:78::$1"; else echo "10.78.0.$1"; fi; }
say() { printf '%s: %5d s  %s\n' "$(basename "$0" .sh)" "$SECONDS" "$*"; }
fail() { say "failed: $1" >&2; tail -n 20 "$folder"/learner*.log >&2 2>/dev/null || true; exit 1; }

clean_up() {
    local status=$? number
    trap - EXIT
    for number in "${!holder[@]}"; do kill -KILL "${init[$number]:-${holder[$number]}}" 2>/dev/null || true; done
    wait 2>/dev/null || true
    ip link delete "$BRIDGE" 2>/dev/null || true
    for number in $(seq "$MAX_HOSTS"); do
        mountpoint --quiet "$folder/$number/tmp" || continue
        ((status == 0)) || cp -a "$folder/$number/tmp" "$folder/$number/left" 2>/dev/null || true  # but its sockets
        umount --lazy "$folder/$number/tmp"
    done
    if ((status == 0)); then rm -rf "$folder"; else say "what the hosts left is in $folder" >&2; fi
    exit "$status"
}

# begin: makes the folder of all hosts and their network.
begin() {
    local number
    folder=$(mktemp -d /var/tmp/sluice-hosts.XXXXXX)  # not in /tmp: each host has a /tmp of its own
    trap clean_up EXIT
    trap 'exit 143' TERM
    trap 'exit 130' INT
    echo '127.0.0.1 localhost' >"$folder/names"
    for number in $(seq "$MAX_HOSTS"); do echo "$(address "$number") n$number" >>"$folder/names"; done
    mkdir -m 1777 "$folder/shared"
    # Now: whoever goes on working here would have a host that gets power later refused for its other code.
    git ls-files -z --cached --others --exclude-standard |
        tar --null --files-from=- --ignore-failed-read --create --file "$folder/checkout.tar"
    ip link add "$BRIDGE" type bridge
    ip link set "$BRIDGE" up
    # Otherwise three hosts compile torch and vLLM side by side at each of their starts.
    .venv/bin/python -c 'import deepspeed, ray, vllm.v1.engine.async_llm, vllm.model_executor.models.registry' 2>/dev/null || true
}

# wait_until SECONDS WHAT CONDITION...: polls.
wait_until() {
    local seconds=$1 what=$2 began=$SECONDS
    shift 2
    until "$@"; do
        ((SECONDS - began < seconds)) || fail "no $what within $seconds s"
        [[ -z $learner ]] || kill -0 "$learner" 2>/dev/null || "$@" || fail "the run ended before $what"
        sleep 0.2
    done
    say "$what"
}

# power_on N: a machine of its own, whose first process does nothing but bury others. One that had power before has its disk.
power_on() {
    local number=$1
    local own=$folder/$number
    if [[ ! -d $own ]]; then
        mkdir -p "$own"/{tmp,checkout}
        [[ -z $disk_size ]] || mount -t tmpfs -o "size=$disk_size" tmpfs "$own/tmp"
        chmod 1777 "$own/tmp"
        tar --extract --file "$folder/checkout.tar" --directory "$own/checkout"
        mkdir -m 700 "$own/checkout/.venv" "$own/tmp/home-$number" "$own/tmp/user"
        mkdir "$own/tmp/shared"
    fi
    rm -f "$own/tmp/.is-up"
    # shellcheck disable=SC2016  # expanded by the inner shell
    unshare --mount --uts --net --pid --fork --mount-proc bash -c '
        set -e
        hostname "$1"
        mount --bind "$2/checkout" "$2/checkout"
        mount --bind "$3/.venv" "$2/checkout/.venv"
        mount --rbind "$2/checkout" "$3"
        mount --bind "$2/../names" /etc/hosts
        mount -t tmpfs -o size=2g tmpfs /dev/shm
        [[ ! -e $2/../is-shared ]] || mount --bind "$2/../shared" "$2/tmp/shared"
        mount --rbind "$2/tmp" /tmp
        ip link set lo up
        touch /tmp/.is-up
        while :; do sleep 3600 & wait $! || true; done' host "n$number" "$own" "$CHECKOUT" 2>"$folder/host-$number.log" &
    holder[$number]=$!
    wait_until 60 "host $number" test -e "$own/tmp/.is-up"
    init[$number]=$(pgrep -P "${holder[$number]}")
    # A machine keeps its network card: others would send to the old one for some 10 s.
    ip link add "$LINK$number" type veth peer name eth0 address "02:00:0a:4e:00:0$number" netns "${init[$number]}"
    ip link set "$LINK$number" master "$BRIDGE" up
    if [[ -n $is_ipv6 ]]; then
        on "$number" ip address add "$(address "$number")/64" dev eth0 nodad  # of use at once
    else
        on "$number" ip address add "$(address "$number")/24" dev eth0
    fi
    on "$number" ip link set eth0 up
}

# power_off N: nothing of the host says good-bye to anybody.
power_off() {
    ip link set "$LINK$1" down
    kill -KILL "${init[$1]}"
    wait "${holder[$1]}" 2>/dev/null || true
    ip link delete "$LINK$1" 2>/dev/null || true
    unset "init[$1]" "holder[$1]"
}

cut_link() { ip link set "$LINK$1" down; }
mend_link() { ip link set "$LINK$1" up; }
# share_folder: hosts that get power from now on have the same /tmp/shared.
share_folder() { touch "$folder/is-shared"; }

# on N CMD...: on that host, in its checkout, with its own SLUICE_HOME.
on() {
    local number=$1
    shift
    # shellcheck disable=SC2016  # expanded by the inner shell; the host's folder of that path is entered there
    nsenter --target "${init[$number]}" --mount --uts --net --pid \
        env HOME=/tmp/user SLUICE_HOME="/tmp/home-$number" OMP_NUM_THREADS=1 bash -c 'cd "$1" && shift && exec "$@"' on "$CHECKOUT" "$@"
}

# start_head: host 1's part of the cluster; sets join_line to what its start printed.
start_head() {
    start 1 deploy/start_cluster.sh --node-ip "$(address 1)"
    join_line=.venv/bin/$(grep -o 'sluice start --join [^ ]*' "$folder/start-1.log")
    say "the head says: $join_line"
}

# join N: with the head's file copied to the path that the line names, as scp -p would.
join() {
    local number=$1
    local file=${join_line##* }
    mkdir -p -m 700 "$(dirname "$folder/$number$file")"
    cp -p "$folder/1$file" "$folder/$number$file"
    # shellcheck disable=SC2086  # a line, as it was printed
    start "$number" $join_line
    say "host $number has joined"
}

# start N CMD...: start_cluster.sh there. Twice: Ray gives its processes 30 s to start, which a busy machine may need.
start() {
    local number=$1
    shift
    local command=("$@" --num-cpus 2 --resources "{\"server\": 1, \"host_$number\": 1}")
    if [[ -n $is_kept ]]; then
        rm -f "$folder/start-$number.log"  # of an earlier start
        # shellcheck disable=SC2016  # expanded by the inner shell, which ends with the host; 2 s as deploy/systemd has it
        on "$number" bash -c 'until "$@" --block; do sleep 2; done' kept "${command[@]}" >"$folder/start-$number.log" 2>&1 &
        wait_until 300 "start of host $number" grep -q "Running until" "$folder/start-$number.log"
        return
    fi
    on "$number" "${command[@]}" >"$folder/start-$number.log" 2>&1 || on "$number" "${command[@]}" >"$folder/start-$number.log" 2>&1 ||
        fail "host $number did not start: $(tail -n 3 "$folder/start-$number.log")"
}

# start_cluster N...: the head, and these hosts side by side.
start_cluster() {
    local number joining=()
    start_head
    for number in "$@"; do join "$number" & joining+=($!); done
    for number in "${joining[@]}"; do wait "$number"; done
    on 1 .venv/bin/python -m deploy.cluster wait-nodes $(($# + 1))
}

# stop_cluster: of all hosts that have power.
stop_cluster() {
    local number
    for number in "${!init[@]}"; do on "$number" deploy/stop_cluster.sh >/dev/null || fail "host $number did not stop"; done
}

# run NAME DIR [OPTION...]: a run of the quick start's settings by host 1, with a rollout server on each of three hosts, in the background.
# An eighth of its groups a step, and so of its learning rate: with all of that a policy unlearns in hundreds of such steps.
practice=(--policy.warm_start.max_steps 30 --eval.every_steps 0)
run() {
    local name=$1 dir=$2
    shift 2
    command_of_run 1 .venv/bin/python -m learner.run --config quickstart --run.name "$name" --run.dir "$dir" \
        "${practice[@]}" --rollout.num_servers 3 --placement.servers.resources '{"server": 1}' \
        --learner.groups_per_step 4 --learner.lr 5e-5 --learner.checkpoint_every_steps 5 "$@" >>"$folder/learner-$name.log" 2>&1 &
    learner=$!
}

# command_of_run N CMD...: on that host; where things are kept it is given again until it ends well.
command_of_run() {
    local status
    while :; do
        status=0
        on "$@" || status=$?
        [[ $status != 0 && -n $is_kept && -d /proc/${init[$1]} ]] || return "$status"
        say "the run's command ended with $status and is given again"
        sleep 2
    done
}

# await_end SECONDS: of the run; it must end with 0.
await_end() {
    local status=0
    wait_until "$1" "end of the run" has_ended
    wait "$learner" || status=$?
    learner=
    ((status == 0)) || fail "the run ended with $status"
}

has_ended() { ! kill -0 "$learner" 2>/dev/null; }
# steps FILE: how many a run's metrics, at a path of this machine, tell of.
steps() { grep -c '"policy/loss"' "$1" 2>/dev/null || true; }
has_steps() { local found; found=$(steps "$1"); ((${found:-0} >= $2)); }

# pid_of_server N: of the rollout server on a host, as the host numbers processes; empty where there is none.
pid_of_server() { on "$1" pgrep -f 'ray::RolloutServer' | head -1 || true; }
has_server() { [[ -n $(pid_of_server "$1") ]]; }
