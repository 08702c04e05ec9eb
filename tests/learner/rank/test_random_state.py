"""Random generators that go on where they were."""

import random
from pathlib import Path

import torch

from learner.rank.checkpoint import load_random_state, save_random_state


def draw() -> tuple[float, float, list[float]]:
    return random.random(), random.gauss(0.0, 1.0), torch.rand(3).tolist()


def test_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    random.seed(3)
    torch.manual_seed(3)
    draw()  # gauss keeps its second number for the next call
    save_random_state(tmp_path / "random" / "rank_00000.json")
    expected = [draw(), draw()]
    random.seed(4)
    torch.manual_seed(4)
    load_random_state(tmp_path / "random" / "rank_00000.json")
    assert [draw(), draw()] == expected


def test_rank_that_was_not_there_keeps_its_seed(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    load_random_state(tmp_path / "random" / "rank_00007.json")
    assert torch.equal(torch.rand(2), expected)
