"""What the driver refuses from the number of GPUs alone."""

import pytest

from learner.run.driver import check_gpus, choose_backend
from protocol.errors import SettingsError
from protocol.settings.learner import LearnerSettings
from protocol.settings.rollout import RolloutSettings
from protocol.settings.settings import Settings


@pytest.mark.parametrize(
    ("wanted", "num_gpus", "chosen"),
    [("auto", 0, "gloo"), ("auto", 8, "nccl"), ("gloo", 8, "gloo"), ("nccl", 1, "nccl")],
)
def test_backend_follows_the_gpus_unless_it_is_named(wanted: str, num_gpus: int, chosen: str) -> None:
    assert choose_backend(wanted, num_gpus) == chosen


def test_nccl_is_refused_without_a_gpu() -> None:
    with pytest.raises(SettingsError, match=r"weights\.backend = nccl needs GPUs, and this cluster has none"):
        choose_backend("nccl", 0)


@pytest.mark.parametrize("num_gpus", [0, 6, 8])
def test_a_run_that_fits_the_gpus_or_has_none_is_let_through(num_gpus: int) -> None:
    check_gpus(_SETTINGS, num_gpus)


def test_a_run_that_wants_more_gpus_than_there_are_is_refused() -> None:
    with pytest.raises(SettingsError) as caught:
        check_gpus(_SETTINGS, 5)
    assert str(caught.value) == (
        "settings: learner.num_ranks = 2 and rollout.num_servers = 2 with rollout.tensor_parallel_size = 2 "
        "need 6 GPUs; the cluster has 5. Lower one of them."
    )


_SETTINGS = Settings(
    learner=LearnerSettings(num_ranks=2), rollout=RolloutSettings(num_servers=2, tensor_parallel_size=2)
)
