"""Alarms: the figure at which each rule breaks, the sentence with its measured value, and patience over steps."""

import re

import pytest

from learner.live.alarms import RULES, HealthWatch, alarms_of, broken_rules
from protocol.settings.evaluation import HealthSettings
from protocol.settings.loader import describe_settings
from protocol.settings.settings import Settings

SETTINGS = HealthSettings()
HEALTHY = {
    "policy/ratio_mean": 1.01,
    "policy/kl_fresh": 0.001,
    "policy/kl_stale": 0.01,
    "policy/effective_sample_share": 0.9,
    "policy/clip_share": 0.05,
    "policy/entropy": 0.7,
    "policy/grad_norm": 3.0,
    "reward/equal_group_share": 0.4,
    "length/truncated_share": 0.1,
    "length/better": 110.0,
    "length/worse": 100.0,
}


def test_a_step_without_fault_breaks_no_rule_and_neither_does_one_without_figures() -> None:
    assert broken_rules(HEALTHY, SETTINGS) == broken_rules({}, SETTINGS) == []


@pytest.mark.parametrize(
    ("rule", "figure", "at_the_bound", "beyond", "text"),
    [
        ("ratio", "policy/ratio_mean", 0.8, 0.62, "ratio mean 0.62: it is 1 if the logprobs"),
        ("ratio", "policy/ratio_mean", 1.25, 1.4, "ratio mean 1.4: it is 1 if the logprobs"),
        ("kl_fresh", "policy/kl_fresh", 0.05, 0.06, "kl 0.06 nats per token on samples of the learner's own weights"),
        ("kl_stale", "policy/kl_stale", 0.5, 0.75, "kl 0.75 nats per token on stale samples"),
        (
            "effective_samples",
            "policy/effective_sample_share",
            0.3,
            0.2,
            "effective sample share 0.2: few tokens carry",
        ),
        ("clip_fraction", "policy/clip_share", 0.4, 0.5, "clip fraction 0.5: the loss clips most tokens"),
        ("entropy", "policy/entropy", 0.01, 0.005, "entropy 0.005 nats per token: the policy hardly samples any more"),
        ("grad_norm", "policy/grad_norm", 1000.0, 2500.0, "gradient norm 2.5e+03 before clipping"),
        ("no_gradient", "policy/grad_norm", 1e-9, 0.0, "gradient norm 0: the step changed no weight"),
        ("equal_groups", "reward/equal_group_share", 0.9, 0.95, "95% of the groups have equal rewards"),
        ("truncated", "length/truncated_share", 0.5, 0.6, "60% of the samples were cut off before they ended"),
        ("length_by_reward", "length/better", 300.0, 400.0, "samples of above-average reward have 400 tokens"),
    ],
)
def test_a_rule_breaks_beyond_its_bound_in_words(
    rule: str, figure: str, at_the_bound: float, beyond: float, text: str
) -> None:
    assert broken_rules(HEALTHY | {figure: at_the_bound}, SETTINGS) == []
    (alarm,) = broken_rules(HEALTHY | {figure: beyond}, SETTINGS)
    assert alarm.name == rule
    assert alarm.text.startswith(text)


def test_what_an_alarm_says_to_change_is_a_setting_that_exists() -> None:
    known = {name for name, _, _ in describe_settings(Settings())}
    sick = {
        "policy/ratio_mean": 0.5, "policy/kl_fresh": 1.0, "policy/kl_stale": 1.0, "policy/effective_sample_share": 0.0,
        "policy/clip_share": 1.0, "policy/entropy": 0.0, "policy/grad_norm": 1e9, "reward/equal_group_share": 1.0,
        "length/truncated_share": 1.0,
        "length/better": 900.0, "length/worse": 1.0,
    }  # fmt: skip
    alarms = broken_rules(sick, SETTINGS)
    alarms += broken_rules({"policy/grad_norm": 0}, SETTINGS)
    assert {alarm.name for alarm in alarms} == set(RULES)
    for alarm in alarms:
        named = re.findall(r"\b(?:learner|rollout|policy|weights|filter|rewards)\.(?!check)[a-z_]+", alarm.text)
        assert named
        assert set(named) <= known


SICK, WELL = {"policy/ratio_mean": 0.5}, {"policy/ratio_mean": 1.0}


def test_an_alarm_is_told_once_after_so_many_steps_in_a_row() -> None:
    watch = HealthWatch(HealthSettings(patience=3))
    told = [len(watch.take(line)) for line in (SICK, SICK, WELL, SICK, SICK, SICK, SICK)]
    assert told == [0, 0, 0, 0, 0, 1, 0]
    assert set(watch.active) == {"ratio"}
    watch.take(WELL)
    assert (watch.active, watch.summary) == ({}, "")


def test_end_of_a_run_names_its_alarms_and_the_heaviest_first() -> None:
    watch = HealthWatch(HealthSettings(patience=1))
    for line in ({"length/truncated_share": 0.94}, {"reward/equal_group_share": 1.0}):
        watch.take(line)
    assert watch.summary == (
        "Alarms at the end: 100% of the groups have equal rewards; 94% of the samples were cut off before they ended. "
        "The report has their cures."
    )


def test_steps_without_a_fresh_sample_do_not_interrupt_the_count_of_those_with_one() -> None:
    watch = HealthWatch(HealthSettings(patience=3))
    fresh, stale = {"policy/kl_fresh": 0.2}, {"policy/kl_stale": 0.01}
    begun = [[alarm.name for alarm in watch.take(line)] for line in (fresh, stale, fresh, stale, stale, fresh, stale)]
    assert begun == [[], [], [], [], [], ["kl_fresh"], []]
    assert set(watch.active) == {"kl_fresh"}
    watch.take({"policy/kl_fresh": 0.001})
    assert watch.active == {}


@pytest.mark.parametrize(
    ("usual", "later", "alarms"), [(0.03, 0.15, {"kl_stale"}), (0.03, 0.1, set()), (0.001, 0.04, set())]
)
def test_kl_of_stale_samples_is_compared_with_the_runs_own_usual_value(
    usual: float, later: float, alarms: set[str]
) -> None:
    watch = HealthWatch(HealthSettings(patience=3))
    for kl in [usual] * 10 + [later] * 3:
        watch.take({"policy/kl_stale": kl})
    assert set(watch.active) == alarms


def test_figure_that_is_not_a_number_neither_begins_nor_ends_an_alarm() -> None:
    watch = HealthWatch(HealthSettings(patience=3))
    for kl in (0.2, 0.2, float("nan"), 0.2, float("nan")):
        watch.take({"policy/kl_fresh": kl})
    assert set(watch.active) == {"kl_fresh"}


def test_alarm_of_an_unusual_value_lasts_as_long_as_the_value() -> None:
    watch = HealthWatch(HealthSettings())
    for kl in [0.004] * 20 + [0.2] * 100:
        watch.take({"policy/kl_stale": kl})
    assert set(watch.active) == {"kl_stale"}


def test_a_run_ends_only_when_that_is_asked_for() -> None:
    for stop_after, expected in ((0, False), (4, True), (5, False)):
        watch = HealthWatch(HealthSettings(patience=2, stop_after=stop_after))
        for _ in range(4):
            watch.take(SICK)
        assert (watch.stop_reason is not None) == expected
        if watch.stop_reason is not None:
            assert watch.stop_reason.startswith("Alarms for 4 steps in a row (health.stop_after): ratio mean 0.5")


def test_alarms_that_are_turned_off_never_begin() -> None:
    watch = HealthWatch(HealthSettings(alarms=False, patience=1))
    assert watch.take(SICK) == []


def test_alarms_of_a_run_are_read_from_its_lines() -> None:
    lines = [{"step": step, "policy/loss": 0.0, **(SICK if step > 1 else WELL)} for step in range(1, 6)]
    ((step, alarm),) = alarms_of([{"step": 0, "eval/held_out/reward": 0.5}, *lines], HealthSettings(patience=2))
    assert (step, alarm.name) == (3, "ratio")
