"""What the fleet says that it waits for."""

from deploy.fleet.servers import LongestWait


def test_longest_wait_is_named_and_the_others_are_counted() -> None:
    now = [0.0]
    awaited = LongestWait(lambda: now[0])
    with awaited.waiting_for("sluice-rollout-1", "end"):
        now[0] = 2.0
        assert awaited.describe() == ""  # nobody has waited for long
        with awaited.waiting_for("sluice-rollout-0", "answer"):
            now[0] = 31.0
            assert awaited.describe() == "sluice-rollout-1 to end, 31 s, and 1 more"
    assert awaited.describe() == ""


def test_wait_that_failed_is_over() -> None:
    awaited = LongestWait(lambda: 100.0)
    try:
        with awaited.waiting_for("sluice-rollout-1", "end"):
            raise TimeoutError
    except TimeoutError:
        assert awaited.describe() == ""
