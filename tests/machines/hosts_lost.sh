#!/usr/bin/env bash
# Whole hosts lose their power: the one with the learner rank, then the one that is the head.
#
#     tests/machines/hosts_lost.sh
#
# The hosts are those of virtual_hosts.sh; the run folder is on a folder that all share, because the rank is on another host
# than the command. After a checkpoint the rank's host loses its power, gets it back and joins again. The run that goes on
# then loses the head's host, with its command, coordinator and Ray. When that has power again, start_cluster.sh there, the
# line that it prints on the others and the run's own command are given again.
#
# holds: the command names the rank's host and goes on by itself, the second command goes on too, each from the newest
# checkpoint, and the audit passes. Where hosts cannot be made it says so and ends with 0.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
# shellcheck source=tests/machines/virtual_hosts.sh
source tests/machines/virtual_hosts.sh

problem=$(why_impossible)
[[ -z $problem ]] || { echo "hosts_lost: skipped: $problem"; exit 0; }
deploy/setup.sh

begin
share_folder
for number in 1 2 3; do power_on "$number"; done
start_cluster 2 3
metrics=$folder/shared/lost/metrics.jsonl
log=$folder/learner-lost.log
run_it() { run lost /tmp/shared --run.max_steps 1000 --placement.ranks.resources '{"host_2": 1}'; }
# last_step: the newest step that the metrics tell of.
last_step() { tail -n 1 "$metrics" 2>/dev/null | grep -o '"step": *[0-9]*' | grep -o '[0-9]*$' || echo 0; }
is_beyond() { (($(last_step) > $1)); }
# checkpoint: the step of the newest one.
checkpoint() { readlink "$folder/shared/lost/checkpoints/latest" | grep -o '[0-9]*$' || echo 0; }
has_checkpoint() { (($(checkpoint) >= $1)); }

run_it
wait_until 900 "checkpoint of step 5" has_checkpoint 5
wait_until 300 "step 7" is_beyond 6
before=$(last_step)
power_off 2
say "the rank's host has lost its power, at step $before"
power_on 2
join 2
wait_until 600 "step of the run that went on by itself" grep -q "Going on from step" "$log"
wait_until 600 "step $((before + 3))" is_beyond $((before + 2))
grep "Going on from step" "$log"
grep "Going on from step" "$log" | grep -q "$NETWORK.2" || fail "the run did not name the host that lost its power"

before=$(last_step)
saved=$(checkpoint)
power_off 1
wait "$learner" 2>/dev/null || true
learner=
say "the head's host has lost its power, at step $before"
power_on 1
start_cluster 2 3
run_it
wait_until 900 "step $((before + 3))" is_beyond $((before + 2))
say "the run went on from the checkpoint of step $saved or a later one"
on 1 .venv/bin/python -m deploy.runs stop lost
await_end 180
on 1 .venv/bin/python -m learner.audit /tmp/shared/lost || fail "the audit failed"
stop_cluster
echo "hosts_lost: passed"
