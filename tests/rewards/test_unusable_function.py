"""Users' files of reward functions that cannot be used, or not as they are: a sentence says so when they are loaded."""

from pathlib import Path

import pytest

from protocol.errors import OperatorError
from rewards.function_process import load_scorer
from rewards.user_function import UserFunction


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", r"reward.py has none of: reward_func, compute_score, score\. Name one function with --function"),
        ("def score(s): ...\ndef reward_func(queries): ...\n", r"reward.py has several of: reward_func"),
        ("def score(**kwargs): ...\n", r"score\(\*\*kwargs\) has no known form\. Expected reward_func"),
        ("def score(tokenizer, solution_str, ground_truth): ...\n", r"has no known form\. Expected reward_func"),
        *(
            (f"def score({given}): ...\n", "has no known form")
            for given in (
                "queries, prompts, labels, tokenizer",
                "queries",
                "queries, answers, prompts",
                "solution_strs, ground_truths, tokenizer",
                "*, sample",
                "data_source, solution_str, ground_truth, /",
            )
        ),
        ("def score(a, b): ...\n", r"score\(a, b\) has no known form\. Expected reward_func"),
        (
            "def score(completions): return [0] * len(completions)\n",
            r"known answers do not show .*reward.py reads .* as texts",
        ),
        (
            "def score(completions, **row): return row['trainer_state']\n",
            r"\(last error: KeyError\('trainer_state'\) .*:1",
        ),
        ("def score(completion_ids): ...\n", r"reads completion_ids, which .* does not receive\. Count words"),
        ("def score(completions, environments): ...\n", r"reads environments, which .* does not receive"),
        ("import no_such_module\n", r"cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'"),
        ("def score(:\n", r"cannot be loaded: SyntaxError"),
        ("raise SystemExit(3)\n", r"cannot be loaded: SystemExit: 3"),
    ],
)
def test_load_says_what_is_wrong_with_a_file(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(OperatorError, match=message):
        UserFunction(str(path))


def test_load_says_when_there_is_no_file() -> None:
    with pytest.raises(OperatorError, match=r"--function /nowhere/r.py is not a Python file"):
        UserFunction("/nowhere/r.py:score")


@pytest.mark.parametrize(("name", "is_named"), [("tool_calls", True), ("content", False)])
def test_function_that_looks_for_calls_of_tools_is_named(
    tmp_path: Path, name: str, is_named: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(f"def score(completions): return [float('{name}' in each[0]) for each in completions]\n")
    load_scorer(str(path), reads="messages")
    said = capfd.readouterr().err
    assert ("looks for calls or replies of tools, and a completion here is" in said) is is_named
    assert ("gets each completion as one message, which holds all turns of a conversation" in said) is not is_named


KNIGHTS = (
    "import re\ndef compute_score(solution_str, ground_truth, answer_reward=1.0):\n"
    "    if '<|im_start|>assistant' not in solution_str:\n        return -3.0\n"
    "    found = re.findall(r'(\\w+) is a (\\w+)', solution_str.split('<|im_start|>assistant')[1])\n"
    "    return 3.0 if found and found == re.findall(r'(\\w+) is a (\\w+)', ground_truth[LABEL]) else -1.0\n"
)


@pytest.mark.parametrize("without_prompt", ["-3.0", "1.0"])  # 1.0: of a right format, as in its older form
def test_logic_rl_function_gets_prompt_and_response(tmp_path: Path, without_prompt: str) -> None:
    path = tmp_path / "reward.py"
    path.write_text(KNIGHTS.replace("LABEL", "'solution_text_format'").replace("-3.0", without_prompt))
    assert UserFunction(str(path)).reads == "sequence"


# As DeepScaleR's: the prompt of many reasoning models ends with <think>.
THOUGHTS = (
    "def compute_score(solution_str, ground_truth):\n"
    "    thought, _, answer = solution_str.partition('</think>')\n"
    "    return float('<think>' in thought and f'boxed{{{ground_truth}}}' in answer)\n"
)


@pytest.mark.parametrize("source", [KNIGHTS.replace("LABEL", "'some_other_name'"), THOUGHTS])
@pytest.mark.parametrize("reads", ["auto", "response"])
def test_function_that_may_look_for_the_prompt_is_named_until_its_user_decides(
    tmp_path: Path, source: str, reads: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(source)
    load_scorer(str(path), reads=reads)
    assert ("--solution-str sequence" in capfd.readouterr().err) is (reads == "auto")
