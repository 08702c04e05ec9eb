"""What became of a run in which a process died at a failpoint. Made by `rig_crashes` and `push_crashes`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CrashOutcome:
    """setting: what SLUICE_FAILPOINT was. problems: what the run did not recover from, none when it is well."""

    setting: str
    deaths: int
    problems: tuple[str, ...]

    def __str__(self) -> str:
        verdict = "FAIL" if self.problems else "ok  "
        return " ".join([verdict, self.setting, f"deaths={self.deaths}", "; ".join(self.problems)]).rstrip()
