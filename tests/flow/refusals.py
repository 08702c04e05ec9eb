"""What a command says of a wrong input, and what it may leave: used by the tests of wrong inputs and neighbours."""

import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.warm_process import run_warm
from tests.flow.user_run import Bring


@dataclass(frozen=True)
class Wrong:
    """A wrong input. says: the whole of stderr, with `{user}` for the user's folder; a pattern when is_pattern.

    prepare: makes what is wrong, given the user's folder. settings: laid over the user's sound ones.
    """

    name: str
    status: int
    says: str
    settings: Mapping[str, object] = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    is_pattern: bool = False

    def __str__(self) -> str:
        return self.name


def options_of(wrong: Wrong, user: Bring) -> list[str]:
    """Return the command's options, after what is wrong was made; `{user}` in a text setting is the user's folder."""
    if wrong.prepare is not None:
        wrong.prepare(user.folder)
    settings = {
        name: value.replace("{user}", str(user.folder)) if isinstance(value, str) else value
        for name, value in wrong.settings.items()
    }
    return user.options(wrong.name.replace(" ", "-"), settings)


def expect_refusal(wrong: Wrong, user: Bring, finished: "subprocess.CompletedProcess[str]") -> None:
    """Assert that the command ended with this status and this one line, and left no run folder."""
    assert (finished.returncode, finished.stderr.count("\n")) == (wrong.status, 1), finished.stdout + finished.stderr
    if wrong.is_pattern:
        pattern = wrong.says.replace("{user}", re.escape(str(user.folder)))
        assert re.fullmatch(pattern, finished.stderr[:-1]), finished.stderr
    else:
        assert finished.stderr[:-1] == wrong.says.replace("{user}", str(user.folder))
    assert not (user.folder / "runs" / wrong.name.replace(" ", "-")).exists()


def run_without_cluster(
    home: Path, options: Sequence[str], module: str = "learner.run"
) -> "subprocess.CompletedProcess[str]":
    """Return the finished command in a SLUICE_HOME where no cluster runs; a wrong input is answered in seconds."""
    return run_warm(module, *options, timeout=180.0, environment={"SLUICE_HOME": str(home), "COLUMNS": "200"})


def no_cluster_in(home: Path) -> str:
    """Return the error of a command in a SLUICE_HOME without a cluster."""
    return (
        f"No Sluice cluster runs in {home} (from SLUICE_HOME). Start one with sluice start, or set "
        "SLUICE_HOME to the folder of a running one."
    )
