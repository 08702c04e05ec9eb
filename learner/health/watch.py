"""Alarms over the steps of a run: a rule that is broken for some steps in a row is told once, and may end the run."""

from collections.abc import Iterable, Mapping

from learner.health.rules import Alarm, broken_rules
from protocol.settings.quality.health import HealthSettings


class HealthWatch:
    """Takes the lines of metrics in step order. Whoever shows, records or stops a run has one of its own.

    active: the alarms that hold at the newest step, by rule.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self.active: dict[str, Alarm] = {}
        self._settings = settings
        self._in_a_row: dict[str, int] = {}

    def take(self, line: Mapping[str, float]) -> list[Alarm]:
        """Return the alarms that begin with this step: broken for health.patience steps in a row, its own included."""
        broken = {alarm.name: alarm for alarm in broken_rules(line, self._settings)} if self._settings.alarms else {}
        self._in_a_row = {name: self._in_a_row.get(name, 0) + 1 for name in broken}
        patience = self._settings.patience
        self.active = {name: alarm for name, alarm in broken.items() if self._in_a_row[name] >= patience}
        return [alarm for name, alarm in self.active.items() if self._in_a_row[name] == patience]

    @property
    def stop_reason(self) -> str | None:
        """Why the run is to end by health.stop_after; None while it is not."""
        limit = self._settings.stop_after
        lasting = [alarm.text for name, alarm in self.active.items() if limit and self._in_a_row[name] >= limit]
        if not lasting:
            return None
        return f"It is sick for {limit} steps in a row (health.stop_after): {' '.join(lasting)}"


def alarms_of(lines: Iterable[Mapping[str, float]], settings: HealthSettings) -> list[tuple[int, Alarm]]:
    """Return every alarm of a run with the step at which it began, in order."""
    watch = HealthWatch(settings)
    return [(int(line["step"]), alarm) for line in lines if "loss" in line for alarm in watch.take(line)]
