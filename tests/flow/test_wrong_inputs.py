"""What needs no cluster to be found wrong: environments, run folders, disks. One line each, nothing is left.

Settings are in protocol/settings/wrong_settings.txt, models and data sets in test_wrong_models_and_data.py, and what
only a cluster can show in test_wrong_neighbours.py.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from learner.checkpoint.folder import begin
from learner.checkpoint.manifest import Checkpoint
from tests.fakes.checkpoints import commit
from tests.flow.refusals import Wrong, expect_refusal, no_cluster_in, options_of, run_without_cluster
from tests.flow.user_run import Bring


def _write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def _checkpoint_of_another_model(folder: Path) -> None:
    root = folder / "others"
    aside = begin(root, 3)
    (aside / "ledger.sqlite").write_bytes(b"")
    commit(aside, Checkpoint(aside, step=3, policy_version=3, run_id="others", model_digest="0" * 64))


FOLDERS = [
    Wrong(
        "resume from nothing", 2,
        "settings: run.resume = {user}/nowhere is not a valid checkpoint ({user}/nowhere has no MANIFEST.json). "
        "Name a folder such as runs/NAME/checkpoints/step_000100, or use auto.",
        {"run.resume": "{user}/nowhere"},
    ),
    Wrong(
        "checkpoint of another model", 2,
        "settings: {user}/others/step_000003 is a checkpoint of another model than policy.model. "
        "Give the model it was made from, another run.name, or run.resume never.",
        {"run.resume": "{user}/others/step_000003"},
        _checkpoint_of_another_model,
    ),
    Wrong(
        "context above positions", 2,
        "settings: rollout.max_context_tokens = 4096, and policy.model has 1024 positions. Set it to 1024 or less.",
        {"rollout.max_context_tokens": 4096},
    ),
    Wrong(
        "environment that is not a name", 2,
        "settings: rollout.environment = serch: expected one of single_turn, search, tools, agents, "
        "agent:FILE.py:function, openrlhf_agent:FILE.py, verl_tools:FILE.yaml, module:Class or FILE.py:Class. "
        "Did you mean search?",
        {"rollout.environment": "serch"},
    ),
    Wrong(
        "environment without a file", 2,
        "settings: rollout.environment = {user}/none.py:Game: there is no file {user}/none.py. "
        "Give the path of a Python file.",
        {"rollout.environment": "{user}/none.py:Game"},
    ),
    Wrong(
        "environment without its class", 2,
        "settings: rollout.environment = {user}/game.py:Gmae: {user}/game.py has no class Gmae. It has Game.",
        {"rollout.environment": "{user}/game.py:Gmae"},
        _write("game.py", "class Game:\n    pass\n"),
    ),
    Wrong(
        "unwritable run folder", 1,
        "/sys cannot be written: .+. Set run.dir to a folder of your own.",
        {"run.dir": "/sys/runs"},
        is_pattern=True,
    ),
    Wrong(
        "run folder inside a file", 1,
        "{user}/prompts.jsonl cannot be written: Not a directory. Set run.dir to a folder of your own.",
        {"run.dir": "{user}/prompts.jsonl"},
    ),
]  # fmt: skip


@pytest.mark.parametrize("wrong", FOLDERS, ids=str)
def test_a_wrong_input_is_one_line_and_leaves_nothing(wrong: Wrong, user: Bring, tmp_path: Path) -> None:
    expect_refusal(wrong, user, run_without_cluster(tmp_path / "home", options_of(wrong, user)))
    assert not (tmp_path / "home").exists()


def test_a_plan_needs_no_running_cluster(user: Bring, tmp_path: Path) -> None:
    options = user.options("planned", {"rollout.num_servers": 3, "rollout.tensor_parallel_size": 2})
    finished = run_without_cluster(tmp_path / "home", [*options, "--plan"])
    assert finished.returncode == 0, finished.stderr
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in finished.stdout.splitlines() if "│" in line]
    assert [row[:3] for row in rows] == [
        ["coordinator", "1", "0"],
        ["learner rank", "1", "1 (0 without GPUs)"],
        ["rollout server", "3", "2 (0 without GPUs)"],
    ]
    assert "No Sluice cluster runs here: GPUs are as in the settings, and 0 on a cluster without GPUs." in (
        finished.stdout
    )
    assert not (user.folder / "runs" / "planned").exists()


def test_a_run_in_the_background_that_does_not_begin_says_why(user: Bring, tmp_path: Path) -> None:
    finished = run_without_cluster(tmp_path / "home", [*user.options("unattended"), "--no-wait"])
    assert (finished.returncode, finished.stderr) == (
        1,
        f"{no_cluster_in(tmp_path / 'home')}\n",
    )


def test_resume_never_keeps_off_a_folder_that_holds_a_run(user: Bring, tmp_path: Path) -> None:
    used = user.folder / "runs" / "used"
    used.mkdir(parents=True)
    (used / "ledger.sqlite").touch()
    finished = run_without_cluster(tmp_path / "home", user.options("used", {"run.resume": "never"}))
    assert (finished.returncode, finished.stderr) == (
        2,
        f"settings: run.resume = never, and {used} holds a run already. "
        "Choose another run.name, or resume with auto.\n",
    )
    assert [path.name for path in used.iterdir()] == ["ledger.sqlite"]


@pytest.fixture
def no_room(user: Bring, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield a folder for runs and a model that its disk has no room for.

    The disk is one of 1 MiB; where none may be mounted, this one and a model of 8 TiB, whose file is a hole.
    """
    folder, giant = tmp_path / "disk", tmp_path / "giant"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode == 0:
        yield folder, user.model
        subprocess.run(["umount", str(folder)], check=True)
        return
    shutil.copytree(user.model, giant)
    size = 1 << 43
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (giant / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    yield folder, giant


def test_a_disk_without_room_is_found_before_anything_starts(
    user: Bring, no_room: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, model = no_room
    settings = {"run.dir": str(folder), "policy.model": str(model)}
    finished = run_without_cluster(tmp_path / "home", user.options("full", settings))
    assert (finished.returncode, finished.stderr.count("\n")) == (1, 1), finished.stderr
    assert re.fullmatch(
        rf"{folder} has \d+ MiB free; this run's checkpoints need about \d+ MiB. "
        r"Free some, set run.dir to a larger disk, or lower learner.keep_checkpoints.\n",
        finished.stderr,
    )
    assert list(folder.iterdir()) == []
