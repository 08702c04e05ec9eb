"""The scorer of a response's form."""

import pytest

from protocol.errors import OperatorError
from rewards.answer_format import form_of, has_form, make_format_scorer
from rewards.sample import make_sample

TWO = "<think>a</think> <answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TWO, True),
        (f"\n{TWO}\n", True),
        ("<think>a < b, see <b>c</b></think><answer>2</answer>", True),
        ("<think>a</think><think>b</think><answer>c</answer>", True),
        ("<answer>b</answer>", False),
        ("<think>a</think>", False),
        (f"Well: {TWO}", False),
        (f"{TWO} So there.", False),
        (f"{TWO}<answer>c</answer>", False),
        (f"{TWO}<think>c</think>", False),
        ("<think>a</think><answer> </answer>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><answer>b", False),
        ("</think>a<think><answer>b</answer>", False),
        ("", False),
    ],
)
def test_response_has_the_form_of_think_and_answer(text: str, expected: bool) -> None:
    assert has_form(text, form_of("think,answer")) is expected


def test_blocks_that_may_be_missing_may_stand_anywhere_before_the_last() -> None:
    form = form_of("think, search*, information*, answer")
    search = "<search>q</search><information>p</information>"
    assert has_form(TWO, form)
    assert has_form(f"<think>a</think>{search}<think>b</think>{search}<answer>c</answer>", form)
    assert not has_form(f"{TWO}{search}", form)


@pytest.mark.parametrize("tags", ["", "think,", "think,think", "think,answer*", "<think>", "a b"])
def test_tags_that_are_no_list_are_refused(tags: str) -> None:
    with pytest.raises(OperatorError, match=r"--tags .* is not a list of tags"):
        form_of(tags)


@pytest.mark.parametrize(
    "end", ["<|im_end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<seed:eos>", "<turn|>", "<SPECIAL_12>"]
)
async def test_control_tokens_that_the_rollout_server_left_out_are_no_text(end: str) -> None:
    (score,) = await make_format_scorer("think,answer")([make_sample(f"p{TWO}{end}", "p", None, None, TWO)])
    assert score.reward == 1.0


@pytest.mark.parametrize(("prompt", "response", "reward"), [
    ("q<think>\n", "a</think><answer>b</answer>", 1.0),
    ("q<think>\n", TWO, 1.0),
    ("say <think>, q", "a</think><answer>b</answer>", 0.0),
])  # fmt: skip
async def test_tag_that_the_prompt_ends_with_opens_the_response(prompt: str, response: str, reward: float) -> None:
    (score,) = await make_format_scorer("think,answer")([make_sample(prompt + response, prompt, None)])
    assert score.reward == reward


async def test_special_tokens_are_no_text_outside_the_tags() -> None:
    scorer = make_format_scorer("think,answer")
    samples = [make_sample(f"p{TWO}<|im_end|>", "p", None), make_sample("pno form", "p", None)]
    assert [score.reward for score in await scorer(samples)] == [1.0, 0.0]
