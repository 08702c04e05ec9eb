"""When an ended service is started again."""

from deploy.node.restarts import Restarts


def test_service_that_ran_long_is_started_again_at_once_each_time() -> None:
    restarts = Restarts()
    assert [restarts.note_end(60.0, was_healthy=True) for _ in range(5)] == [0.0] * 5


def test_service_that_never_answers_is_left_alone_for_longer_each_time_up_to_a_minute() -> None:
    restarts = Restarts()
    delays = [restarts.note_end(1.0, was_healthy=False) for _ in range(12)]
    assert delays == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]


def test_service_that_answers_and_ends_again_and_again_waits_four_seconds_at_most() -> None:
    restarts = Restarts()
    assert max(restarts.note_end(59.0, was_healthy=True) for _ in range(2000)) == 4.0


def test_a_minute_of_life_forgets_the_quick_ends_before() -> None:
    restarts = Restarts()
    for _ in range(9):
        restarts.note_end(1.0, was_healthy=False)
    assert restarts.note_end(61.0, was_healthy=True) == 0.0
    assert restarts.num_quick_ends == 1
    assert restarts.note_end(1.0, was_healthy=True) == 0.25


def test_end_before_the_first_answer_weighs_no_more_than_others_unless_it_repeats() -> None:
    restarts = Restarts()
    for _ in range(9):
        restarts.note_end(10.0, was_healthy=True)
    assert [restarts.note_end(1.0, was_healthy=False) for _ in range(8)] == [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 8.0, 16.0]
