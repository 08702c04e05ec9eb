"""Finished turns of samples that go on: kept, fenced, given to the next server, and forgotten in time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from learner.coordinator.groups.group import LeaseStamp
from learner.coordinator.groups.kept_turns import FinishedTurns, fitting
from protocol.wire import messages as m
from protocol.wire.conversation import ConversationPart, FinishedTurn
from protocol.wire.trajectory import VersionSpan
from tests.learner.coordinator.coordinator_script import Script, settings_of


def part_of(lease: m.Lease, turn: int, version: int = 0, **changes: Any) -> tuple[ConversationPart, list[bytes]]:
    """Return turn 1, 2, .. of a lease's sample 0: behind a prompt of 2 tokens, 3 of the turn and 1 of the reply."""
    first = 0 if turn == 1 else 2 + 4 * (turn - 1)
    start = 2 + 4 * (turn - 1)
    values = {
        "group": lease.group,
        "sample_index": 0,
        "attempt": lease.attempt,
        "first_token": first,
        "num_tokens": start + 4 - first,
        "num_prompt_tokens": 2,
        "version_spans": [VersionSpan(start, start + 3, version)],
        "turns": [FinishedTurn(start, start + 3, "stop", None)],
        "snapshot": f'{{"turns":{turn}}}',
        "started_at": 5.0,
        "generate_s": 0.5 * turn,
        "environment_s": 0.25,
        **changes,
    }
    mask = np.array(([0, 0] if turn == 1 else []) + [1, 1, 1, 0], np.uint8)
    tokens = np.arange(first, first + len(mask), dtype=np.int32)
    return ConversationPart(**values), [tokens.tobytes(), (-0.5 * mask).astype(np.float32).tobytes(), mask.tobytes()]


def tell(script: Script, server: str, part: tuple[ConversationPart, list[bytes]]) -> m.KeptSample:
    """Have a server tell one part; returns the answer to it."""
    script.tell(server, m.TurnsDone(**script.stamp, parts=[part[0]]), part[1])
    (answer,) = script.take(server, m.TurnsKept)
    return answer.samples[0]


def turns_of(lease: m.Lease) -> int | None:
    """Return how many turns of sample 0 a lease goes on from; None: it begins anew."""
    parts = {part.sample_index: part for part in lease.resumed or []}
    return len(parts[0].turns) if 0 in parts else None


def leased_again(script: Script, group: str, server: str = "s2", version: int = 0) -> m.Lease:
    (lease,) = script.demand(server, num_groups=1, version=version)
    assert lease.group == group
    return lease


def first_lease(script: Script, version: int = 0) -> m.Lease:
    return script.demand("s1", num_groups=1, version=version)[0]


def die(script: Script, server: str) -> None:
    script.coordinator.lose_server(server, "it died")
    script.advance()


def test_another_server_is_given_the_turns_of_one_that_died_and_their_arrays(script: Script) -> None:
    lease = first_lease(script)
    for turn in (1, 2, 3):
        assert tell(script, "s1", part_of(lease, turn)) == m.KeptSample(lease.group, 0, 1, 2 + 4 * turn, True)
    die(script, "s1")
    script.tell("s2", m.Demand(**script.stamp, num_groups=9, policy_version=0, heard_of_lease=0, leases={}))
    script.advance()
    sent, buffers = next(
        (message, frames)
        for _, message, frames in script.mail
        if isinstance(message, m.Lease) and message.group == lease.group
    )
    assert sent.sample_indices == [0, 1]
    (part,) = sent.resumed or []
    assert (part.first_token, part.num_tokens, part.snapshot, part.generate_s) == (0, 14, '{"turns":3}', 1.5)
    assert [(turn.start, turn.end) for turn in part.turns] == [(2, 5), (6, 9), (10, 13)]
    assert [(span.start, span.end) for span in part.version_spans] == [(2, 5), (6, 9), (10, 13)]
    assert np.frombuffer(buffers[0], np.int32).tolist() == list(range(14))
    assert np.frombuffer(buffers[2], np.uint8).tolist() == [0, 0, *(3 * [1, 1, 1, 0])]
    assert script.coordinator.counts["resumed"] == 1


def test_a_part_that_was_lost_on_the_way_is_told_by_what_is_kept(script: Script) -> None:
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    assert tell(script, "s1", part_of(lease, 3)).num_tokens == 6
    tell(script, "s1", part_of(lease, 2))
    assert tell(script, "s1", part_of(lease, 3)).num_tokens == 14


def test_a_part_that_comes_twice_is_kept_once(script: Script) -> None:
    lease = first_lease(script)
    for turn in (1, 2, 2, 1):
        tell(script, "s1", part_of(lease, turn))
    die(script, "s1")
    assert turns_of(leased_again(script, lease.group)) == 1  # the part of turn 1 came last: what was behind it is gone


def test_a_server_that_only_stood_still_hears_that_the_sample_is_anothers(script: Script) -> None:
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    die(script, "s1")
    again = leased_again(script, lease.group)
    late = tell(script, "s1", part_of(lease, 2))
    assert (late.is_yours, late.num_tokens) == (False, 0)
    assert tell(script, "s2", part_of(again, 2)).num_tokens == 10


def test_turns_of_a_group_that_is_accounted_for_are_nobodys(script: Script) -> None:
    lease = first_lease(script)
    part, arrays = part_of(lease, 1)
    assert not tell(script, "s1", part_of(lease, 1, group="e0-none")).is_yours
    script.finish("s1", lease)
    assert not tell(script, "s1", (part, arrays)).is_yours


def test_turns_that_arrive_after_their_server_was_lost_are_kept_until_the_sample_goes_out(script: Script) -> None:
    lease = first_lease(script)
    die(script, "s1")
    assert tell(script, "s1", part_of(lease, 1)).is_yours
    assert turns_of(leased_again(script, lease.group, "s2")) == 1


def test_a_sample_that_failed_begins_anew(script: Script) -> None:
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    script.fail("s1", lease, 0)
    assert turns_of(leased_again(script, lease.group, "s1")) is None


@pytest.mark.parametrize(("num_told", "num_wasted"), [(5, 5), (0, 3)])
def test_tokens_of_a_sample_that_failed_are_wasted_once(script: Script, num_told: int, num_wasted: int) -> None:
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    die(script, "s1")
    again = leased_again(script, lease.group, "s2")
    place = {"group": lease.group, "sample_index": 0, "attempt": again.attempt}
    failed = m.SampleFailed(**script.stamp, **place, boundary="engine", detail="503", num_model_tokens=num_told)
    script.tell("s2", failed)
    assert script.rows("SELECT reason, num_tokens FROM waste") == [("failed", num_wasted)]


def test_turns_that_are_too_old_for_the_window_are_not_gone_on_from(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 1, "max_staleness": 0}))
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    die(script, "s1")
    group = script.coordinator._groups.training[lease.group]
    assert script.coordinator._turns.resume(group, 1) == []
    assert script.rows("SELECT reason, num_tokens FROM waste") == [("stale", 3)]


def test_a_group_that_goes_on_is_as_old_as_its_kept_turns(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(learner={"groups_per_step": 1, "max_staleness": 1}))
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    die(script, "s1")
    group = script.coordinator._groups.training[lease.group]
    (kept,) = script.coordinator._turns.resume(group, 1)
    assert turns_of(group.lease_to("s2", 1, script.now, LeaseStamp("r1", 1, 7, 9), [kept.part])) == 1
    assert group.oldest_version == 0


def test_turns_are_kept_over_deaths_until_the_fifth_skips_the_prompt(script: Script) -> None:
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    for _ in range(4):
        die(script, "s1")
        lease = leased_again(script, lease.group, "s1")
        assert turns_of(lease) == 1
    die(script, "s1")
    assert script.rows(f"SELECT state FROM prompts WHERE \"group\" = '{lease.group}'") == [("skipped",)]  # noqa: S608
    assert ("failed", 3) in script.rows("SELECT reason, num_tokens FROM waste")


@pytest.mark.parametrize(
    ("changes", "version", "array", "reason"),
    [
        ({}, 0, (1, np.full(6, np.nan, np.float32)), "nonfinite"),
        ({}, 0, (0, np.full(6, -1, np.int32)), "vocabulary"),
        ({}, 9, None, "version"),
    ],
)
def test_turns_that_cannot_be_trained_fail_their_sample_at_once(
    script: Script, changes: dict[str, Any], version: int, array: tuple[int, Any] | None, reason: str
) -> None:
    lease = first_lease(script)
    part, arrays = part_of(lease, 1, version, **changes)
    if array is not None:
        arrays[array[0]] = array[1].tobytes()
    assert not tell(script, "s1", (part, arrays)).is_yours
    assert script.coordinator.counts[f"rejected:{reason}"] == 1
    assert script.rows("SELECT boundary FROM failures") == [("trajectory",)]


def test_turns_of_an_older_version_than_the_learners_are_kept(script: Script) -> None:
    script.train(1)
    lease = first_lease(script, version=1)
    assert tell(script, "s1", part_of(lease, 1, version=0)).is_yours


def test_a_conversation_longer_than_the_settings_allow_is_not_kept(tmp_path: Path) -> None:
    script = Script(tmp_path, settings_of(rollout={"group_size": 2, "max_response_tokens": 4, "max_context_tokens": 5}))
    assert not tell(script, "s1", part_of(first_lease(script), 1)).is_yours


def test_frames_that_are_not_what_the_parts_say_are_refused(script: Script) -> None:
    part, arrays = part_of(first_lease(script), 1)
    script.tell("s1", m.TurnsDone(**script.stamp, parts=[part]), [arrays[0], arrays[1], b""])
    assert [refused.reason for refused in script.take("s1", m.Refusal)] == ["length"]


def test_the_next_start_of_the_run_begins_samples_anew(tmp_path: Path) -> None:
    script = Script(tmp_path)
    lease = first_lease(script)
    tell(script, "s1", part_of(lease, 1))
    script.ledger.close()
    assert turns_of(leased_again(Script(tmp_path), lease.group)) is None


def test_turns_and_versions_count_together_against_the_entries_of_a_lease(script: Script) -> None:
    part, buffers = part_of(first_lease(script), 1)
    long = replace(part, turns=part.turns * 2500, version_spans=part.version_spans * 2500)
    kept = {index: FinishedTurns(long, buffers) for index in range(2)}
    assert fitting(kept) == [kept[0]]
