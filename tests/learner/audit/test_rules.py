"""Every rule of the audit against one run that breaks it, made from a run whose accounts hold."""

import shutil
from pathlib import Path

import pytest

from learner.audit.report import audit_run_folder
from tests.learner.audit.broken_run import Good, break_ledger, lines_of

LEDGER_RULES: list[tuple[str, list[str], list[str]]] = [
    (
        "positions",
        [
            "DELETE FROM prompts WHERE position IN (8, 10)",
            "DELETE FROM trajectories WHERE \"group\" IN ('{8}', '{10}')",
        ],
        [
            "ledger.sqlite: given out, but without a prompt: position 8",
            "ledger.sqlite: given out, but without a prompt: position 10",
        ],
    ),
    (
        "positions",
        ["UPDATE prompts SET position = 1 WHERE position = 2"],
        [
            "ledger.sqlite, group {later}: is at position 1, where {earlier} is too",
            "ledger.sqlite: given out, but without a prompt: position 2",
        ],
    ),
    (
        "positions",
        ["UPDATE meta SET value = '7' WHERE key = 'position'"],
        ["ledger.sqlite: says that 7 prompts were given out, but one is at position 10"],
    ),
    (
        "prompt_order",
        ["UPDATE prompts SET uid = 'other' WHERE position = 3"],
        ["ledger.sqlite, group {3}: is prompt other of epoch 0 at position 3, where the prompt order has {3}"],
    ),
    (
        "prompt_order",
        ["UPDATE prompts SET epoch = 1 WHERE position = 3"],
        ["ledger.sqlite, group {3}: is prompt {3uid} of epoch 1 at position 3, where the prompt order has {3}"],
    ),
    (
        "trained_once",
        ["UPDATE prompts SET step = NULL WHERE position = 0"],
        ["ledger.sqlite, group {0}: is trained, but by no step"],
    ),
    (
        "trained_once",
        ["UPDATE trajectories SET step = 4 WHERE \"group\" = '{0}' AND sample_index = 1"],
        ["ledger.sqlite, group {0}, step 1: trajectories of another step, 4: 1, expected none"],
    ),
    (
        "trained_once",
        ["UPDATE trajectories SET step = 4 WHERE \"group\" = '{10}'"],
        ["ledger.sqlite, group {10}, step 4: is leased, its trajectories that were trained: 1, expected none"],
    ),
    (
        "trained_once",
        ["UPDATE trajectories SET step = 3 WHERE \"group\" = '{5}'"],
        ["ledger.sqlite, group {5}, step 3: is skipped, its trajectories that were trained: 2, expected none"],
    ),
    (
        "trained_once",
        ["DELETE FROM prompts WHERE position = 8"],
        ["ledger.sqlite, group {8}, step 4: has trajectories, but no prompt is accounted for by it"],
    ),
    (
        "group_size",
        ["DELETE FROM trajectories WHERE \"group\" = '{2}' AND sample_index = 0"],
        ["ledger.sqlite, group {2}, step 2: trajectories of its step: 1, expected 2"],
    ),
    (
        "group_size",
        ["UPDATE trajectories SET sample_index = 7 WHERE \"group\" = '{2}' AND sample_index = 1"],
        ["ledger.sqlite, group {2}, step 2: has the samples 0 to 7, expected 0 to 1"],
    ),
    (
        "staleness",
        ["UPDATE trajectories SET staleness = 2, oldest_version = 0 WHERE \"group\" = '{7}'"],
        ["ledger.sqlite, group {7}, step 4: was trained at staleness 2, at most 1 is allowed"],
    ),
    (
        "staleness",
        ["UPDATE trajectories SET staleness = NULL WHERE \"group\" = '{7}'"],
        ["ledger.sqlite, group {7}, step 4: was trained without a staleness"],
    ),
    (
        "step_version",
        ["UPDATE trajectories SET oldest_version = 1 WHERE \"group\" = '{7}' AND sample_index = 0"],
        ["ledger.sqlite, group {7}, step 4: its staleness was counted from policy version 1, the step was taken on 2"],
    ),
    (
        "step_version",
        ["UPDATE trajectories SET oldest_version = 3 WHERE \"group\" = '{7}' AND sample_index = 0"],
        ["ledger.sqlite, group {7}, step 4: its staleness was counted from policy version 3, the step was taken on 2"],
    ),
    (
        "step_version",
        ["UPDATE trajectories SET newest_version = 3 WHERE \"group\" = '{7}' AND sample_index = 0"],
        ["ledger.sqlite, group {7}, step 4: contains policy version 3, the step was taken on 2"],
    ),
    (
        "skip_reason",
        ["UPDATE prompts SET reason = ' ' WHERE position = 4"],
        ["ledger.sqlite, group {4}: is skipped without a reason"],
    ),
    (
        "not_applied_reason",
        ["UPDATE prompts SET reason = 'lost' WHERE position = 5"],
        [
            "ledger.sqlite, group {5}, step 3: is skipped with its step for the reason 'lost', "
            "expected one that begins 'step not applied: '"
        ],
    ),
    (
        "steps_contiguous",
        ["UPDATE prompts SET step = 7 WHERE step = 4", "UPDATE trajectories SET step = 7 WHERE step = 4"],
        ["ledger.sqlite, step 7: no group is of steps 4 to 6, but some are of this one"],
    ),
    (
        "steps_contiguous",
        ["UPDATE prompts SET step = 0 WHERE step = 1"],
        [
            "ledger.sqlite, step 0: is not a step: they are counted from 1",
            "ledger.sqlite, step 2: no group is of step 1, but some are of this one",
        ],
    ),
    (
        "step_whole",
        ["UPDATE prompts SET state = 'trained' WHERE position = 5"],
        ["ledger.sqlite, step 3: 1 of its groups are trained and 1 skipped: a step is applied whole or not at all"],
    ),
    (
        "step_size",
        ["UPDATE prompts SET state = 'leased', step = NULL WHERE position = 1"],
        ["ledger.sqlite, step 1: groups trained: 1, expected 2"],
    ),
    (
        "step_size",
        [
            "UPDATE prompts SET step = 1 WHERE position = 2",
            "UPDATE trajectories SET step = 1 WHERE \"group\" = '{2}'",
        ],
        [
            "ledger.sqlite, step 1: groups trained: 3, expected 2",
            "ledger.sqlite, step 2: groups trained: 1, expected 2",
        ],
    ),
    (
        "step_size",
        ["UPDATE prompts SET step = NULL WHERE position = 5"],
        ["ledger.sqlite, step 3: was not applied; groups skipped for it: 1, expected 2"],
    ),
    (
        "step_size",
        ["UPDATE prompts SET step = 3 WHERE position = 4"],
        ["ledger.sqlite, step 3: was not applied; groups skipped for it: 3, expected 2"],
    ),
    (
        "policy_version",
        ["UPDATE meta SET value = '2' WHERE key = 'policy_version'"],
        ["ledger.sqlite: says policy version 2, but 3 steps were applied"],
    ),
    (
        "policy_version",
        ["UPDATE meta SET value = '4' WHERE key = 'policy_version'"],
        ["ledger.sqlite: says policy version 4, but 3 steps were applied"],
    ),
    (
        "lineage",
        ["UPDATE trajectories SET incarnation = 1, newest_version = 3 WHERE \"group\" = '{7}'"],
        [
            "ledger.sqlite, group {7}, step 4: contains policy version 3 of start 1, "
            "after which the run began again at 2"
        ],
    ),
    (
        "lineage",
        ["UPDATE trajectories SET incarnation = 3 WHERE \"group\" = '{7}'"],
        ["ledger.sqlite: trajectories were made for start 3 of the run, which has started 2 times"],
    ),
]


@pytest.mark.parametrize(("rule", "statements", "expected"), LEDGER_RULES)
def test_audit_names_what_broke_in_the_ledger(
    run: Path, good: Good, rule: str, statements: list[str], expected: list[str]
) -> None:
    groups = good[1]
    shutil.rmtree(run / "checkpoints")  # their copies would tell of the change, too
    break_ledger(run / "ledger.sqlite", groups, *statements)
    earlier, later = sorted(groups[1:3])
    names = {"earlier": earlier, "later": later, "3uid": groups[3][3:]}
    expected = [_named(line, groups, names) for line in expected]
    assert lines_of(run, rule) == expected


def _named(line: str, groups: list[str], names: dict[str, str]) -> str:
    for key, name in [*names.items(), *((str(place), group) for place, group in enumerate(groups))]:
        line = line.replace(f"{{{key}}}", name)
    return line


def test_audit_measures_each_step_by_the_settings_of_its_day(run: Path, good: Good) -> None:
    settings = (run / "settings.yaml").read_text(encoding="utf-8")
    changed = settings.replace("max_staleness: 1", "max_staleness: 0").replace("group_size: 2", "group_size: 8")
    (run / "settings.yaml").write_text(changed, encoding="utf-8")
    assert audit_run_folder(run).holds
    break_ledger(
        run / "ledger.sqlite", good[1], "UPDATE terms SET value = 0 WHERE name = 'max_staleness' AND from_step = 1"
    )
    assert lines_of(run, "staleness") == [
        f"ledger.sqlite, group {group}, step 2: was trained at staleness 1, at most 0 is allowed"
        for group in sorted(good[1][2:4])
    ]


def test_audit_shows_a_hundred_lines_of_a_rule_and_counts_the_rest(run: Path, good: Good) -> None:
    shutil.rmtree(run / "checkpoints")
    break_ledger(
        run / "ledger.sqlite",
        good[1],
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 249) "
        "INSERT INTO prompts SELECT 'x' || i, 0, 'x', -1, 'skipped', 's1', 1, NULL, '', 0 FROM n",
    )
    breaches = audit_run_folder(run).breaches
    assert breaches.counts == {"positions": 250, "skip_reason": 250}
    assert len(breaches.shown) == 200
    assert breaches.lines()[-2:] == [
        "and 150 more that break the rule positions",
        "and 150 more that break the rule skip_reason",
    ]
