"""The engine's door to vLLM, with the real vLLM on a tiny model."""

import asyncio
import os
import re
import signal
import string
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from learner.rank.push import _NUM_TOKENS
from protocol.errors import NeighbourError
from rollout.endpoint.player import AgentPlayer
from rollout.engine.engine import Engine, sampling_params, token_request
from rollout.engine.generation import Sampling
from rollout.engine.version_gate import VersionGate
from rollout.environments.agents import AgentTask
from rollout.environments.base import Resources, Task
from rollout.episodes.conversation import SampleTask, WrittenSoFar
from rollout.episodes.player import EpisodePlayer
from rollout.neighbours.reward_client import NoRewards
from tests.fakes.rollout_fakes import ScriptedScorer, make_spec
from tests.fakes.tiny_models import TAGS, engine_of, make_tiny_model, serve_loaded, start_loaded
from tests.rollout.engine.three_turns import Copies, ThreeTurns

pytestmark = [
    pytest.mark.stack,
    pytest.mark.ranks,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

PROMPT = [20, 21, 14, 22, 23, 32]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), tied=False)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    )
    engine = await start_loaded(engine_of(folder))
    yield engine
    engine.shutdown()


async def test_engine_refuses_to_generate_before_its_weights_have_a_version(engine: Engine) -> None:
    with pytest.raises(NeighbourError, match=r"^engine: serves nothing: its weights were not verified"):
        await engine.generate(PROMPT, Sampling(4, 1.0), "unsynced")


async def test_generation_has_a_logprob_for_every_token_and_ends_at_the_length(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    generation = await engine.generate(PROMPT, Sampling(5, 1.0, seed=1), "length")

    assert len(generation.tokens) == 5
    assert len(generation.logprobs) == 5
    assert all(logprob <= 0.0 for logprob in generation.logprobs)
    assert generation.version_spans == ((0, 5, 3),)
    assert (generation.finish_reason, generation.stop_string) == ("length", None)
    assert generation.text == engine.decode(generation.tokens)
    assert engine.end_tokens == {1}  # of the model's generation_config.json


async def test_greedy_generations_are_equal(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    sampling = Sampling(12, 1.0, greedy=True)
    first = await engine.generate(PROMPT, sampling, "greedy-1")
    second = await engine.generate(PROMPT, sampling, "greedy-2")

    assert first.tokens == second.tokens


async def test_engine_draws_as_sampling_says(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    greedy = await engine.generate(PROMPT, Sampling(8, 1.0, greedy=True), "drawn-greedy")
    for name, sampling in {
        "top_k": Sampling(8, 1.0, top_k=1, seed=3),
        "top_p": Sampling(8, 1.0, top_p=1e-6, seed=3),
        "min_p": Sampling(8, 1.0, min_p=1.0, seed=3),
    }.items():
        assert (await engine.generate(PROMPT, sampling, f"drawn-{name}")).tokens == greedy.tokens
    biased = await engine.generate(PROMPT, Sampling(4, 1.0, logit_bias={5: 100.0}), "drawn-biased")
    assert biased.tokens == [5] * 4


async def test_stop_string_is_kept_and_ends_the_generation(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    letters = tuple(string.ascii_lowercase)
    stopped = await engine.generate(PROMPT, Sampling(400, 1.0, stop=letters), "stopped")

    texts = [engine.decode([token]) for token in stopped.tokens]
    assert [any(letter in text for letter in letters) for text in texts] == [False] * (len(texts) - 1) + [True]
    assert len(stopped.logprobs) == len(texts)
    assert stopped.version_spans == ((0, len(texts), 3),)
    assert stopped.finish_reason == "stop"
    assert stopped.stop_string is not None
    assert stopped.stop_string in texts[-1]


async def test_token_that_a_stop_string_ends_inside_is_kept_whole(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    for seed in range(100):  # until one of the four tags comes up before any other "<"
        stopped = await engine.generate(PROMPT, Sampling(200, 1.0, stop=("<",), seed=seed), f"inside-{seed}")
        if stopped.text.endswith(">"):
            break

    assert stopped.stop_string == "<"
    assert engine.decode(stopped.tokens[-1:]) in TAGS
    assert stopped.text == engine.decode(stopped.tokens)


async def test_stop_string_is_not_found_inside_the_name_of_an_end_token(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    name = engine.decode([1])
    for stop, found in [((name[-1],), None), ((name,), name)]:
        ended = await engine.generate(PROMPT, Sampling(9, 1.0, stop=stop, logit_bias={1: 100.0}), f"end-{found}")

        assert (ended.tokens, ended.finish_reason, ended.stop_string) == ([1], "stop", found)


async def test_turns_end_where_vllm_ends_them(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    free = await engine.generate(PROMPT, Sampling(150, 1.0, greedy=True, logit_bias={1: -100.0}), "free")
    pairs = [free.text[i : i + 2] for i in range(len(free.text) - 1)]
    readable = [pair for pair in pairs if pair.isascii() and pair.isprintable()]
    assert len(set(readable)) > 3
    for stop in [(readable[0],), (readable[-1], "not written"), (readable[1][0], readable[1]), ("not written",)]:
        sampling = Sampling(150, 1.0, stop=stop, greedy=True, logit_bias={1: -100.0})
        ours = await engine.generate(PROMPT, sampling, f"ours-{stop}")
        by_vllm = sampling_params(sampling, can_seed=False, ends_turns=False)
        plain = (await engine._run_request(token_request(PROMPT, "plain"), by_vllm, f"plain-{stop}")).outputs[0]

        assert (ours.tokens, ours.finish_reason) == (list(plain.token_ids), plain.finish_reason)
        assert ours.stop_string == plain.stop_reason
        assert ours.logprobs == pytest.approx(plain.logprobs.logprobs, abs=1e-4)
        assert ours.version_spans == ((0, len(ours.tokens), 3),)


async def test_tokens_around_a_pause_have_the_version_that_wrote_them(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(480, 1.0, seed=2, logit_bias={1: -100.0}), "long"))
    await engine.generate(PROMPT, Sampling(8, 1.0, seed=3), "short")  # the other one is under way
    await engine._pause()
    await serve_loaded(engine, 4)
    await engine._resume()
    generation = await task

    (start, change, first), (changed, end, second) = generation.version_spans
    assert (start, first, second, changed, end) == (0, 3, 4, change, 480)
    assert 4 <= change < 480
    assert len(generation.logprobs) == 480


async def test_cancelled_generation_leaves_the_engine(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(480, 1.0, seed=2), "cancelled"))
    while engine.stats.num_in_flight == 0:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    after = await engine.generate(PROMPT, Sampling(3, 1.0, seed=2), "cancelled")

    assert engine.stats.num_in_flight == 0
    assert len(after.tokens) == 3


async def test_prompt_longer_than_the_window_is_refused_by_name(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    with pytest.raises(NeighbourError, match=r"request too-long was refused: .*512"):
        await engine.generate([20] * 600, Sampling(4, 1.0), "too-long")


async def test_commit_without_a_push_that_was_received_is_refused(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    with pytest.raises(NeighbourError, match=r"^engine: cannot receive: no push was prepared$"):
        await engine.receive()
    with pytest.raises(NeighbourError, match=r"^engine: cannot commit: nothing was received"):
        await engine.commit(4, "0" * 64)

    assert (await engine.generate(PROMPT, Sampling(3, 1.0), "unharmed")).version_spans == ((0, 3, 3),)


async def test_probe_without_verified_weights_is_refused(engine: Engine) -> None:
    engine.forget_weights()
    with pytest.raises(NeighbourError, match="holds no verified weights to probe"):
        await engine.probe(PROMPT)


async def test_probe_gives_the_logprobs_of_a_generation(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    generation = await engine.generate(PROMPT, Sampling(16, 1.0, seed=5), "probed")
    logprobs = await engine.probe(PROMPT + generation.tokens)

    assert logprobs[len(PROMPT) - 1 :] == pytest.approx(generation.logprobs, abs=1e-4)


async def test_first_probe_after_a_commit_finds_what_is_cached_of_other_weights(engine: Engine) -> None:
    tokens = (PROMPT * 23)[:_NUM_TOKENS]  # as long as the learner's text is
    await serve_loaded(engine, 3)
    await engine.probe(tokens)
    again = await engine.probe(tokens)  # of the same weights: what is cached is left aside
    engine._is_cache_fresh = True  # as a commit has it, which should have changed the salt of the cache
    with pytest.raises(NeighbourError, match=r"from 128 tokens' keys and values cached under other weights"):
        await engine.probe(tokens)

    assert len(again) == len(tokens) - 1


async def test_conversation_of_an_agent_has_the_engines_tokens_and_logprobs(engine: Engine) -> None:
    await serve_loaded(engine, 3)
    contents = []

    async def program(task: AgentTask) -> float:
        async with AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
            messages: list[Any] = [{"role": "user", "content": task.prompt}]
            for _ in range(3):
                # Bytes of a random model are mostly no text: what comes back is not what was sampled.
                turn = await client.chat.completions.create(model="m", messages=messages, max_tokens=12)
                contents.append(turn.choices[0].message.content)
                messages += [turn.choices[0].message, {"role": "user", "content": "more"}]
        return 0.5

    gate = VersionGate()
    gate.open()
    player = await AgentPlayer.open(engine, gate, program, NoRewards(), make_spec(), "s0", "token")
    trajectory = await player.play(SampleTask("g", 0, 1, 1, "train", 7, Task("hello", None, {})))
    await player.close()

    tokens, is_own = trajectory.tokens.tolist(), trajectory.loss_mask.astype(bool)
    probed = np.array([0.0, *await engine.probe(tokens)])
    assert trajectory.behaviour_logprobs[is_own] == pytest.approx(probed[is_own], abs=1e-4)
    assert (trajectory.facts.num_turns, trajectory.facts.reward) == (3, 0.5)
    assert any("\ufffd" in content for content in contents)
    assert engine.decode(tokens).count("[user]more[assistant]") == 2


async def test_conversation_of_two_servers_has_the_engines_tokens_and_logprobs(
    engine: Engine,
) -> None:
    """Likeliest tokens are the same ones, whoever writes them; each version stands on the tokens that it wrote."""
    await serve_loaded(engine, 3)
    gate, settings = VersionGate(), make_spec(max_response_tokens=12).rollout
    gate.open()
    player = EpisodePlayer(engine, gate, ThreeTurns, Resources(3), ScriptedScorer(), settings, "s0")
    sample = SampleTask("g", 0, 1, 1, "train", 7, Task("hello", None, {}, is_greedy=True))
    whole = await player.play(sample, WrittenSoFar(listener=(kept := Copies())))
    engine.forget_weights()
    await serve_loaded(engine, 4)
    resumed = await player.play(replace(sample, attempt=2), WrittenSoFar(listener=Copies(kept.copies[0])))

    assert resumed.tokens.tolist() == whole.tokens.tolist()
    assert resumed.behaviour_logprobs == pytest.approx(whole.behaviour_logprobs, abs=1e-4)
    probed, is_own = np.array([0.0, *await engine.probe(resumed.tokens.tolist())]), resumed.loss_mask.astype(bool)
    assert resumed.behaviour_logprobs[is_own] == pytest.approx(probed[is_own], abs=1e-4)
    assert [(new.start, new.version) for new in resumed.facts.version_spans] == [
        (old.start, 4 if place else 3) for place, old in enumerate(whole.facts.version_spans)
    ]


@pytest.mark.usefixtures("engine")
async def test_no_process_of_the_engine_listens_beyond_loopback() -> None:
    me = psutil.Process()
    own = {process.pid for process in [me, *me.children(recursive=True)]}
    lines = subprocess.run(["ss", "-Hltnp"], capture_output=True, text=True, check=True).stdout.splitlines()
    addresses = [line.split()[3] for line in lines if own & {int(pid) for pid in re.findall(r"pid=(\d+)", line)}]

    assert len(own) > 1
    assert [address for address in addresses if not address.startswith(("127.0.0.1:", "[::1]:"))] == []


async def test_death_of_the_engine_process_is_noticed_at_once(engine: Engine) -> None:
    """The last test here: the engine is dead afterwards."""
    await serve_loaded(engine, 3)
    task = asyncio.create_task(engine.generate(PROMPT, Sampling(480, 1.0, seed=2), "dying"))
    await engine.generate(PROMPT, Sampling(4, 1.0, seed=3), "short")  # the other one is under way
    for process in psutil.Process().children(recursive=True):
        if "EngineCor" in " ".join(process.cmdline()):
            os.kill(process.pid, signal.SIGKILL)
    async with asyncio.timeout(20.0):
        with pytest.raises(
            NeighbourError, match=r"^engine: request dying died with the engine \(EngineCore\w* died by SIGKILL\)"
        ):
            await task

    assert not engine.is_alive


async def test_engine_reports_how_many_samples_it_decodes_and_holds(engine: Engine) -> None:
    assert engine.stats.max_running == 128
    assert engine.stats.cache_tokens is not None
    assert engine.stats.cache_tokens > 10_000
