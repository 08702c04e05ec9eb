"""Plans that contradict themselves or their cluster: each is refused in one sentence before anything starts."""

import pytest
from pydantic import ValidationError

from learner.disk.model_size import ModelSize
from learner.plan.memory import Sizes
from learner.plan.topology import plan_topology
from protocol.errors import SettingsError
from protocol.settings.settings import Settings
from tests.learner.plan.contradictory_plans import PLANS, Wrong


@pytest.mark.parametrize("wrong", PLANS, ids=lambda wrong: wrong.says.removeprefix("settings: ")[:60])
def test_a_plan_that_contradicts_itself_or_its_cluster_is_refused(wrong: Wrong) -> None:
    given = {
        "learner": {"num_ranks": wrong.num_ranks, **wrong.learner},
        "rollout": {
            "num_servers": wrong.num_servers,
            "tensor_parallel_size": wrong.tensor_parallel_size,
            "engine_args": wrong.engine_args,
        },
        "weights": {"backend": wrong.backend},
        "placement": wrong.placement,
    }
    with pytest.raises((ValidationError, SettingsError)) as caught:
        plan_topology(Settings.model_validate(given), Sizes(ModelSize(wrong.parameters)), wrong.nodes)
    if isinstance(caught.value, ValidationError):
        (problem,) = caught.value.errors()
        assert problem["msg"].removeprefix("Value error, ") == wrong.says
    else:
        assert str(caught.value) == wrong.says
