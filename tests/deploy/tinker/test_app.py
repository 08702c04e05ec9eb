"""The HTTP side: names of requests, polls, keys, and refusals. No engine starts."""

import asyncio
import json
import multiprocessing
import signal
import threading
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from deploy.tinker.adapters import BaseModel
from deploy.tinker.app import About, Api
from deploy.tinker.bodies import Sample
from deploy.tinker.journal import Journal, Request, Result, SamplerRow
from deploy.tinker.learning import Learning, Limits
from deploy.tinker.sampling import Sampling, _vllm_params
from deploy.tinker.wire import MESSAGES, Datum, in_order
from protocol.errors import NeighbourError
from tests.deploy.tinker.played_client import MODEL, datum, pass_body, read_logprobs
from tests.fakes.tiny_models import engine_of
from tests.fakes.waiting import wait_until

KEY = "tml-0123456789abcdef"
CREATE = {"session_id": "session", "model_seq_id": 0, "base_model": "base", "lora_config": {"rank": 4, "seed": 1}}
SESSION = {"session_id": "session", "sampling_session_seq_id": 3}


@pytest.fixture
async def http(base: BaseModel, model_folder: Path, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a service."""
    (tmp_path / "weights").mkdir()
    journal = Journal(tmp_path / "journal.sqlite")
    api = Api(journal, About(("base", "alias"), str(model_folder), "qwen2", 32), KEY)
    learning = Learning(journal, base, tmp_path, Limits(1 << 30, 16, ("base",)), api.on_result)
    engine = engine_of(model_folder).model_copy(update={"max_model_len": 32})
    api.start(learning, Sampling(journal, engine, tmp_path, api.on_result))
    threading.Thread(target=learning.run, daemon=True).start()
    transport = httpx.ASGITransport(api.app())
    headers = {"X-API-Key": KEY}
    async with httpx.AsyncClient(transport=transport, base_url="http://test/api/v1/", headers=headers) as client:
        yield client
        # The thread ends the process where it cannot write, and after the test its folder is gone.
        await asyncio.to_thread(wait_until, lambda: not journal.open_requests(of_samples=False))


async def result(http: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    """Return the result of a request."""
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    made = (await http.post(path, **sent)).json()
    return await http.post("retrieve_future", json={"request_id": made["request_id"]})


def sample(**changes: Any) -> dict[str, Any]:
    """Return the body of a sample request."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]}
    given = {"sampling_session_id": "session:sample:3", "seq_id": 1, "num_samples": 2, "prompt": prompt}
    return {**given, "sampling_params": {"max_tokens": 1}, **changes}


async def test_a_model_is_created_described_and_run(http: httpx.AsyncClient) -> None:
    created = await result(http, "create_model", CREATE)
    info = (await http.post("get_info", json={"model_id": MODEL})).json()
    passed = await result(http, "forward_backward", pass_body([datum([5, 6, 7])]))
    stepped = await result(http, "optim_step", {"model_id": MODEL, "seq_id": 2, "adam_params": {}})

    assert created.json()["model_id"] == MODEL
    assert (info["model_name"], info["lora_rank"], info["model_data"]["arch"]) == ("base", 4, "qwen2")
    assert passed.headers["content-type"] == "application/x-protobuf"
    assert len(read_logprobs(passed.content)) == 2
    assert stepped.json()["metrics"]["grad_norm"] > 0


async def test_a_run_keeps_its_metadata_and_describes_its_saved_weights(http: httpx.AsyncClient) -> None:
    await result(http, "create_model", {**CREATE, "user_metadata": {"renderer_name": "qwen3"}})
    await result(http, "optim_step", {"model_id": MODEL, "seq_id": 1})  # its state ends the need for earlier bodies
    path = (await result(http, "save_weights", {"model_id": MODEL, "seq_id": 2, "path": "mid"})).json()["path"]
    run = (await http.get(f"training_runs/{MODEL}")).json()
    info = (await http.post("weights_info", json={"tinker_path": path})).json()

    assert (run["base_model"], run["lora_rank"], run["user_metadata"]) == ("base", 4, {"renderer_name": "qwen3"})
    assert 0 <= (datetime.now(UTC) - datetime.fromisoformat(run["last_request_time"])).total_seconds() < 60
    assert (info["lora_rank"], info["train_attn"], info["train_unembed"]) == (4, True, False)


@pytest.mark.parametrize("verb", ["save_weights", "save_weights_for_sampler"])
async def test_deleted_weights_are_gone_from_the_disk(verb: str, http: httpx.AsyncClient, tmp_path: Path) -> None:
    await result(http, "create_model", CREATE)
    path = (await result(http, verb, {"model_id": MODEL, "seq_id": 1, "path": "old"})).json()["path"]
    model, _, name = path.removeprefix("tinker://").partition("/")
    assert saved_files(tmp_path)
    deleted = [await http.delete(f"training_runs/{model}/checkpoints/{name}") for _ in range(2)]

    assert [answer.status_code for answer in deleted] == [204, 404]
    assert saved_files(tmp_path) == []


def saved_files(folder: Path) -> list[Path]:
    files = [*(folder / "weights").rglob("*"), *(folder / "samplers").rglob("*")]
    return [each for each in files if each.is_file()]


async def test_a_number_has_one_request(http: httpx.AsyncClient) -> None:
    await result(http, "create_model", CREATE)
    one, other = pass_body([datum([5, 6, 7])]), pass_body([datum([5, 6, 8])])
    sent = [await http.post("forward_backward", content=body) for body in (one, one, other)]
    step = {"model_id": MODEL, "seq_id": 1, "adam_params": {}}
    await http.post("create_sampling_session", json=SESSION)
    picture = {"chunks": [{"type": "image"}]}  # refused before an engine starts
    sent.append(await http.post("optim_step", json=step))
    sent += [await http.post("asample", json=sample(prompt=picture, num_samples=num)) for num in (2, 2, 3)]

    assert [each.status_code for each in sent] == [200, 200, 422, 422, 200, 200, 422]
    assert sent[2].json()["error"].startswith(f"{MODEL} has another request with the number 1. Do two processes")


async def test_a_sampling_session_keeps_its_weights(http: httpx.AsyncClient) -> None:
    await result(http, "create_model", CREATE)
    saving = {"model_id": MODEL, "seq_id": 1, "path": "mine"}
    path = (await result(http, "save_weights_for_sampler", saving)).json()["path"]
    made = [await http.post("create_sampling_session", json=SESSION) for _ in range(2)]
    made.append(await http.post("create_sampling_session", json={**SESSION, "model_path": path}))
    other = {"model_id": MODEL, "seq_id": 2, "sampling_session_seq_id": 3}
    saved = (await result(http, "save_weights_for_sampler", other)).json()

    assert [each.status_code for each in made] == [200, 200, 422]
    assert made[2].json()["error"] == saved["error"]
    assert saved["error"].startswith("The session session has another request with the number 3.")
    assert "model_path" not in (await http.get("samplers/session:sample:3")).json()


def test_a_pass_has_the_same_bytes_in_any_order_of_its_inputs() -> None:
    given = datum([5, 6, 7], weights=[1, 0], advantages=[2, 3], logprobs=[4, 5])
    turned = Datum(given.tokens, dict(reversed(given.inputs.items())))

    assert in_order(pass_body([given])) == in_order(pass_body([turned]))
    assert in_order(in_order(pass_body([given]))) == in_order(pass_body([given]))


async def test_a_failed_request_has_its_error_and_whose_fault_it_is(http: httpx.AsyncClient) -> None:
    await result(http, "create_model", CREATE)
    failed = await result(http, "forward_backward", pass_body([datum([5, 6, 7])], "gspo"))

    assert failed.status_code == 200
    assert (failed.json()["category"], failed.json()["error"][:20]) == ("user", "loss_fn = gspo is no")


async def test_a_request_without_the_key_is_refused(http: httpx.AsyncClient) -> None:
    refused = await http.post("create_session", headers={"X-API-Key": "tml-other"})
    assert (refused.status_code, refused.json()["error"][:9]) == (401, "X-API-Key")


async def test_the_base_models_names_are_offered_and_each_has_its_samples(http: httpx.AsyncClient) -> None:
    offered = (await http.get("get_server_capabilities")).json()["supported_models"]
    made = await http.post("create_sampling_session", json={**SESSION, "base_model": "alias"})
    sampler = (await http.get("samplers/session:sample:3")).json()

    assert [(model["model_name"], model["max_context_length"]) for model in offered] == [("base", 32), ("alias", 32)]
    assert (made.status_code, sampler["base_model"]) == (200, "base")


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("retrieve_future", {"request_id": "none"}, 410, "The request none is not known"),
        ("weights_info", {"tinker_path": "tinker://none"}, 404, "tinker://none has no saved weights here."),
        ("get_info", {"model_id": "none"}, 404, "The model none was not created."),
        ("optim_step", {"model_id": MODEL, "seq_id": 1}, 404, f"The model {MODEL} was not created in this"),
        ("optim_step", {"model_id": MODEL}, 422, "$.seq_id Field required"),
        ("forward_backward", b"\xff", 422, "the body is no ForwardBackwardRequest."),
        ("load_weights", {"path": "tinker://a", "optimizer": True}, 422, "load_weights needs session_id"),
        ("asample", sample(), 404, "The sampling session session:sample:3 is not known."),
        ("create_sampling_session", {**SESSION, "model_path": "tinker://a/b"}, 404, "model_path = tinker://a/b has no"),
        (
            "create_sampling_session",
            {**SESSION, "base_model": "teacher"},
            422,
            "base_model = teacher is not served. Use",
        ),
    ],
)
async def test_a_wrong_request_is_refused_with_a_sentence(
    path: str, body: Any, status: int, text: str, http: httpx.AsyncClient
) -> None:
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    refused = await http.post(path, **sent)
    assert (refused.status_code, refused.json()["error"][: len(text)]) == (status, text)


async def test_a_sampling_session_of_the_base_model_names_it_in_each_sample(http: httpx.AsyncClient) -> None:
    made = (await http.post("create_sampling_session", json=SESSION)).json()
    shown = (await http.get("samplers/session:sample:3")).json()
    picture = {"chunks": [{"type": "image"}]}
    sent = (await http.post("asample", json=sample(prompt=picture))).json()

    assert made["sampling_session_id"] == shown["sampler_id"] == "session:sample:3"
    assert sent["sample_sequence_ids"] == ["base@0/session:sample:3/1/0", "base@0/session:sample:3/1/1"]


@pytest.mark.parametrize(("stop", "ignores"), [(None, False), ([], True), (["]"], False), ([7], False), ("]", False)])
def test_the_end_of_text_stops_a_sample_unless_the_list_of_stops_is_empty(stop: Any, ignores: bool) -> None:
    body = Sample.model_validate(sample(sampling_params={"stop": stop}))
    assert _vllm_params(body, 2, engine_of("tiny")).ignore_eos is ignores


class SecondStart:
    """An engine whose first start fails, as when its process is killed; it samples the token 7.

    The tokens 5 and 6 have the logprobs -0.5 and -0.6 in a prompt.
    """

    num_starts = 0
    errored = False

    def __call__(self, spec: object) -> "SecondStart":
        self.num_starts += 1
        if self.num_starts == 1:
            raise NeighbourError("engine", "vLLM did not start")
        return self

    async def generate(self, *given: object, **more: object) -> AsyncIterator[SimpleNamespace]:
        output = SimpleNamespace(token_ids=[7], logprobs=[{7: SimpleNamespace(logprob=-1.0)}], finish_reason="length")
        of_prompt = [{token: SimpleNamespace(logprob=-token / 10)} for token in (6, 5, 6)]
        yield SimpleNamespace(prompt_logprobs=[None, *of_prompt], outputs=[output])


async def test_a_sample_survives_an_engine_that_dies_as_it_starts(tmp_path: Path) -> None:
    engine = SecondStart()
    sampled = await sample_of(engine, tmp_path, sample(num_samples=1))

    assert list(np.frombuffer(sampled.sequences[0].tokens, np.int32)) == [7]
    assert engine.num_starts == 2


class Refusing(SecondStart):
    """An engine that refuses every request."""

    num_starts = 1

    async def generate(self, *given: object, **more: object) -> AsyncIterator[SimpleNamespace]:
        from vllm.exceptions import VLLMValidationError

        raise VLLMValidationError("50 is greater than 20")
        yield SimpleNamespace()


async def test_what_vllm_refuses_is_the_clients_to_correct(tmp_path: Path) -> None:
    row = SamplerRow("session:sample:3", "", "", 0)
    result = await result_of(Refusing(), tmp_path, sample(topk_prompt_logprobs=50), row, {})
    read = json.loads(result.content)

    assert (read["category"], read["error"][:47]) == ("user", "vLLM refuses the request: 50 is greater than 20")


async def test_a_process_of_an_engine_that_is_starting_ends_with_the_service(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    child.start()
    Sampling(Journal(tmp_path / "journal.sqlite"), engine_of("tiny"), tmp_path, print).close()
    await asyncio.to_thread(child.join, 60)

    assert child.exitcode == -signal.SIGTERM


async def test_only_the_requested_end_of_a_prompt_has_logprobs(tmp_path: Path) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 5, 6]}]}
    wanted = {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    sampled = await sample_of(SecondStart(), tmp_path, sample(num_samples=1, prompt=prompt, **wanted))
    found = np.frombuffer(sampled.prompt_logprobs, np.float32)

    np.testing.assert_allclose(found, [np.nan, np.nan, -0.5, -0.6], rtol=1e-6)


async def sample_of(engine: SecondStart, folder: Path, body: dict[str, Any]) -> Any:
    """Return the result of a sample request, as its message."""
    result = await result_of(engine, folder, body, SamplerRow("session:sample:3", "", "", 0), {})
    assert result.kind == "protobuf", result.content
    message = MESSAGES["Samples"]()
    message.ParseFromString(result.content)
    return message


async def result_of(
    engine: SecondStart, folder: Path, body: dict[str, Any], row: SamplerRow, engine_args: dict[str, Any]
) -> Result:
    journal, done = Journal(folder / "journal.sqlite"), asyncio.Event()
    spec = engine_of("tiny", engine_args=engine_args)
    sampling = Sampling(journal, spec, folder, lambda name: done.set(), engine)
    journal.put(row)
    made = Request("session:sample:3#1", "session:sample:3", 1, "asample", json.dumps(body).encode())
    journal.add(made)
    sampling.add(made)
    await asyncio.wait_for(done.wait(), 100)
    result = journal.result(made.id)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{"r": 32}', "The weights tinker://a have rank 32. Start the service with --max-rank 32."),
        (None, "The weights tinker://a are gone: deleted, or followed by newer ones"),
    ],
)
async def test_weights_that_vllm_cannot_load_are_refused_before_it_sees_them(
    config: str | None, text: str, tmp_path: Path
) -> None:
    engine = SecondStart()
    if config is not None:
        (tmp_path / "weights").mkdir()
        (tmp_path / "weights" / "adapter_config.json").write_text(config)
    row = SamplerRow("session:sample:3", "tinker://a", "weights", 1)
    result = await result_of(engine, tmp_path, sample(), row, {"max_lora_rank": 16})

    assert result.kind == "error"
    assert json.loads(result.content)["error"].startswith(text)
    assert engine.num_starts == 0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prompt": {"chunks": [{"type": "image"}]}}, "The prompt has a chunk that is no text."),
        (
            {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [5] * 32}]}},
            "The prompt has 32 tokens. Give 1 to 31.",
        ),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not served."),
    ],
)
async def test_a_sample_that_is_not_served_is_refused_before_an_engine_starts(
    changes: dict[str, Any], text: str, http: httpx.AsyncClient
) -> None:
    await http.post("create_sampling_session", json=SESSION)
    failed = json.loads((await result(http, "asample", sample(**changes))).content)
    assert (failed["category"], failed["error"][: len(text)]) == ("user", text)
