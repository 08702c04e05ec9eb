"""What a run's checkpoints take of the disk, by the roles that it has."""

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from learner.disk.model_folder import ModelSize
from learner.plan.memory import Sizes
from learner.run.checks.disk import check_disk, checkpoint_bytes
from protocol.errors import OperatorError
from protocol.settings.settings import Settings

MIB = 1 << 20
POLICY = ModelSize(MIB)
Usage = namedtuple("Usage", ["total", "used", "free"])


def settings(**sections: Any) -> Settings:
    policy = {"dtype": "float32", **sections.pop("policy", {})}
    return Settings.model_validate({"policy": policy, **sections})


@pytest.mark.parametrize(
    ("sections", "sizes", "expected"),
    [
        ({}, Sizes(POLICY), 16),
        ({"policy": {"dtype": "bfloat16"}}, Sizes(POLICY), 14),
        ({"policy": {"lora": {"rank": 4}}}, Sizes(ModelSize(8 * MIB, adapters=MIB)), 8 * 4 + 4 + 12),
        ({"learner": {"recipe": "ppo"}}, Sizes(POLICY), 16 + 12),
        ({"learner": {"recipe": "ppo"}, "critic": {"model": "small"}}, Sizes(POLICY, ModelSize(MIB // 4)), 16 + 3),
        (
            {"learner": {"recipe": "ppo"}, "policy": {"lora": {"rank": 4}}},
            Sizes(ModelSize(8 * MIB, adapters=MIB)),
            (8 * 4 + 4 + 12) + 8 * 12,
        ),
        ({"kl": {"coefficient": 0.1}}, Sizes(POLICY), 16),
        ({"kl": {"coefficient": 0.1}, "policy": {"warm_start": {"data": "rows.jsonl"}}}, Sizes(POLICY), 16 + 4),
        ({"kl": {"coefficient": 0.1}, "reference": {"refresh_every_steps": 5}}, Sizes(POLICY), 16 + 4),
        (
            {"kl": {"coefficient": 0.1}, "policy": {"warm_start": {"data": "rows.jsonl"}}, "reference": {"model": "m"}},
            Sizes(POLICY, reference=POLICY),
            16,
        ),
    ],
)
def test_a_checkpoint_has_the_state_of_each_role_that_is_trained(
    sections: dict[str, Any], sizes: Sizes, expected: int
) -> None:
    assert checkpoint_bytes(settings(**sections), sizes) == expected * MIB


@pytest.mark.parametrize(
    ("sections", "num_checkpoints"),
    [
        ({"learner": {"keep_checkpoints": 2}}, 3),  # two and the one that is being written
        ({"learner": {"keep_checkpoints": 3}}, 4),
        ({"data": {"eval": "rows.jsonl"}, "eval": {"every_steps": 50, "best": "eval/held_out/reward"}}, 4),
    ],
)
def test_a_disk_without_room_for_all_that_are_kept_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], num_checkpoints: int
) -> None:
    needed = num_checkpoints * 16 * MIB + 64 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 0, needed))
    check_disk(tmp_path / "runs" / "new", settings(**sections), Sizes(POLICY))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(needed, 1, needed - 1))
    with pytest.raises(OperatorError) as refused:
        check_disk(tmp_path / "runs" / "new", settings(**sections), Sizes(POLICY))
    assert str(refused.value) == (
        f"{tmp_path} has {(needed - 1) >> 20} MiB free; this run's checkpoints need about {needed >> 20} MiB. "
        "Free some, set run.dir to a larger disk, or lower learner.keep_checkpoints."
    )
