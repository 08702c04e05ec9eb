"""Prompts that end the servers that make them, and the sound ones that were on those servers too."""

from pathlib import Path

from tests.learner.coordinator.coordinator_script import Script, settings_of


def many_groups(folder: Path) -> Script:
    """Return a run whose window holds 64 groups."""
    settings = settings_of(run={"max_steps": 50}, learner={"groups_per_step": 32, "max_staleness": 1})
    return Script(folder, settings, num_prompts=1000)


def die(script: Script, server: str = "s1") -> None:
    script.coordinator.lose_server(server, "it died")
    script.advance()


def play(script: Script, killers: set[str], max_deaths: int) -> int:
    """Serve with one server, which dies whenever it has one of these groups; returns how often, once nothing is out."""
    num_deaths = 0
    while leases := script.demand(num_groups=64):
        if killers & {lease.group for lease in leases}:
            num_deaths += 1
            assert num_deaths <= max_deaths
            die(script)
            continue
        for lease in leases:
            script.finish("s1", lease)
    return num_deaths


def skipped(script: Script) -> set[str]:
    return {name for (name,) in script.rows("SELECT \"group\" FROM prompts WHERE state = 'skipped'")}


def test_of_64_groups_on_a_server_that_dies_only_the_one_that_ends_it_is_given_up(tmp_path: Path) -> None:
    """All 64 were once given up after five deaths, 63 of them sound."""
    script = many_groups(tmp_path)
    killer = script.demand(num_groups=64)[17].group
    die(script)
    assert play(script, {killer}, max_deaths=4) == 4
    assert skipped(script) == {killer}
    assert script.states() == {"ready": 64, "skipped": 1}


def test_two_groups_that_end_servers_are_told_apart(tmp_path: Path) -> None:
    script = many_groups(tmp_path)
    killers = {lease.group for lease in script.demand(num_groups=64)[3:5]}
    die(script)
    assert play(script, killers, max_deaths=7) == 7
    assert skipped(script) == killers
    assert script.states() == {"ready": 64, "skipped": 2}


def test_suspects_go_out_one_to_a_server_and_others_beside_them(tmp_path: Path) -> None:
    script = many_groups(tmp_path)
    for _ in range(2):
        suspects = {lease.group for lease in script.demand(num_groups=3)}
        die(script)
    assert len(suspects) == 3
    on_first, on_second = script.demand("s1", num_groups=5), script.demand("s2", num_groups=5)
    for leases in (on_first, on_second):
        assert len(leases) == 5
        assert len(suspects & {lease.group for lease in leases}) == 1
    (first,) = (lease for lease in on_first if lease.group in suspects)
    script.finish("s1", first)
    (last,) = script.demand("s1", num_groups=1)
    assert last.group in suspects - {first.group}
    assert last.group not in {lease.group for lease in on_second}


def test_no_server_gets_two_suspects_though_both_came_up_in_one_turn(tmp_path: Path) -> None:
    script = many_groups(tmp_path)
    for _ in range(2):
        suspects = {lease.group for lease in script.demand(num_groups=64)}
        die(script)
    assert len(suspects) == 64
    assert len(script.demand("s1", num_groups=64)) == 1
    assert script.demand("s1", num_groups=64) == []


def test_death_with_several_suspects_aboard_counts_against_none_of_them(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for lease in script.demand("s1", num_groups=2):
        script.fail("s1", lease, 1)
    for _ in range(2):
        assert [lease.sample_indices for lease in script.demand("s2", num_groups=2)] == [[1], [1]]
        die(script, "s2")
    die(script, "s1")  # it has sample 0 of both, and either may be what ends servers
    counted = script.rows("SELECT server, sample_index, count(*) FROM failures WHERE boundary = 'server' GROUP BY 1, 2")
    assert counted == [("s2", 1, 4)]
    assert script.states() == {"pending": 2}


def test_a_suspect_that_ended_no_server_alone_is_not_given_up(tmp_path: Path) -> None:
    script = many_groups(tmp_path)
    (suspect,) = script.demand(num_groups=1)
    for _ in range(4):
        die(script)
        (again,) = script.demand(num_groups=1)
        assert again.group == suspect.group
    assert skipped(script) == set()
    script.finish("s1", again)
    assert script.states() == {"ready": 1}


def test_suspects_of_an_earlier_start_are_suspects_still(tmp_path: Path) -> None:
    script = Script(tmp_path)
    for _ in range(2):
        suspects = [lease.group for lease in script.demand(num_groups=2)]
        die(script)
    resumed = script.resume(step=0)
    first, other = resumed.demand("s1", num_groups=2)
    assert first.group == suspects[0]
    assert other.group not in suspects
    assert [lease.group for lease in resumed.demand("s2", num_groups=1)] == suspects[1:]


def test_an_evaluations_groups_are_told_apart_too(tmp_path: Path) -> None:
    settings = settings_of(eval={"every_steps": 5, "num_prompts": 8, "samples": 1}, data={"eval": "held_out.jsonl"})
    script = Script(tmp_path, settings, num_held_out=8)
    leases = script.demand(num_groups=8)
    assert {lease.kind for lease in leases} == {"eval"}
    die(script)
    assert play(script, {leases[2].group}, max_deaths=4) == 4
    (line,) = script.metrics()
    assert (line["eval_failed"], line["eval_reward"]) == (1, 0.5)
