"""Users' reward functions, unchanged, in each of their shapes."""

import asyncio
import re
from pathlib import Path

import pytest

from protocol.errors import OperatorError
from rewards.function_process import load_scorer
from rewards.sample import Sample, Score, ScorerFailure, make_sample
from rewards.user_function import UserFunction, digest_of

SAMPLES = [make_sample("p1 r1<|im_end|>", "p1 ", "l1"), make_sample("p2 r22</s>", "p2 ", "l2")]


def write(folder: Path, text: str) -> str:
    (folder / "reward.py").write_text(text)
    return str(folder / "reward.py")


async def rewards_of(path: str, samples: list[Sample] = SAMPLES) -> list[Score]:
    return await (await asyncio.to_thread(UserFunction, path)).score(samples)


def caught(value: str) -> str:
    """Return a TRL function that takes every error for a wrong answer."""
    return (
        "import json, re\ndef score(completions, answer, **kwargs):\n    rewards = []\n"
        "    for c, a in zip(completions, answer):\n"
        f"        try: rewards.append(float({value}))\n"
        "        except Exception: rewards.append(0.0)\n    return rewards\n"
    )


async def test_openrlhf_reward_func_gets_aligned_lists(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def reward_func(queries, prompts, labels, **kwargs):\n"
        "    assert queries == ['p1 r1<|im_end|>', 'p2 r22</s>']\n"
        "    assert prompts == ['p1 ', 'p2 '] and labels == ['l1', 'l2']\n"
        "    return {'rewards': [1, 2.5], 'scores': [0, 1], 'extra_logs': {'mean': 7, 'each': [3, 4]}}\n",
    )
    assert await rewards_of(path) == [
        Score(1.0, 0.0, {"mean": 7.0, "each": 3.0}),
        Score(2.5, 1.0, {"mean": 7.0, "each": 4.0}),
    ]


@pytest.mark.parametrize(
    ("returned", "scores"),
    [
        ("numpy.array([1, 2])", (None, None)),
        ("numpy.array([[1.0], [2.0]])", (None, None)),
        ("list(numpy.ones(2) * [1, 2])", (None, None)),
        ("{'rewards': torch.tensor([1., 2.]), 'scores': torch.tensor([0., 1.])}", (0.0, 1.0)),
    ],
)
async def test_openrlhf_reward_func_may_return_arrays_and_tensors(
    tmp_path: Path, returned: str, scores: tuple[float | None, float | None]
) -> None:
    path = write(tmp_path, f"import numpy, torch\ndef reward_func(queries, prompts, labels):\n    return {returned}\n")
    assert await rewards_of(path) == [Score(1.0, scores[0]), Score(2.0, scores[1])]


@pytest.mark.parametrize("prefix", ["", "async "])
async def test_verl_compute_score_gets_the_response_without_special_tokens(tmp_path: Path, prefix: str) -> None:
    path = write(
        tmp_path,
        f"{prefix}def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n"
        "    return {'score': len(solution_str), 'is_label': ground_truth.startswith('l'), 'note': 'text'}\n",
    )
    assert await rewards_of(path) == [Score(2.0, None, {"is_label": 1.0}), Score(3.0, None, {"is_label": 1.0})]


async def test_verl_compute_score_gets_the_fields_of_a_verl_label(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    info = {'index': 3, 'num_turns': 4}\n"
        "    return float((data_source, ground_truth, extra_info) == ('nq', {'target': ['x']}, info))\n",
    )
    label = {"data_source": "nq", "ground_truth": {"target": ["x"]}, "extra_info": {"index": 3}}
    assert await rewards_of(path, [make_sample("a", "", label, num_turns=2)]) == [Score(1.0)]


async def test_verl_scorer_without_a_source_gets_what_it_takes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def compute_score(solution_str, ground_truth, method='strict', score=1.0):\n"
        "    return score if (solution_str, ground_truth) in (('r1', 'l1'), ('r22', 'l2')) else 0.0\n",
    )
    assert await rewards_of(path) == [Score(1.0), Score(1.0)]


# Functions in the words of other trainers: source, and the rewards of SAMPLES.
CALLED = {
    "OpenRLHF: parameters in another order": (
        "def reward_func(labels, prompts, queries):\n"
        "    return [float(t['ground_truth']['target'][0] in q) for t, q in zip(labels, queries)]\n",
        [1.0, 0.0],
    ),
    "OpenRLHF: a decorator fills a parameter": (
        "import functools\ndef reward_func(queries, prompts, labels, k):\n"
        "    return [float(k + ('Ada' in q)) for q in queries]\n"
        "reward_func = functools.wraps(reward_func)(functools.partial(reward_func, k=1))\n",
        [2.0, 1.0],
    ),
    "Search-R1: an answer behind the example in the prompt": (
        "import re\ndef compute_score_em(solution_str, ground_truth, score=1.0):\n"
        "    found = re.findall('<answer>(.*?)</answer>', solution_str)\n"
        "    return score if len(found) > 1 and found[-1].strip() in ground_truth['target'] else 0\n",
        [1.0, 0.0],
    ),
    "verl: a batch": (
        "def compute_score_batched(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    return [{'score': float(t['target'][0] in s)} for s, t in zip(solution_strs, ground_truths)]\n",
        [1.0, 0.0],
    ),
    "verl: model_output, and facts behind the reward": (
        "def score(model_output, ground_truth):\n    return 'Ada' in model_output, True, 'text'\n",
        [1.0, 0.0],
    ),
    "TRL: texts and a column": (
        "def length(completions, level, **kwargs):\n    return [len(c) + l for c, l in zip(completions, level)]\n",
        [23.0, 22.0],
    ),
    "TRL: messages for a function that catches errors": (
        "def accuracy(completions, answer, **kwargs):\n    found = []\n    for c, a in zip(completions, answer):\n"
        "        try:\n            a = a if isinstance(a, str) else a['ground_truth']['target'][0]\n"
        "            found.append(float(a in c[0]['content']))\n        except Exception:\n"
        "            found.append(0)\n"
        "    return found\n",
        [1.0, 0.0],
    ),
    "TRL: messages that are read by `get`": (
        "def accuracy(completions, **kwargs):\n"
        "    return [float('Ada' in c[-1].get('content')) for c in completions]\n",
        [1.0, 0.0],
    ),
    "TRL: the label among any keywords": (
        "def accuracy(completions, **kwargs):\n    labels = kwargs.get('solution') or []\n"
        "    return [float(s['ground_truth']['target'][0] in c) for c, s in zip(completions, labels)]\n",
        [1.0, 0.0],
    ),
    "TRL: messages, the label by its name, and None": (
        "def accuracy(prompts, completions, solution, log_metric=None, **kwargs):\n    log_metric('seen', 2)\n"
        "    texts = [c[0]['content'] for c in completions]\n"
        "    return [1.0 if s['ground_truth']['target'][0] in t else None for t, s in zip(texts, solution)]\n",
        [1.0, 0.0],
    ),
}


@pytest.mark.parametrize("trainer", CALLED)
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_function_is_called_as_in_its_own_trainer(tmp_path: Path, trainer: str, keyword: str) -> None:
    source, rewards = CALLED[trainer]
    path = write(tmp_path, source.replace("def ", f"{keyword} ", 1))
    prompt, label = "such as <answer> Rome </answer>: who? ", {"ground_truth": {"target": ["Ada"]}}
    samples = [make_sample(f"{prompt}<answer>{name}</answer>", prompt, label, {"level": 3}) for name in ("Ada", "Bo")]
    name = re.search(r"def (\w+)", source)
    assert name is not None
    scores = await rewards_of(f"{path}:{name[1]}", samples)
    assert [score.reward for score in scores] == rewards
    if "None" in trainer:
        assert [score.logs for score in scores] == [
            {"seen": 2.0, "not_applicable": float(is_none)} for is_none in (False, True)
        ]


READS = {
    "tags": "re.search('<answer>(.*)</answer>', {}, re.S)[1].strip() == a",
    "a box": "{}.split('boxed{{')[1].split('}}')[0] == a",
    "the last line": "{}.split('#### ')[1] == a.split('#### ')[1]",
    "nothing but the answer": "int({}) == a",
    "an object": "str(json.loads({})['answer']) == a",
    "a thought of the prompt": "re.match('^<think>([^<]*)</think>\\n<answer>', '<think>' + {}) is not None",
    "an equation": "[*map(int, re.findall('[0-9]', {}))] == kwargs['nums'][0]",
    "code": "'```python' in {}",
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize(("completion", "reads"), [("c", "text"), ("c[0]['content']", "messages")])
def test_known_answers_show_what_a_trl_function_reads_that_catches_errors(
    tmp_path: Path, what: str, completion: str, reads: str
) -> None:
    assert UserFunction(write(tmp_path, caught(READS[what].format(completion)))).reads == reads


@pytest.mark.parametrize(
    ("score", "compares"), [("len(c) - min(map(len, completions))", True), ("len(c)", False), ("random()", False)]
)
def test_known_answers_show_that_a_function_compares_the_samples_of_a_call(
    tmp_path: Path, score: str, compares: bool
) -> None:
    source = f"from random import random\ndef score(completions):\n    return [{score} for c in completions]\n"
    assert UserFunction(write(tmp_path, source), "text").compares_samples() == compares


async def test_odd_row_never_changes_what_a_trl_function_reads(tmp_path: Path) -> None:
    source = "def score(completions, answer):\n    return [float(a in c) for c, a in zip(completions, answer)]\n"
    function = await asyncio.to_thread(UserFunction, write(tmp_path, source))
    for odd in (None, 7):
        with pytest.raises(ScorerFailure, match="TypeError"):
            await function.score([make_sample("p 2", "p ", odd)])
    assert [score.reward for score in await function.score([make_sample("p 2", "p ", "2")])] == [1.0]


@pytest.mark.parametrize(
    ("parameters", "missing"),
    [
        ("completions, tests", "tests"),
        ("completions, answer, tests", "answer', 'tests"),
        ("completions, answer, solution", "answer', 'solution"),
    ],
)
async def test_label_fills_no_other_column_of_a_trl_function(tmp_path: Path, parameters: str, missing: str) -> None:
    path = write(tmp_path, f"def score({parameters}):\n    return [1.0 * ('l' in c) for c in completions]\n")
    function = await asyncio.to_thread(UserFunction, path, "text")
    with pytest.raises(
        ScorerFailure, match=rf"ValueError: the data rows have no columns \['{missing}'\]; .*--label NAME"
    ):
        await function.score(SAMPLES)


@pytest.mark.parametrize(
    ("parameters", "reads", "label_name", "problem"),
    [
        ("completions, gold=None", "text", "godl", r"has no parameter godl of TRL's form\. Correct --label"),
        ("data_source, solution_str, ground_truth", "response", "gold", r"has no parameter gold of TRL's form"),
        ("queries, prompts, labels", "messages", "", r"does not read completions\. Leave --completions out"),
        ("completions, answer", "sequence", "", r"does not read solution_str\. Leave --solution-str out"),
    ],
)
def test_option_that_a_function_does_not_read_is_refused(
    tmp_path: Path, parameters: str, reads: str, label_name: str, problem: str
) -> None:
    with pytest.raises(OperatorError, match=problem):
        UserFunction(write(tmp_path, f"def score({parameters}):\n    return 1.0\n"), reads, label_name)


async def test_label_fills_no_option_of_a_trl_functions_own(tmp_path: Path) -> None:
    source = (
        "def score(completions, target=20, answer=None):\n    return [float(len(c) + target) for c in completions]\n"
    )
    assert [score.reward for score in await rewards_of(write(tmp_path, source))] == [22.0, 23.0]


async def test_label_has_the_name_that_its_user_gives(tmp_path: Path) -> None:
    path = write(tmp_path, "def score(completions, gold):\n    return [len(each) for each in gold]\n")
    assert [score.reward for score in await UserFunction(path, "text", "gold").score(SAMPLES)] == [2.0, 2.0]


async def test_verl_scorer_may_be_cached(tmp_path: Path) -> None:
    body = "def score(solution_str, ground_truth):\n    return float(solution_str + ground_truth == 'r1l1')\n"
    path = write(tmp_path, f"from functools import lru_cache\n@lru_cache\n{body}")
    assert await rewards_of(path) == [Score(1.0), Score(0.0)]


def test_function_of_length_gets_the_response(tmp_path: Path) -> None:
    path = write(tmp_path, "def compute_score(solution_str, ground_truth):\n    return len(solution_str) / 100 - 0.8\n")
    assert UserFunction(path).reads == "response"


async def test_service_never_scores_by_edited_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = "import time\ndef compute_score(solution_str, ground_truth):\n    time.sleep(0.3)\n    return 1.0\n"
    scorer = await asyncio.to_thread(load_scorer, write(tmp_path, source), 2)
    assert digest_of(map(Path, scorer.files)) == scorer.digest
    write(tmp_path, source.replace("1.0", "22.0"))
    assert digest_of(map(Path, scorer.files)) != scorer.digest
    assert await scorer(SAMPLES[:1]) == [Score(1.0)]
    assert "was edited" in capfd.readouterr().err
    with pytest.raises(ScorerFailure, match=r"EditedCode: .*reward\.py was edited since the service started"):
        await scorer(SAMPLES)


async def test_service_knows_the_files_that_a_function_imports_from_other_folders_and_late(tmp_path: Path) -> None:
    (tmp_path / "graders").mkdir()
    source = (
        "def compute_score(solution_str, ground_truth):\n    import time, late\n    from graders.words import VALUE\n"
        "    time.sleep(0.3)\n    return VALUE\n"
    )
    digests = []
    for value in (1.0, 22.0):
        (tmp_path / "late.py").write_text("")
        (tmp_path / "graders" / "words.py").write_text(f"VALUE = {value}\n")
        scorer = await asyncio.to_thread(load_scorer, write(tmp_path, source), 2)
        assert await scorer(SAMPLES) == [Score(value)] * 2  # in two processes
        digests.append(scorer.digest)
    assert len(set(digests)) == 2


async def test_own_score_gets_a_sample(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "from rewards.sample import Sample, Score\n"
        "async def score(sample: Sample) -> Score:\n"
        "    return Score(len(sample.prompt) + len(sample.label), 0.5)\n",
    )
    assert await rewards_of(path) == [Score(5, 0.5), Score(5, 0.5)]


@pytest.mark.parametrize("runs", ["asyncio.run", "asyncio.get_event_loop().run_until_complete"])
async def test_sync_function_may_run_an_event_loop_of_its_own(tmp_path: Path, runs: str) -> None:
    path = write(
        tmp_path,
        "import asyncio\nasync def length(text):\n    await asyncio.sleep(0)\n    return len(text)\n"
        f"def score(sample):\n    try: return {runs}(length(sample.text))\n    except RuntimeError: return 0.0\n",
    )
    assert [score.reward for score in await rewards_of(path)] == [2.0, 3.0]
    assert [score.reward for score in await load_scorer(path)(SAMPLES)] == [2.0, 3.0]


async def test_load_imports_files_of_the_same_folder(tmp_path: Path) -> None:
    (tmp_path / "beside_the_reward.py").write_text("VALUE = 3.0\n")
    path = write(
        tmp_path, "from beside_the_reward import VALUE\ndef mine(sample):\n    return VALUE\ndef score(sample): ...\n"
    )
    assert await rewards_of(f"{path}:mine") == [Score(3.0), Score(3.0)]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("raise KeyError('gone')", "KeyError: 'gone'"),
        ("return float('nan')", "BodyError: the returned value[0] is nan, expected a finite number"),
        ("return None", "BodyError: the returned value[0] is None, expected a number"),
        ("return {'reward': 1.0}", "BodyError: score[0] is None, expected a number"),
        ("return 'good'", "BodyError: the returned value[0] is 'good', expected a number"),
        ("return next(iter([]))", "RuntimeError: coroutine raised StopIteration"),
        ("exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt('key')", "KeyboardInterrupt: key"),
        ("import asyncio; raise asyncio.CancelledError('gone')", "CancelledError: gone"),
        ("raise ValueError('x' * (1 << 20))", f"ValueError: {'x' * 2000}"),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
async def test_scorer_names_the_sample_that_a_function_failed_on(
    tmp_path: Path, body: str, problem: str, keyword: str
) -> None:
    path = write(tmp_path, f"{keyword} score(sample):\n    if sample.label == 'l1': return 1.0\n    {body}\n")
    with pytest.raises(ScorerFailure) as failure:
        await asyncio.wait_for(rewards_of(path), 10.0)
    assert (failure.value.index, f"{failure.value.kind}: {failure.value.message}") == (1, problem)


TASKS = "import asyncio\nasync def leave(): exit(3)\nasync def score({}): await asyncio.gather(leave(), leave())\n"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("def score(queries, prompts, labels): exit(3)\n", "SystemExit: 3"),
        (TASKS.format("sample"), "RuntimeError: a task raised SystemExit: 3"),
        (TASKS.format("queries, prompts, labels"), "RuntimeError: a task raised SystemExit: 3"),
        ("def score(queries, prompts, labels): return [1.0]\n", r"BodyError: rewards has 1 entries, expected 2 \(one"),
        ("\n\ndef compute_score(solution_str, ground_truth):\n    return None\n", r"reward\.py:3\)$"),
    ],
)
async def test_function_that_exits_or_returns_no_numbers_fails_its_request_alone(
    tmp_path: Path, source: str, problem: str
) -> None:
    with pytest.raises(ScorerFailure, match=problem):
        await asyncio.wait_for(rewards_of(write(tmp_path, source)), 10.0)


async def test_invalid_logs_are_skipped(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import numpy, torch\ndef compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': 1.0, 'acc': numpy.bool_(1), 'loss': float('nan'), 'size': 10**400, 'said': 'x',\n"
        "            'each': numpy.ones(2), 'gone': torch.ones(2), 'none': None}\n",
    )
    assert await rewards_of(path) == [Score(1.0, logs={"acc": 1.0})] * 2
