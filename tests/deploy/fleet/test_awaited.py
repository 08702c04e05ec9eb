"""What the fleet says that it waits for."""

from deploy.fleet.awaited import Awaited


def test_longest_wait_is_named_and_the_others_are_counted() -> None:
    now = [0.0]
    awaited = Awaited(lambda: now[0])
    with awaited.of("sluice-rollout-1", "end"):
        now[0] = 2.0
        assert awaited.said() == ""  # nobody has waited for long
        with awaited.of("sluice-rollout-0", "answer"):
            now[0] = 31.0
            assert awaited.said() == "sluice-rollout-1 to end, 31 s, and 1 more"
    assert awaited.said() == ""


def test_wait_that_failed_is_over() -> None:
    awaited = Awaited(lambda: 100.0)
    try:
        with awaited.of("sluice-rollout-1", "end"):
            raise TimeoutError
    except TimeoutError:
        assert awaited.said() == ""
