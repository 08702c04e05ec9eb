"""What a failed call through Ray is reported as: real Ray errors, as Ray raises them, without a cluster."""

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RaySystemError,
    RayTaskError,
)

from protocol.errors import AwayError, NeighbourError, OperatorError, SettingsError
from protocol.one_line import first_line
from protocol.ray_calls import naming_ray_errors


def raised_there(cause: Exception) -> Exception:
    """Return what `ray.get` raises when the callee raised `cause`: an error of both types."""
    error: Exception = RayTaskError("method", "Traceback over there", cause).as_instanceof_cause()
    return error


def reported(error: Exception) -> Exception:
    """Return what is raised in its place."""
    with pytest.raises(Exception) as caught, naming_ray_errors("rollout-3", 30.0):  # noqa: PT011 the type is the subject
        raise error
    return caught.value


@pytest.mark.parametrize(
    "said", [SettingsError("settings: no"), OperatorError("do this"), NeighbourError("engine", "gone")]
)
def test_what_the_callee_says_is_wrong_comes_back_as_it_said_it(said: Exception) -> None:
    assert reported(raised_there(said)) is said


def test_fault_of_the_callee_names_it_and_keeps_its_traceback() -> None:
    there = raised_there(ValueError("two\n  lines " + "x" * 400))
    error = reported(there)
    assert isinstance(error, NeighbourError)
    assert str(error) == f"rollout-3: failed: ValueError: two lines {'x' * 290}"
    assert error.__cause__ is there


def test_timeout_over_there_is_no_timeout_here() -> None:
    there = raised_there(TimeoutError("asking the engine"))
    assert str(reported(there)) == "rollout-3: failed: TimeoutError: asking the engine"


@pytest.mark.parametrize("error", [GetTimeoutError("Ray's words"), TimeoutError()])
def test_no_answer_in_time_names_the_callee_and_the_limit(error: Exception) -> None:
    found = reported(error)
    assert isinstance(found, NeighbourError)
    assert str(found) == "rollout-3: did not answer within 30 s"


def test_death_of_the_callee_is_one_line() -> None:
    error = ActorDiedError()
    found = reported(error)
    assert type(found) is NeighbourError
    assert str(found) == "rollout-3: died: The actor died unexpectedly before finishing this task"
    assert found.__cause__ is None


def test_callee_whose_constructor_failed_is_named_with_its_exception() -> None:
    cause = RayTaskError(
        "Pool.__init__", "Traceback over there\nRuntimeError: no such operator", RuntimeError("no such operator")
    )
    found = reported(ActorDiedError(cause))
    assert str(found) == "rollout-3: could not start: RuntimeError: no such operator"


def test_callee_that_ray_starts_again_is_away() -> None:
    found = reported(ActorUnavailableError("the actor is away\nand\nmore", None))
    assert type(found) is AwayError
    assert str(found) == "rollout-3: died: its process or its node is gone or unreachable"
    assert found.__cause__ is None


def test_other_fault_of_ray_keeps_its_traceback() -> None:
    there = RaySystemError("the store is full\nand a page")
    found = reported(there)
    assert isinstance(found, NeighbourError)
    assert str(found) == f"rollout-3: failed: {first_line(there)}"
    assert found.__cause__ is there


def test_error_that_is_none_of_rays_passes_as_it_is() -> None:
    error = KeyError("ours")
    assert reported(error) is error


def test_first_line_of_an_error_without_words_is_its_type() -> None:
    assert first_line(ValueError("  \n")) == "ValueError"
