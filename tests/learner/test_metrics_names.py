"""The names of metrics: documented and written are the same, and old ones are read as new ones."""

import json
import re
from pathlib import Path

from learner.disk.run_folder import RENAMED, main_set, parse_metrics_line

GROUPS = "reward|preference|policy|critic|length|data|time|perf|progress|health|eval"
ROWS = [line.split("|") for line in Path("docs/look_up/metrics.md").read_text().splitlines() if line.startswith("| `")]


def documented(*, only_unconditional: bool = False) -> set[str]:
    """Return the keys of metrics.md; only_unconditional: without those of rows that begin with a condition."""
    chosen = [row for row in ROWS if not (only_unconditional and re.match(r" (with|where) ", row[2]))]
    return {key for row in chosen for key in re.findall(r"`([^`]+)`", row[1])}


def test_every_metric_that_the_code_writes_is_documented_and_the_other_way_round() -> None:
    files = [path for path in Path("learner").rglob("*.py") if not {"live", "report", "disk"} & set(path.parts)]
    texts = "\n".join(path.read_text() for path in files)
    written = set(re.findall(rf'"((?:{GROUPS})/[\w{{}}./]+)": ', texts))
    written |= set(re.findall(rf'\[f?"((?:{GROUPS})/[\w{{}}./]+)"\] [+|]?= ', texts))
    exact = {key for key in written if "{" not in key}
    known = {key for key in documented() if not re.search("[A-Z@]", key)} - {"step", "policy_version", "time_s", "at_s"}
    assert exact - known == set()
    # A family is written by a name with a variable part.
    families = {key.split("{")[0] for key in written - exact}
    assert {key for key in known - exact if not key.startswith(tuple(families))} == set()


def test_line_of_version_0_1_0_is_read_by_present_names() -> None:
    old = {"step": 3, "loss": 0.5, "reward_mean": 0.25, "reward/em": 0.5, "reward_log/em/acc": 1.0, "equal_groups": 2}
    old |= {"eval_step": 3, "eval_reward": 0.75, "eval/held_out/reward": 0.75, "pause_s": 0.5}
    line = parse_metrics_line(json.dumps(old))
    assert line == {
        **{"step": 3, "policy/loss": 0.5, "reward/mean": 0.25, "reward/part/em": 0.5, "reward/log/em/acc": 1.0},
        **{"eval/step": 3, "eval/held_out/reward": 0.75, "time/push_pause_s": 0.5},
    }
    assert main_set(line) == "held_out"


def test_change_log_lists_every_old_name() -> None:
    text = Path("CHANGELOG.md").read_text()
    assert {name for name in RENAMED if f"`{name}`" not in text} == set()
    assert {name for name in RENAMED.values() if name and name not in documented()} == set()
