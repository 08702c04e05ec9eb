"""The FastAPI app of a reward service: POST to any path scores, GET /health, GET /metrics."""

import asyncio
import time
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.requests import ClientDisconnect

from protocol.http.app import body_schema, make_app, typed_body, wait_for_disconnect
from protocol.http.bodies import RewardReply, RewardRequest
from protocol.settings.paths import data_files
from rewards.sample import Sample, Score, Scorer, ScorerFailure, make_sample
from rewards.user_function import digest_of

MAX_REQUEST_BYTES = 64 << 20
_read_body = typed_body(RewardRequest, MAX_REQUEST_BYTES)


class RewardService:
    """Serves one scorer over HTTP. A failed scorer gives an error status, never a reward."""

    def __init__(self, scorer: Scorer, name: str) -> None:
        self._scorer = scorer
        self._name = name
        self._metrics = _Metrics()

    def app(self) -> FastAPI:
        """Return the application; one per service."""
        app = make_app(f"Rewards: {self._name}", self._metrics.registry, self._metrics.requests)
        app.add_exception_handler(ScorerFailure, _explain)
        app.get("/health")(self._health)
        app.post("/{path:path}", response_model=RewardReply, openapi_extra=body_schema(RewardRequest))(self._score)
        return app

    async def _score(self, request: Request, body: Annotated[RewardRequest, Depends(_read_body)]) -> Response:
        """Score samples: aligned lists in, one reward each out."""
        started = time.perf_counter()
        scores = await self._score_until_disconnect(request, _samples_of(body))
        self._metrics.samples.inc(len(scores))
        self._metrics.seconds.observe(time.perf_counter() - started)
        return JSONResponse(_reply(scores).model_dump(exclude_none=True))

    async def _score_until_disconnect(self, request: Request, samples: list[Sample]) -> list[Score]:
        """Return the samples' scores. Raises: ClientDisconnect if the client leaves; queued samples are skipped."""
        scoring = asyncio.ensure_future(self._scorer(samples))
        leaving = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait([scoring, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise ClientDisconnect
            return scoring.result()
        finally:
            scoring.cancel()
            leaving.cancel()

    async def _health(self) -> Response:
        called, digest = getattr(self._scorer, "called", ""), getattr(self._scorer, "digest", "")
        decides = sha256(f"{digest} {called}".encode()).hexdigest() if called else digest
        code: dict[str, Any] = {"code": decides} if decides else {}
        if files := getattr(self._scorer, "files", ()):
            code["is_edited"] = await asyncio.to_thread(digest_of, map(Path, files)) != digest
            code["data"] = await asyncio.to_thread(lambda: digest_of(data_files(map(Path, files))))
        return JSONResponse({"status": "ok", "scorer": self._name, **code})


def _samples_of(body: RewardRequest) -> list[Sample]:
    num = len(body.query)
    prompts: list[str | None] = [*body.prompts] if body.prompts is not None else [None] * num
    labels = body.labels if body.labels is not None else [None] * num
    columns = body.columns if body.columns is not None else [{}] * num
    plain: list[str | None] = [*body.responses] if body.responses is not None else [None] * num
    turns: list[int | None] = [*body.num_turns] if body.num_turns is not None else [None] * num
    return [make_sample(*parts) for parts in zip(body.query, prompts, labels, columns, plain, turns, strict=True)]


def _reply(scores: list[Score]) -> RewardReply:
    """Return the reply. The lists are aligned: a log has null for a sample without it.

    Raises: ScorerFailure when some samples have a score for filtering: their batch must not decide whether it counts.
    """
    filters = [score.score for score in scores if score.score is not None]
    if 0 < len(filters) < len(scores):
        index = next(index for index, score in enumerate(scores) if score.score is None)
        raise ScorerFailure(index, "ValueError", "has no score, and others of the request have one: give all or none")
    names = {name for score in scores for name in score.logs}
    return RewardReply(
        rewards=[score.reward for score in scores],
        scores=filters if scores and len(filters) == len(scores) else None,
        extra_logs={name: [score.logs.get(name) for score in scores] for name in sorted(names)} or None,
    )


async def _explain(request: Request, failure: Exception) -> Response:
    assert isinstance(failure, ScorerFailure)
    where = "the request" if failure.index is None else f"sample {failure.index}"
    answer = {
        "detail": f"the reward function failed on {where}: {failure}",
        "type": failure.kind,
        "message": failure.message,
        "where": failure.place or None,
        "sample": failure.index,
        "key": request.headers.get("idempotency-key"),
    }
    return JSONResponse(answer, 500)


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_reward_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.samples = Counter("sluice_reward_samples", "Samples scored.", registry=self.registry)
        self.seconds = Histogram("sluice_reward_request_seconds", "Time of a scored request.", registry=self.registry)
