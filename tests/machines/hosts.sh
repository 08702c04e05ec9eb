#!/usr/bin/env bash
# A run on three hosts that share no folder, while one is cut off, one loses its power and one joins.
#
#     tests/machines/hosts.sh [--short] [--ipv6] [--losses] [--standstill-s N] [--soak MINUTES [--kills] [--score] [--seed N]]
#
# The hosts are those of virtual_hosts.sh. Only the head, where the learner rank runs, has the quick start's model; the
# others join by the line that start_cluster.sh prints. A run has a rollout server on each host. After
# five steps the link of the second host is cut for 60 s; then the third host loses its power and a fourth one joins. The
# run is stopped when the fourth host's server has answered a run of at least 40 steps.
#
# holds: the audit passes, no two steps are further apart than 20 s (--standstill-s: on a machine that has other work), each
# host's own retriever answered its server, the second host's server is the same process after the cut, the run named the
# third host, the fourth host got the server that the third one had, and only the first host has weights on its disk.
# --short: 12 steps, of which none are disturbed.
# --ipv6: the hosts have no IPv4 address but loopback.
#
# --soak: in place of the cut and the loss, a random nemesis for so many minutes, and a quarter of them before in peace,
# with --kills after it too (tests/chaos/soak/hosts.py says what it does and holds). Each host has a disk of its own of
# 800 MB; a node that ends is begun again as by systemd, and so is the run's command. From an hour on, or with --score, the
# run has a whole warm start and a held-out score.
# Where hosts cannot be made it says so and ends with 0.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/machines/virtual_hosts.sh
source tests/machines/virtual_hosts.sh
# shellcheck source=tests/machines/lost_hosts.sh
source tests/machines/lost_hosts.sh

readonly CUT_S=60
is_short= has_losses= soak_min= kills= has_score= seed=1 standstill_s=20 min_steps=40 search_s=60
while (($#)); do
    case $1 in
        --short) is_short=1 min_steps=12 ;;
        --ipv6) is_ipv6=1 ;;
        --losses) has_losses=1 ;;
        --standstill-s) standstill_s=$2; shift ;;
        --soak) soak_min=$2 standstill_s=100000 min_steps=6 search_s=400 disk_size=800m is_kept=1; shift ;;
        --kills) kills=--kills ;;
        --score) has_score=1 ;;
        --seed) seed=$2; shift ;;
        *) echo "hosts: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
problem=$(why_impossible)
[[ -z $problem ]] || { echo "hosts: skipped: $problem"; exit 0; }
deploy/setup.sh

# searches N: what the host's own retriever says it has answered.
searches() {
    on "$1" .venv/bin/python - <<'PYTHON'
import urllib.request
from pathlib import Path

from protocol.node.home import read_cluster

cluster = read_cluster()
request = urllib.request.Request(cluster.retriever_url.replace("/retrieve", "/metrics"))
request.add_header("Authorization", f"Bearer {Path(cluster.token_file).read_text().strip()}")
text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20).read().decode()
print(int(float(next(line.split()[1] for line in text.splitlines() if line.startswith("sluice_retriever_queries_total")))))
PYTHON
}

# remove_model N: the start of a node makes the quick start's model there, which only the first host shall have. A soak's
# nodes are started again: there it is not looked at.
remove_model() { rm -rf "$folder/$1/tmp/home-$1/quickstart/model"; }

# has_weights N: whether the host's disk has weights of a model.
has_weights() { [[ -n $(find "$folder/$1/tmp" -name '*.safetensors' -print -quit) ]]; }

has_searched() { sleep 2; (($(searches "$1") > 0)); }

disturb() {
    local before after
    wait_until 300 "5 steps" has_steps "$metrics" 5
    before=$(pid_of_server 2)
    cut_link 2
    say "the link of host 2 is cut"
    sleep "$CUT_S"
    mend_link 2
    say "the link of host 2 is back, at step $(steps "$metrics")"
    wait_until 200 "6 steps more" has_steps "$metrics" $(($(steps "$metrics") + 6))
    after=$(pid_of_server 2)
    [[ -n $before && $before == "$after" ]] || fail "host 2 had server process $before before the cut, and ${after:-none} now"
    wait_until 60 "answer of host 3's retriever" has_searched 3
    power_off 3
    say "host 3 has lost its power, at step $(steps "$metrics")"
    power_on 4
    join 4
    remove_model 4
    wait_until 300 "server on host 4" has_server 4
    wait_until 600 "answer of host 4's retriever" has_searched 4
    grep -q "$(address 3)" "$folder/learner-hosts.log" || fail "the run did not name the host that lost its power"
}

soak() {
    local hosts links
    wait_until 300 "5 steps" has_steps "$metrics" 5
    hosts=$(IFS=,; echo "${init[*]}")
    links=$LINK"2,"$LINK"3"
    .venv/bin/python -m tests.chaos.soak.hosts --seed "$seed" --seconds $((soak_min * 60)) $kills --metrics "$metrics" \
        --links "$links" --hosts "$hosts" --disks "$folder/1/tmp,$folder/2/tmp,$folder/3/tmp" || broken="the soak's promises"
    wait_until 400 "6 steps more" is_beyond "$metrics" $(($(last_step "$metrics") + 5))
    say "the run's command was given again $(grep -c "is given again" "$folder/learner-hosts.log" || true) times"
}

first_run() {
    local number broken=  # of the soak; the accounts are looked at all the same
    metrics=$folder/1/tmp/runs/hosts/metrics.jsonl
    [[ -z $soak_min ]] || ((soak_min < 60)) || has_score=1
    [[ -z $has_score ]] || practice=(--policy.warm_start.max_steps 1030 --eval.every_steps 50)
    for number in 2 3; do remove_model "$number"; done
    run hosts /tmp/runs --run.max_steps 100000 --placement.ranks.resources '{"host_1": 1}'
    wait_until 900 "first step" has_steps "$metrics" 1
    for number in 1 2 3; do has_server "$number" || fail "host $number has no rollout server"; done
    if [[ -n $soak_min ]]; then soak; elif [[ -z $is_short ]]; then disturb; fi
    wait_until 900 "$min_steps steps" has_steps "$metrics" "$min_steps"
    for number in "${!init[@]}"; do
        ((number == 1)) || [[ -n $soak_min ]] || ! has_weights "$number" || fail "host $number has weights of the model on its disk"
        wait_until "$search_s" "answer of host $number's retriever" has_searched "$number"
        say "retriever of host $number answered $(searches "$number") queries"
    done
    on 1 .venv/bin/python -m deploy.runs stop hosts
    await_end 120
    on 1 .venv/bin/python -m learner.audit /tmp/runs/hosts || fail "the audit failed"
    [[ -z $broken ]] || fail "$broken"
    .venv/bin/python - "$metrics" "$standstill_s" <<'PYTHON' || fail "training stood still"
import itertools, json, sys

lines = [json.loads(line) for line in open(sys.argv[1])]
times = [line["at_s"] for line in lines if line["step"] > 0]
longest = max(later - earlier for earlier, later in itertools.pairwise(times))
print(f"hosts: steps={len(times)} longest_standstill_s={longest:.1f} run_s={times[-1] - times[0]:.0f}")
sys.exit(longest > float(sys.argv[2]))
PYTHON
}

begin
[[ -z $has_losses ]] || share_folder
for number in 1 2 3; do power_on "$number"; done
start_cluster 2 3
[[ -n $is_short && -n $has_losses ]] || first_run
if [[ -n $has_losses ]]; then
    other=4
    [[ -z $is_short && -z $soak_min ]] || other=3
    lose_rank
    lose_head 2 "$other"
fi
stop_cluster
echo "hosts: passed"
