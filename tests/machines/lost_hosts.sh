# What hosts.sh does to whole hosts: the one with the learner rank loses its power, then the one that is the head.
#
# For a script that has sourced virtual_hosts.sh, on a cluster of host 1 (its head), host 2 and another one with a server.
# Run folder and demonstrations are in /tmp/shared, because the rank is on another host than the command. Each loss costs at
# most the steps since the checkpoint that there was when the power went.

# last_step FILE: the newest step that a run's metrics, at a path of this machine, tell of.
last_step() { tail -n 1 "$1" 2>/dev/null | grep -o '"step": *[0-9]*' | grep -o '[0-9]*$' || echo 0; }
is_beyond() { (($(last_step "$1") > $2)); }
# checkpoint FOLDER: the step of a run's newest one.
checkpoint() { readlink "$1/checkpoints/latest" | grep -o '[0-9]*$' | sed 's/^0*//' || echo 0; }
has_checkpoint() { (($(checkpoint "$1") >= $2)); }

run_lost() {
    run lost /tmp/shared --run.max_steps 1000 --placement.ranks.resources '{"host_2": 1}' \
        --policy.warm_start.data /tmp/shared/warmstart.jsonl
}

# lose_rank: the run waits for the rank's host, saying so, and goes on by itself once that has joined again.
lose_rank() {
    local lost=$folder/shared/lost log=$folder/learner-lost.log before saved from
    cp "$folder/1/tmp/home-1/quickstart/warmstart.jsonl" "$folder/shared/"
    run_lost
    wait_until 900 "checkpoint of step 5" has_checkpoint "$lost" 5
    wait_until 300 "step 7" is_beyond "$lost/metrics.jsonl" 6
    before=$(last_step "$lost/metrics.jsonl")
    saved=$(checkpoint "$lost")
    power_off 2
    say "the rank's host has lost its power, at step $before; there is a checkpoint of step $saved"
    wait_until 300 "word of the loss" grep -q "Resuming from step" "$log"
    grep "Resuming from step" "$log" | cut -c1-400
    grep "Resuming from step" "$log" | grep -q "$(address 2)" || fail "the run did not name the host that lost its power"
    from=$(grep -o "Resuming from step [0-9]*" "$log" | head -n 1 | grep -o '[0-9]*$')
    ((from >= saved)) || fail "the run goes on from step $from, older than its checkpoint of step $saved"
    wait_until 240 "word of what is waited for" grep -q "waiting for nodes: .*host_2" "$log"
    power_on 2
    join 2
    wait_until 600 "step $((before + 2))" is_beyond "$lost/metrics.jsonl" $((before + 1))
}

# lose_head OTHERS...: the same command goes on once the head is started again and these hosts have joined it.
lose_head() {
    local lost=$folder/shared/lost log=$folder/learner-lost.log before saved shown first
    before=$(last_step "$lost/metrics.jsonl")
    saved=$(checkpoint "$lost")
    power_off 1
    wait "$learner" 2>/dev/null || true
    learner=
    shown=$(wc -l <"$log")
    say "the head's host has lost its power, at step $before; there is a checkpoint of step $saved"
    power_on 1
    start_cluster "$@"
    run_lost
    wait_until 900 "step $((before + 2))" is_beyond "$lost/metrics.jsonl" $((before + 1))
    first=$(tail -n +$((shown + 1)) "$log" | grep -o ' step=[0-9]*' | head -n 1 | grep -o '[0-9]*$')
    ((first > saved)) || fail "the run went on with step $first, and its checkpoint was of step $saved"
    on 1 .venv/bin/python -m deploy.runs stop lost
    await_end 180
    on 1 .venv/bin/python -m learner.audit /tmp/shared/lost || fail "the audit failed"
}
