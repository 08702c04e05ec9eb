"""Alarms over steps: patience, one telling, the end of the run if asked for."""

from learner.health.watch import HealthWatch, alarms_of
from protocol.settings.quality.health import HealthSettings

SICK, WELL = {"ratio_mean": 0.5}, {"ratio_mean": 1.0}


def test_an_alarm_is_told_once_after_so_many_steps_in_a_row() -> None:
    watch = HealthWatch(HealthSettings(patience=3))
    told = [len(watch.take(line)) for line in (SICK, SICK, WELL, SICK, SICK, SICK, SICK)]
    assert told == [0, 0, 0, 0, 0, 1, 0]
    assert set(watch.active) == {"ratio"}
    watch.take(WELL)
    assert watch.active == {}


def test_a_run_ends_only_when_that_is_asked_for() -> None:
    for stop_after, expected in ((0, False), (4, True), (5, False)):
        watch = HealthWatch(HealthSettings(patience=2, stop_after=stop_after))
        for _ in range(4):
            watch.take(SICK)
        assert (watch.stop_reason is not None) == expected
        if watch.stop_reason is not None:
            assert watch.stop_reason.startswith("It is sick for 4 steps in a row (health.stop_after): ratio mean 0.5")


def test_alarms_that_are_turned_off_never_begin() -> None:
    watch = HealthWatch(HealthSettings(alarms=False, patience=1))
    assert watch.take(SICK) == []


def test_alarms_of_a_run_are_read_from_its_lines() -> None:
    lines = [{"step": step, "loss": 0.0, **(SICK if step > 1 else WELL)} for step in range(1, 6)]
    ((step, alarm),) = alarms_of([{"step": 0, "eval_reward": 0.5}, *lines], HealthSettings(patience=2))
    assert (step, alarm.name) == (3, "ratio")
