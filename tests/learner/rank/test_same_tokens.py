"""Which tokenizers of other roles are taken beside the policy's."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from learner.rank.same_tokens import check_same_tokens
from protocol.errors import OperatorError
from tests.fakes.tiny_models import make_tiny_model


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    policy = make_tiny_model(tmp_path / "policy", tied=True, hidden_size=32, num_layers=1)
    shutil.copytree(policy, tmp_path / "critic")
    return policy, tmp_path / "critic"


def test_the_same_tokenizer_is_taken(folders: tuple[Path, Path]) -> None:
    policy, critic = folders
    check_same_tokens("critic.model", critic, policy)


@pytest.mark.parametrize(("form", "pair"), [("tokenizer.json", "Th"), ("vocab.json", "Th"), ("tokenizer.json", "?@")])
def test_another_tokenizer_of_equal_size_is_refused_with_the_first_token_that_differs(
    folders: tuple[Path, Path], form: str, pair: str
) -> None:
    policy, critic = folders
    path = critic / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    one, other = pair
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    path.write_text(json.dumps(content))
    if form == "vocab.json":
        for path in critic.glob("tokenizer*"):
            path.unlink()
        (critic / "vocab.json").write_text(json.dumps(vocabulary))
        (critic / "merges.txt").write_text("#version: 0.2\n")
    said = rf"^critic\.model has another tokenizer than policy\.model: [{pair}] is token \d+ in it and"
    with pytest.raises(OperatorError, match=said):
        check_same_tokens("critic.model", critic, policy)


@pytest.mark.parametrize(
    ("others", "found"),
    [
        (["<|im_end|>", "<|im_start|>"], r"<\|im_.* is token \d+ in it and"),
        (["<|User|>", "<|Assistant|>"], r"token \d+ is <\|.*\|> in it and <\|im_"),
    ],
)
def test_special_token_at_another_place_or_of_another_name_is_refused(
    folders: tuple[Path, Path], others: list[str], found: str
) -> None:
    policy, critic = folders
    for folder, names in ((policy, ["<|im_start|>", "<|im_end|>"]), (critic, others)):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": names})
        tokenizer.save_pretrained(folder)
    with pytest.raises(OperatorError, match=rf"another tokenizer than policy\.model: {found}"):
        check_same_tokens("critic.model", critic, policy)
