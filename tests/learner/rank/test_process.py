"""A rank's process: the traceback of an exception is in its log, because exceptions lose it between processes."""

import sys
from pathlib import Path

import pytest

from learner.rank.process import RankPlace, RankProcess
from protocol.errors import NeighbourError, OperatorError
from protocol.settings.settings import Settings

_LOSS = """def loss(ratio):
    return ratio.foo
"""


@pytest.fixture
def rank(tmp_path: Path) -> RankProcess:
    (tmp_path / "logs").mkdir()
    process = RankProcess(Settings(), tmp_path, {}, lambda name: None)  # type: ignore[arg-type, return-value]
    process.take_place(RankPlace(0, 1, "127.0.0.1", 0))
    return process


def test_error_of_a_users_loss_names_its_line_and_the_log_with_the_traceback(rank: RankProcess, tmp_path: Path) -> None:
    (tmp_path / "raising_loss.py").write_text(_LOSS)
    sys.path.insert(0, str(tmp_path))
    from raising_loss import loss  # type: ignore[import-not-found]

    with pytest.raises(NeighbourError) as caught, rank._keeping_tracebacks():
        loss(1.0)
    log = tmp_path / "logs" / "rank_0.log"
    assert str(caught.value) == (
        "learner rank 0: failed: AttributeError: 'float' object has no attribute 'foo' "
        f"({tmp_path}/raising_loss.py:2). Traceback: {log}"
    )
    assert caught.value.place == f"{tmp_path}/raising_loss.py:2"
    assert "    return ratio.foo" in log.read_text()


def test_error_that_has_its_cure_passes(rank: RankProcess) -> None:
    for error in (OperatorError("Set it."), NeighbourError("engine", "died")):
        with pytest.raises(type(error)) as caught, rank._keeping_tracebacks():
            raise error
        assert caught.value is error
