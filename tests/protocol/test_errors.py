"""Errors cross process borders by pickling: text, kind and exit status must arrive."""

import pickle

import pytest

from protocol.errors import FrameError, NeighbourError, OperatorError, SettingsError


@pytest.mark.parametrize(
    ("error", "exit_code"), [(OperatorError("The disk is full."), 1), (SettingsError("settings: wrong"), 2)]
)
def test_an_operator_error_keeps_its_text_and_exit_code(error: OperatorError, exit_code: int) -> None:
    arrived = pickle.loads(pickle.dumps(error))  # noqa: S301  # our own bytes
    assert (type(arrived), str(arrived), arrived.exit_code) == (type(error), str(error), exit_code)


def test_a_neighbour_error_keeps_its_boundary_and_detail() -> None:
    arrived = pickle.loads(pickle.dumps(NeighbourError("reward:mine", "timed out")))  # noqa: S301
    assert (str(arrived), arrived.boundary, arrived.detail) == ("reward:mine: timed out", "reward:mine", "timed out")


def test_a_frame_error_keeps_its_path_problem_and_reason() -> None:
    arrived = pickle.loads(pickle.dumps(FrameError("$.group", "is missing", "schema")))  # noqa: S301
    assert (str(arrived), arrived.path, arrived.problem, arrived.reason) == (
        "$.group: is missing",
        "$.group",
        "is missing",
        "schema",
    )
