"""How long a lease may take before another server gets its group as well."""

from learner.coordinator.leases.overdue import OverdueLimit


def observed(limit_s: float, *durations_s: float) -> float:
    limit = OverdueLimit(limit_s)
    for duration_s in durations_s:
        limit.observe(duration_s)
    return limit.overdue_s


def test_limit_is_the_longest_allowed_until_enough_groups_are_back() -> None:
    assert observed(600.0, *[10.0] * 31) == 600.0
    assert observed(600.0, *[10.0] * 32) == 40.0


def test_limit_is_four_times_the_slowest_but_never_below_half_a_minute_nor_above_the_longest_allowed() -> None:
    assert observed(600.0, *[1.0] * 32) == 30.0
    assert observed(600.0, *[1.0] * 31, 20.0) == 80.0
    assert observed(60.0, *[1.0] * 31, 20.0) == 60.0


def test_limit_forgets_groups_of_long_ago() -> None:
    assert observed(600.0, 100.0, *[10.0] * 255) == 400.0
    assert observed(600.0, 100.0, *[10.0] * 256) == 40.0
