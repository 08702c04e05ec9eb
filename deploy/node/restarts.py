"""When a service that ended is started again: at once, and ever later when it ends again and again at once."""

from dataclasses import dataclass

# A service that ran for this long before it ended had started well: its next start comes without a wait.
_LASTED_S = 60.0
_FIRST_DELAY_S = 0.25
# One that answered and then ended is worth another try soon; one that never answered has a fault that stays.
_MAX_DELAY_AFTER_HEALTH_S = 4.0
_MAX_DELAY_S = 60.0


@dataclass
class Restarts:
    """What has been seen of one service. Example of waits for one that never answers: 0, 0.25, 0.5, 1, 2 .. 60 s."""

    num_restarts: int = 0  # starts by the keeper, the first start not counted
    num_quick_ends: int = 0  # ends in a row, each within a minute of the start before it
    num_mute_ends: int = 0  # quick ends in a row of which none had answered: one alone may have been killed too early

    def note_end(self, lived_s: float, was_healthy: bool) -> float:
        """Return the seconds to wait before the next start."""
        if lived_s >= _LASTED_S:
            self.num_quick_ends = self.num_mute_ends = 0
        self.num_quick_ends += 1
        self.num_mute_ends = 0 if was_healthy else self.num_mute_ends + 1
        return max(
            _delay(self.num_quick_ends, _MAX_DELAY_AFTER_HEALTH_S),
            _delay(self.num_mute_ends, _MAX_DELAY_S),
        )


def _delay(num_ends: int, limit_s: float) -> float:
    """Return the wait after so many ends in a row."""
    if num_ends < 2:
        return 0.0
    # The exponent is bounded: a service that ends for weeks would overflow a float.
    return float(min(limit_s, _FIRST_DELAY_S * 2 ** min(num_ends - 2, 16)))
