"""Which set of reward endpoints is in force: looked up in the run folder, recorded, told to every server.

    rewards.json (`python -m rewards.endpoints`) -> look -> ledger, servers, what the operator is shown
    a server's Demand names the set it scores by -> on_demand -> Rewards, until it is the one in force

Leases go to servers that score by the set in force alone (`Servers.next_to_lease`).
"""

import contextlib
import json
import time
from pathlib import Path

import msgspec

from learner.coordinator.accounts import Accounts
from learner.coordinator.leases.servers import Servers
from protocol.disk.files import replace_file
from protocol.errors import OperatorError, SettingsError
from protocol.settings.loader import with_rewards
from protocol.settings.reward_sets import (
    REWARD_SETS,
    REWARDS_IN_USE,
    RewardSet,
    changing_sets,
    read_sets,
    with_start,
    write_sets,
)
from protocol.settings.settings import Settings
from protocol.wire import messages as m

_LOOK_S = 1.0
_TELL_AGAIN_S = 1.0
# So often the file that says who uses which set is written though nothing changed: an old one is of a run that ended.
_IN_USE_S = 10.0


class RewardSets:
    """`in_force`: the newest set. news: sentences for the operator, in order, of this start of the run."""

    def __init__(self, settings: Settings, folder: Path, accounts: Accounts, servers: Servers) -> None:
        """Raises: OperatorError when the folder's sets cannot be read or written, or contradict the settings."""
        self.news: list[str] = []
        self._settings = settings
        self._folder = folder
        self._ledger = accounts.ledger
        self._mailbox = accounts.mailbox
        self._servers = servers
        self._told: dict[str, tuple[int, float]] = {}  # server -> (set, when it was told)
        self._problems: dict[str, str] = {}
        self._looked_at = self._wrote_at = float("-inf")
        self._written: object = None
        sets = self._begin()
        self._seen = self._stamp()
        for one in sets:
            self._ledger.add_reward_set(one.number, one.since, one.model_dump_json())
        self.in_force = sets[-1]
        servers.reward_set = self.in_force.number
        if self.in_force.number > 1:
            self.news.append(f"Rewards: set {_named(self.in_force)} is in force.")

    def look(self, now: float) -> None:
        """Take up a set that was added since, at most a second after it was. now: monotonic seconds."""
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        if (stamp := self._stamp()) != self._seen:
            self._seen = stamp
            try:
                self._take_up(now)
            except OperatorError as error:
                number = self.in_force.number
                self.news.append(f"Rewards: {REWARD_SETS} is not used, set {number} stays in force: {error}")
        self._write_use(now)

    def on_demand(self, server: str, message: m.Demand, now: float) -> None:
        """Tell a server the set in force while it scores by another one."""
        number = 1 if message.reward_set is msgspec.UNSET else message.reward_set
        problem = None if message.reward_problem is msgspec.UNSET else message.reward_problem
        self._servers.note_rewards(server, number, problem)
        if problem is not None and self._problems.get(server) != problem:
            self.news.append(f"{server} cannot use reward set {self.in_force.number}, and gets no leases: {problem}")
        self._problems[server] = problem or ""
        told, at = self._told.get(server, (0, 0.0))
        if number != self.in_force.number and (told != self.in_force.number or now - at >= _TELL_AGAIN_S):
            self._tell(server, now)

    def _begin(self) -> list[RewardSet]:
        """Return the run's sets at this start, the newest of them in force, and fit for the settings."""
        settings, folder = self._settings, self._folder
        with changing_sets(folder):
            known = read_sets(folder)
            sets = with_start(known, settings.rewards, self._ledger.newest_reward_set())
            _check(settings, sets[-1], folder)
            if sets != known:
                write_sets(folder, sets)
        return sets

    def _take_up(self, now: float) -> None:
        """Have the newest set score from now on, if it is a new one. Raises: OperatorError when it cannot be used."""
        sets = read_sets(self._folder)
        if not sets or sets[-1].number <= self.in_force.number:
            return
        _check(self._settings, sets[-1], self._folder)
        self.in_force = newest = sets[-1]
        self._servers.reward_set = newest.number
        self._ledger.add_reward_set(newest.number, newest.since, newest.model_dump_json())
        self._ledger.add_event("rewards", f"set {_named(newest)}")
        self.news.append(f"Rewards: set {_named(newest)} is in force from now on; groups are scored whole by one set.")
        for server in self._servers.here():
            self._tell(server, now)

    def _tell(self, server: str, now: float) -> None:
        self._told[server] = (self.in_force.number, now)
        self._mailbox.tell_rewards(server, self.in_force.number, self.in_force.model_dump_json())

    def _stamp(self) -> tuple[int, int, int] | None:
        """Return what changes whenever the file does."""
        try:
            found = (self._folder / REWARD_SETS).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _write_use(self, now: float) -> None:
        """Have the run folder say which server scores by which set: for `python -m rewards.endpoints`."""
        use = {"reward_set": self.in_force.number, "servers": self._servers.reward_use()}
        if use == self._written and now - self._wrote_at < _IN_USE_S:
            return
        self._written, self._wrote_at = use, now
        path = self._folder / REWARDS_IN_USE
        with contextlib.suppress(OSError):  # it is shown, and nothing rests on it
            replace_file(path, json.dumps({"at": time.time(), **use}).encode())


def _check(settings: Settings, reward_set: RewardSet, folder: Path) -> None:
    """Raise SettingsError when a set contradicts the run's settings, such as filter.score."""
    try:
        with_rewards(settings, reward_set.over(settings.rewards))
    except SettingsError as error:
        raise SettingsError(
            f"{error} This is of reward set {reward_set.number} in {folder / REWARD_SETS}: give another one by "
            "python -m rewards.endpoints, or change the setting that it contradicts."
        ) from None


def _named(reward_set: RewardSet) -> str:
    since = time.strftime("%d %b %H:%M:%S", time.localtime(reward_set.since))
    by = "rewards.endpoints" if reward_set.source == "command" else "the settings"
    return f"{reward_set.number} ({reward_set.describe()}; by {by}, {since})"
