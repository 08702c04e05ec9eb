"""The learner dies in the middle of a weight push: the server it left half way is brought back, and the run ends."""

import pytest

from tests.chaos.rig.push_crashes import PUSH_FAILPOINTS, crash_in_pushes
from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


def test_a_death_between_two_buckets_of_a_push_is_recovered_from(cluster: FlowCluster, user: Bring) -> None:
    outcome = crash_in_pushes(cluster, user, "weight_push.after_bucket", num_steps=2)

    assert (outcome.deaths, outcome.problems) == (1, ())


def test_every_place_of_a_push_has_a_crash() -> None:
    assert len(PUSH_FAILPOINTS) == 4
