"""The processes of sync reward functions: their main thread, crashes, and calls that nobody waits for."""

import asyncio
import time
from pathlib import Path

import pytest

from rewards import processes
from rewards.function_process import load_scorer
from rewards.sample import Score, ScorerFailure, make_sample

SAMPLES = [make_sample("", "", label) for label in ("wait", "right")]


def _scorer_of(folder: Path, body: str) -> str:
    (folder / "f.py").write_text(f"import os, signal, time\ndef score(sample):\n    {body}\n")
    return str(folder / "f.py")


async def test_function_may_use_alarms(tmp_path: Path) -> None:
    body = "signal.alarm(100); signal.alarm(0); return float(sample.label == 'right')"
    assert [score.reward for score in await load_scorer(_scorer_of(tmp_path, body))(SAMPLES)] == [0.0, 1.0]


async def test_function_that_kills_its_process_fails_its_sample_alone(tmp_path: Path) -> None:
    scorer = load_scorer(_scorer_of(tmp_path, "return 1.0 if sample.label == 'right' else os._exit(3)"))
    with pytest.raises(ScorerFailure, match="ProcessDied: its process ended with status 3") as failure:
        await scorer(SAMPLES)
    assert failure.value.index == 0
    assert (await scorer(SAMPLES[1:]))[0].reward == 1.0


@pytest.mark.parametrize(
    ("returned", "score"),
    [
        ("Score(numpy.float32(0.5), numpy.float16(1), {'n': numpy.int64(3)})", Score(0.5, 1.0, {"n": 3.0})),
        ("Score(torch.tensor([0.5]), logs={'a': torch.tensor(2)})", Score(0.5, logs={"a": 2.0})),
        ("{'score': numpy.float32(0.5), ('a', 1): 2.0, None: 3.0}", Score(0.5, logs={"('a', 1)": 2.0, "None": 3.0})),
        (r"{'score': 0.5, '\udc80': 1.0}", Score(0.5, logs={"?": 1.0})),
    ],
)
async def test_numbers_and_names_of_other_libraries_become_plain_ones(
    tmp_path: Path, returned: str, score: Score
) -> None:
    body = f"import numpy, torch; from rewards.sample import Score; return {returned}"
    assert await load_scorer(_scorer_of(tmp_path, body))(SAMPLES) == [score, score]


async def test_error_without_a_text_fails_its_sample(tmp_path: Path) -> None:
    body = "raise type('Mute', (Exception,), {'__str__': lambda self: 1 / 0})"
    with pytest.raises(ScorerFailure, match=r"^Mute: <Mute without a text>"):
        await load_scorer(_scorer_of(tmp_path, body))(SAMPLES)


async def test_what_a_function_prints_is_not_read_as_a_reply(tmp_path: Path) -> None:
    scorer = load_scorer(_scorer_of(tmp_path, "print('{}'); os.system('echo {}'); return 1.0"))
    assert (await scorer(SAMPLES[1:]))[0].reward == 1.0


async def test_program_that_a_function_starts_reads_no_other_samples_request(tmp_path: Path) -> None:
    scorer = load_scorer(_scorer_of(tmp_path, "return float(os.popen('timeout 5 cat').read() == '')"))
    assert [score.reward for score in await asyncio.wait_for(scorer(SAMPLES * 2), 30.0)] == [1.0] * 4


async def test_function_may_spawn_processes(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(
        "import multiprocessing\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "def length(text):\n    return len(text)\n"
        "def score(sample):\n    try:\n"
        "        with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:\n"
        "            return pool.submit(length, sample.label).result(60)\n"
        "    except Exception:\n        return 0.0\n"
    )
    assert (await load_scorer(str(tmp_path / "spawning.py"))(SAMPLES[1:]))[0].reward == 5.0


async def test_several_processes_run_calls_at_the_same_time(tmp_path: Path) -> None:
    body = f"open('{tmp_path}/' + sample.label, 'w'); t = time.time() + 20\n"
    body += (
        f"    while len(os.listdir('{tmp_path}')) < 3 and time.time() < t: time.sleep(0.01)\n    return t - time.time()"
    )
    scores = await load_scorer(_scorer_of(tmp_path, body), number=2)(SAMPLES)
    assert all(score.reward > 0 for score in scores)


async def test_abandoned_call_that_never_ends_is_killed_and_queued_ones_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_ABANDONED_S", 0.2)
    body = f"open('{tmp_path}/' + sample.label, 'w'); time.sleep(600 if sample.label == 'wait' else 0); return 1.0"
    scorer = load_scorer(_scorer_of(tmp_path, body))
    leaving = asyncio.ensure_future(scorer([SAMPLES[0], make_sample("", "", "queued")]))
    while not (tmp_path / "wait").exists():
        await asyncio.sleep(0.01)
    leaving.cancel()
    started = time.monotonic()
    assert (await scorer(SAMPLES[1:]))[0].reward == 1.0
    assert time.monotonic() - started < 60
    assert not (tmp_path / "queued").exists()
