"""A model that a node lacks: copied once, found again, refused when it does not come whole."""

import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protocol.errors import NeighbourError, OperatorError
from protocol.node.model_copy import have_model
from protocol.node.model_files import ModelFiles, describe_model
from tests.protocol.node.test_model_files import write_model


class Origin:
    """The node that has the model, which is moved away so that this node lacks it; `read` reads it there."""

    def __init__(self, folder: Path, weights: bytes = b"w" * 5000) -> None:
        here = write_model(folder, weights)
        self.told = describe_model(here, "node")
        self.folder = here.rename(here.with_name(f"{here.name}-far"))
        self.read_files: list[str] = []

    def read(self, path: str, size: int) -> Iterator[bytes]:
        whole = (self.folder / Path(path).name).read_bytes()
        assert len(whole) == size
        self.read_files.append(Path(path).name)
        for start in range(0, size, 1000):
            yield whole[start : start + 1000]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def never(path: str, size: int) -> Iterator[bytes]:
    raise AssertionError(f"{path} is read")


def gone(path: str, size: int) -> Iterator[bytes]:
    raise NeighbourError("model", "gone")


def make_old(copy: Path) -> None:
    os.utime(copy, (time.time() - 86_400, time.time() - 86_400))


def test_model_that_is_here_is_used_where_it_is(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    assert have_model(describe_model(folder, "node"), never, with_weights=True) == folder


def test_model_that_is_lacking_is_copied_once(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    copy = have_model(origin.told, origin.read, with_weights=True)
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == {
        path.name: path.read_bytes() for path in origin.folder.iterdir()
    }
    assert have_model(origin.told, never, with_weights=True) == copy


def test_servers_of_one_node_that_start_together_copy_it_once(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: have_model(origin.told, origin.read, with_weights=False), range(4)))
    assert len(set(found)) == 1
    assert sorted(origin.read_files) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_other_model_under_the_same_path_is_not_taken_for_it(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    write_model(tmp_path / "model", hidden=9)
    assert have_model(origin.told, origin.read, with_weights=False) != tmp_path / "model"


def test_other_weights_under_the_same_path_will_do_for_a_server_alone(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    write_model(tmp_path / "model", weights=b"v" * 5000)
    assert have_model(origin.told, never, with_weights=False) == tmp_path / "model"
    assert have_model(origin.told, origin.read, with_weights=True) != tmp_path / "model"


def test_copy_that_was_cut_short_is_begun_again(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")

    def cut(path: str, size: int) -> Iterator[bytes]:
        yield b"part"
        raise NeighbourError("model", "gone")

    with pytest.raises(NeighbourError, match="gone"):
        have_model(origin.told, cut, with_weights=True)
    assert origin.told.is_at(have_model(origin.told, origin.read, with_weights=True), with_weights=True)


def test_model_that_changes_while_it_is_copied_is_refused(tmp_path: Path, home: Path) -> None:
    origin = Origin(tmp_path / "model")
    (origin.folder / "config.json").write_bytes(b"x" * (origin.folder / "config.json").stat().st_size)
    with pytest.raises(NeighbourError, match="changed while it was copied"):
        have_model(origin.told, origin.read, with_weights=True)
    assert not [path for path in (home / "cache" / "models").iterdir() if path.is_dir()]


def test_model_that_does_not_fit_on_the_disk_is_refused_before_it_comes(tmp_path: Path) -> None:
    told = Origin(tmp_path / "model").told
    huge = ModelFiles(**{**told.model_dump(), "files": {"model.safetensors": 1 << 60}})
    with pytest.raises(OperatorError, match=r"has no room for it: 1,152,921,504,606,846,976 bytes, and .* are free in"):
        have_model(huge, never, with_weights=True)


def test_the_four_models_used_last_stay(tmp_path: Path) -> None:
    origins = [Origin(tmp_path / f"model{number}", weights=bytes([number]) * 5000) for number in range(5)]
    copies = []
    for origin in origins:
        copies.append(have_model(origin.told, origin.read, with_weights=True))
        day = 86_400 * (len(origins) - len(copies))
        os.utime(copies[-1], (time.time() - day, time.time() - day))
    assert [copy.is_dir() for copy in copies] == [False, True, True, True, True]


def test_every_model_of_a_run_that_is_starting_stays(tmp_path: Path) -> None:
    # The policy, a critic, a reference: all are looked for before the first is loaded.
    origins = [Origin(tmp_path / f"model{number}", weights=bytes([number]) * 5000) for number in range(3)]
    copies = [have_model(origin.told, origin.read, with_weights=True) for origin in origins]
    assert [copy.is_dir() for copy in copies] == [True, True, True]


def test_models_of_a_run_are_not_copied_again_when_it_starts_on_another_day(tmp_path: Path, home: Path) -> None:
    # The policy, the same after a warm start, a critic, a reference.
    origins = [Origin(tmp_path / f"model{number}", weights=bytes([number]) * 5000) for number in range(4)]
    for origin in origins:
        make_old(have_model(origin.told, origin.read, with_weights=True))
    for origin in origins:
        have_model(origin.told, never, with_weights=True)


def test_copies_that_are_not_used_make_room_for_one_that_comes(tmp_path: Path, home: Path) -> None:
    told = Origin(tmp_path / "model").told
    old = home / "cache" / "models" / "old"
    old.mkdir(parents=True)
    with (old / "model.safetensors").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 512 << 20)
    make_old(old)

    def lacking(num_bytes: int) -> None:
        files = {"model.safetensors": shutil.disk_usage(home).free + num_bytes}
        have_model(ModelFiles(**{**told.model_dump(), "files": files}), gone, with_weights=True)

    with pytest.raises(OperatorError, match="has no room for it"):
        lacking(1 << 40)
    assert old.is_dir()
    with pytest.raises(NeighbourError, match="gone"):
        lacking(256 << 20)
    assert not old.exists()


def test_processes_that_start_together_forget_old_copies_together(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    copy = have_model(origin.told, origin.read, with_weights=True)
    together = threading.Barrier(8)

    def start(_: int) -> None:
        together.wait()
        have_model(origin.told, never, with_weights=True)

    for _ in range(50):
        for number in range(6):
            old = copy.with_name(f"old{number}")
            old.mkdir(exist_ok=True)
            make_old(old)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(start, range(8)))


def test_what_a_killed_process_had_copied_is_removed(tmp_path: Path, home: Path) -> None:
    origin = Origin(tmp_path / "model")
    left = home / "cache" / "models" / ".shape-weights.coming"
    left.mkdir(parents=True)
    have_model(origin.told, origin.read, with_weights=True)
    assert not left.exists()


def test_home_that_cannot_be_written_is_named(tmp_path: Path, home: Path) -> None:
    told = Origin(tmp_path / "model").told
    home.write_text("no folder")
    with pytest.raises(OperatorError) as refused:
        have_model(told, never, with_weights=True)
    assert str(refused.value) == (
        f"This node lacks the model {tmp_path}/model and cannot keep a copy in {home}/cache/models: Not a directory. "
        "Set SLUICE_HOME to a folder of your own on a disk with room."
    )


def test_copy_that_is_not_what_was_copied_is_brought_again(tmp_path: Path) -> None:
    origin = Origin(tmp_path / "model")
    copy = have_model(origin.told, origin.read, with_weights=True)
    weights = copy / "model.safetensors"
    weights.write_bytes(bytes(weights.stat().st_size))  # as after a loss of power
    assert origin.told.is_at(have_model(origin.told, origin.read, with_weights=True), with_weights=True)
