"""Plans that contradict their cluster: each is refused in one sentence before anything starts.

contradictory_plans.txt has cases: the cluster's name, the model's parameters where they matter, the options of a
command, and below them the sentence.
"""

import re
import shlex
from pathlib import Path

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.plan.processes import Node
from learner.plan.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.loader import load_settings

CLUSTERS = {
    "four_eights": [Node(f"10.0.0.{number}", 8) for number in range(1, 5)],
    "two_fours": [Node("10.0.0.1", 4), Node("10.0.0.2", 4)],
    "no_gpus": [Node("10.0.0.1", 0), Node("10.0.0.2", 0)],
    "named": [
        Node("10.0.0.1", 8, resources={"h100": 8.0}),
        Node("10.0.0.2", 8, resources={"a100": 8.0}),
        Node("10.0.0.3", 8),
    ],
    "cards": [Node("10.0.0.1", 8, gpu_bytes=24 * 10**9)],
    "small_hosts": [Node(f"10.0.0.{number}", 8, host_bytes=100 * 10**9) for number in (1, 2)],
    "hosts": [Node(f"10.0.0.{number}", 8, host_bytes=10**12) for number in (1, 2, 3, 4)],
    "one_host": [Node("10.0.0.1", 0, host_bytes=256 * 10**9)],
}
TEXT = Path(__file__).with_name("contradictory_plans.txt").read_text(encoding="utf-8")
CASES = [case.split("\n  ", 1) for case in re.split(r"\n(?=\S)", TEXT.strip())]


@pytest.mark.parametrize(("plan", "sentence"), CASES)
def test_a_plan_that_contradicts_its_cluster_is_refused(plan: str, sentence: str) -> None:
    cluster, *options = shlex.split(plan)
    size = 1000 if options[0].startswith("--") else int(options.pop(0).removesuffix("b")) * 10**9
    with pytest.raises(SettingsError) as caught:
        plan_topology(load_settings(None, options), Sizes(ModelSize(size)), CLUSTERS[cluster])
    assert str(caught.value) == sentence.replace("\n  ", "\n")
