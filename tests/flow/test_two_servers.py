"""A run on another engine: untied embeddings, two ranks that take turns with two servers."""

import pytest

from tests.flow.flow_cluster import FlowCluster
from tests.flow.user_run import Bring, Ran, assert_same_weights, bring, each_trained_once, run

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def two_servers(cluster: FlowCluster, user: Bring, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    untied = bring(tmp_path_factory.mktemp("untied"), user.reward_url, tied=False)
    return run(
        cluster,
        untied,
        "two",
        weights__backend="ipc",
        placement__devices="shared",
        learner__num_ranks=2,
        rollout__num_servers=2,
        rollout__max_groups_in_flight=1,
        learner__max_staleness=0,
    )


def test_untied_weights_are_the_same_on_both_sides_in_every_step(two_servers: Ran) -> None:
    assert_same_weights(two_servers)


def test_servers_stand_still_from_before_a_step_until_they_have_its_weights(two_servers: Ran) -> None:
    steps = [line for line in two_servers.left.metrics if line["step"] > 0]
    assert all(line["time/push_pause_s"] >= line["time/train_s"] > 0.0 for line in steps)
    assert all(line["time/switch_s"] > 0.0 for line in steps)


def test_two_servers_both_make_what_is_trained(two_servers: Ran) -> None:
    query = "SELECT DISTINCT server FROM trajectories WHERE step IS NOT NULL"

    assert sorted(two_servers.left.rows(query)) == [("sluice-rollout-0",), ("sluice-rollout-1",)]
    assert two_servers.left.trained == each_trained_once(3)
    assert two_servers.left.staleness == [0] * 24
