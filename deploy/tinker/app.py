"""Tinker's HTTP API: requests go to the journal, are answered with their names, and run later."""

import asyncio
import hmac
import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeVar
from uuid import uuid4

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from deploy.tinker import bodies
from deploy.tinker.journal import Journal, Request, SamplerRow
from deploy.tinker.learning import Learning
from deploy.tinker.naming import check_base, model_id, request_id, sampler_id
from deploy.tinker.sampling import Sampling, sequence_ids
from deploy.tinker.wire import RequestError, in_order, read_head
from protocol.http.app import BodyTooLargeError, read_body
from protocol.http.bodies import BodyError, read_request

_API = "/api/v1/"
_MAX_BODY_BYTES = 64 << 20
_HOLD_S = 20.0  # longest answer to a poll; clients wait 45 s
_MAX_SAMPLES = 4096  # sample requests in flight; more are refused with 429
_ABSENT_S = 600.0  # a session without a heartbeat for so long lets others use its memory
_Body = TypeVar("_Body", bound=bodies.Body)


@dataclass(frozen=True)
class About:
    """The base model, as clients see it."""

    names: tuple[str, ...]  # names that clients may use for the base model; answers have the first
    model: str  # folder of the model and its tokenizer
    arch: str  # transformers' name of its architecture
    max_tokens: int  # longest text

    @property
    def name(self) -> str:
        return self.names[0]


class Api:
    """The routes. Use it in one event loop."""

    def __init__(self, journal: Journal, about: About, key: str | None) -> None:
        """key: X-API-Key of every request; None: any."""
        self._journal, self._about, self._key = journal, about, key
        self._learning: Learning | None = None
        self._sampling: Sampling | None = None
        self._waiting: dict[str, asyncio.Event] = {}
        self._started = time.monotonic()
        self._seen: dict[str, float] = {}  # session -> time of its last sign of life
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, learning: Learning, sampling: Sampling) -> None:
        """Serve with these; called in the event loop."""
        self._learning, self._sampling, self._loop = learning, sampling, asyncio.get_running_loop()

    def on_result(self, name: str) -> None:
        """Wake the polls for a request. Any thread may call it."""
        if self._loop is not None:
            with suppress(RuntimeError):  # the service has ended, and the next start has the result
                self._loop.call_soon_threadsafe(self._wake, name)

    def app(self, lifespan: Any = None) -> Starlette:
        """Return the application."""
        posts: dict[str, Callable[[HttpRequest, bytes], Awaitable[Response]]] = {
            "client/config": self._nothing,
            "client/dynamic_config": self._nothing,
            "telemetry": self._accept,
            "cancel_future": self._nothing,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "sessions/{session}/finish": self._finish,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampling,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            **{verb: self._submit(verb, place) for verb, place in _PLACES.items()},
        }
        routes = [Route(_API + path, self._guard(call), methods=["POST"]) for path, call in posts.items()]
        gets = {
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler:path}": self._sampler,
            "training_runs/{model}": self._training_run,
        }
        routes += [Route(_API + path, self._guard(call), methods=["GET"]) for path, call in gets.items()]
        saved = _API + "training_runs/{model}/checkpoints/{kind}/{name}"
        routes.append(Route(saved, self._guard(self._delete), methods=["DELETE"]))
        routes.append(Route("/health", self._health, methods=["GET"]))
        return Starlette(routes=routes, lifespan=lifespan)

    def _guard(self, call: Callable[[HttpRequest, bytes], Awaitable[Response]]) -> Any:
        """Return a route that checks the key, reads the body and puts errors into words."""

        async def answer(request: HttpRequest) -> Response:
            given = request.headers.get("x-api-key", "")
            if self._key is not None and not hmac.compare_digest(given.encode(), self._key.encode()):
                return _error(401, "X-API-Key is not the key of this service. Set TINKER_API_KEY to it.")
            try:
                return await call(request, await read_body(request, _MAX_BODY_BYTES))
            except (BodyError, RequestError) as error:
                return _error(422, str(error))
            except BodyTooLargeError as error:
                return _error(413, str(error))
            except HTTPException as error:
                return _error(error.status_code, error.detail)

        return answer

    def _submit(self, verb: str, place: Callable[[bytes], tuple[str, int]]) -> Any:
        async def submit(request: HttpRequest, body: bytes) -> Response:
            owner, seq = place(body)
            if seq > 0 and not await asyncio.to_thread(self._journal.has, request_id(owner, 0)):
                raise HTTPException(404, f"The model {owner} was not created in this service's folder.")
            self._see(owner.partition(":train:")[0])
            made = Request(request_id(owner, seq), owner, seq, verb, in_order(body) if place is read_head else body)
            if await asyncio.to_thread(self._journal.add, made):
                assert self._learning is not None
                self._learning.add(made)
            return JSONResponse({"request_id": made.id, "model_id": owner})

        return submit

    async def _sample(self, request: HttpRequest, raw: bytes) -> Response:
        assert self._sampling is not None
        body = read_request(bodies.Sample, raw)
        sampler = self._journal.sampler(body.sampling_session_id)
        if sampler is None:
            raise HTTPException(404, f"The sampling session {body.sampling_session_id} is not known.")
        if self._sampling.num_in_flight >= _MAX_SAMPLES:
            raise HTTPException(429, f"{_MAX_SAMPLES} sample requests are in flight. Try again.")
        made = Request(request_id(sampler.id, body.seq_id), sampler.id, body.seq_id, "asample", raw)
        if await asyncio.to_thread(self._journal.add, made):
            self._sampling.add(made)
        names = sequence_ids(body, sampler, self._about.name)
        return JSONResponse({"request_id": made.id, "sample_sequence_ids": names})

    async def _retrieve(self, request: HttpRequest, raw: bytes) -> Response:
        name = read_request(bodies.RetrieveFuture, raw).request_id
        event = self._waiting.setdefault(name, asyncio.Event())
        try:
            result = await asyncio.to_thread(self._journal.result, name)
            if result is None:
                try:
                    await asyncio.wait_for(event.wait(), _HOLD_S)
                except TimeoutError:
                    return JSONResponse({"type": "try_again", "request_id": name, "queue_state": "active"})
                result = await asyncio.to_thread(self._journal.result, name)
        except KeyError:
            self._waiting.pop(name, None)
            raise HTTPException(410, f"The request {name} is not known, or too old.") from None
        self._waiting.pop(name, None)
        assert result is not None
        kind = "application/x-protobuf" if result.kind == "protobuf" else "application/json"
        return Response(result.content, media_type=kind)

    async def _create_session(self, request: HttpRequest, raw: bytes) -> Response:
        name = uuid4().hex
        self._see(name)
        return JSONResponse({"session_id": name, "type": "create_session"})

    async def _heartbeat(self, request: HttpRequest, raw: bytes) -> Response:
        self._see(read_request(bodies.SessionBody, raw).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: HttpRequest, raw: bytes) -> Response:
        self._release(request.path_params["session"])
        return Response(status_code=204)

    async def _info(self, request: HttpRequest, raw: bytes) -> Response:
        name = read_request(bodies.ModelBody, raw).model_id
        row = await asyncio.to_thread(self._journal.model, name)
        if row is None:
            raise HTTPException(404, f"The model {name} was not created.")
        about = self._about
        data = {"arch": about.arch, "model_name": about.name, "tokenizer_id": about.model}
        rank = json.loads(row.form)["rank"]
        named = {"model_name": about.name, "is_lora": True, "lora_rank": rank, "type": "get_info"}
        return JSONResponse({"model_id": name, "model_data": data, **named})

    async def _training_run(self, request: HttpRequest, raw: bytes) -> Response:
        name = request.path_params["model"]
        row = await asyncio.to_thread(self._journal.model, name)
        if row is None:
            raise HTTPException(404, f"The training run {name} is not known.")
        first = await asyncio.to_thread(self._journal.first_body, name)
        metadata = read_request(bodies.FirstBody, first).user_metadata if first else None
        idle_s = time.monotonic() - self._seen.get(name.partition(":train:")[0], self._started)
        seen = datetime.fromtimestamp(time.time() - idle_s, UTC).isoformat()
        lora = {"is_lora": True, "lora_rank": json.loads(row.form)["rank"], "user_metadata": metadata}
        named = {"training_run_id": name, "base_model": self._about.name, "model_owner": "local"}
        return JSONResponse({**named, **lora, "last_request_time": seen})

    async def _weights_info(self, request: HttpRequest, raw: bytes) -> Response:
        path = read_request(bodies.WeightsInfo, raw).tinker_path
        row = await asyncio.to_thread(self._journal.saved_weights, path)
        if row is None:
            raise HTTPException(404, f"{path} has no saved weights here.")
        form = json.loads(row.form)
        layers = {name: form[name] for name in ("train_attn", "train_mlp")} | {"train_unembed": False}
        return JSONResponse({"base_model": self._about.name, "is_lora": True, "lora_rank": form["rank"], **layers})

    async def _delete(self, request: HttpRequest, raw: bytes) -> Response:
        path = "tinker://{model}/{kind}/{name}".format(**request.path_params)
        assert self._learning is not None
        if not await asyncio.to_thread(self._learning.delete, path):
            raise HTTPException(404, f"{path} has no saved weights here.")
        return Response(status_code=204)

    async def _create_sampling(self, request: HttpRequest, raw: bytes) -> Response:
        body = read_request(bodies.CreateSamplingSession, raw)
        check_base(body.base_model, (*self._about.names, self._about.model))
        name = sampler_id(body.session_id, body.sampling_session_seq_id)
        row = SamplerRow(name, "", "", 0)
        if body.model_path is not None:
            saved = await asyncio.to_thread(self._journal.saved_weights, body.model_path)
            if saved is None or saved.place.endswith(".safetensors"):
                raise HTTPException(404, f"model_path = {body.model_path} has no sampler weights here.")
            row = SamplerRow(name, saved.path, saved.place, saved.step)
        await asyncio.to_thread(self._journal.check_sampler, row)
        await asyncio.to_thread(self._journal.put, row)
        return JSONResponse({"sampling_session_id": name, "type": "create_sampling_session"})

    async def _sampler(self, request: HttpRequest, raw: bytes) -> Response:
        name = request.path_params["sampler"]
        row = await asyncio.to_thread(self._journal.sampler, name)
        if row is None:
            raise HTTPException(404, f"The sampler {name} is not known.")
        path = {"model_path": row.path} if row.path else {}
        return JSONResponse({"sampler_id": name, "base_model": self._about.name, **path})

    async def _capabilities(self, request: HttpRequest, raw: bytes) -> Response:
        same = {"max_context_length": self._about.max_tokens, "trainable": True, "sampleable": True}
        return JSONResponse({"supported_models": [{"model_name": name, **same} for name in self._about.names]})

    async def _nothing(self, request: HttpRequest, raw: bytes) -> Response:
        return JSONResponse({})

    async def _accept(self, request: HttpRequest, raw: bytes) -> Response:
        return JSONResponse({"status": "accepted"})

    async def _health(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    def _see(self, session: str) -> None:
        self._seen[session] = now = time.monotonic()
        for absent in [name for name, last in self._seen.items() if now - last > _ABSENT_S]:
            self._release(absent)

    def _release(self, session: str) -> None:
        self._seen.pop(session, None)
        if self._learning is not None:
            self._learning.release(f"{session}:")

    def _wake(self, name: str) -> None:
        if (event := self._waiting.get(name)) is not None:
            event.set()


def _place_of(body_type: type[_Body], place: Callable[[_Body], tuple[str, int]]) -> Callable[[bytes], tuple[str, int]]:
    return lambda raw: place(read_request(body_type, raw))


def _place_of_load(body: bodies.LoadWeights) -> tuple[str, int]:
    if body.session_id is not None and body.model_seq_id is not None:
        return model_id(body.session_id, body.model_seq_id), 0
    if body.model_id is None or body.seq_id is None:
        raise RequestError("load_weights needs session_id and model_seq_id, or model_id and seq_id.")
    return body.model_id, body.seq_id


_place_of_head = _place_of(bodies.Head, lambda body: (body.model_id, body.seq_id))
# Verb of a model -> (body -> model and place in its order); a model's first request has the number 0.
_PLACES: dict[str, Callable[[bytes], tuple[str, int]]] = {
    "create_model": _place_of(bodies.CreateModel, lambda body: (model_id(body.session_id, body.model_seq_id), 0)),
    "forward_backward": read_head,
    "optim_step": _place_of_head,
    "save_weights": _place_of_head,
    "load_weights": _place_of(bodies.LoadWeights, _place_of_load),
    "save_weights_for_sampler": _place_of_head,
    "save_weights_external": _place_of_head,
}


def _error(status: int, text: str) -> Response:
    return JSONResponse({"detail": text, "error": text}, status)
