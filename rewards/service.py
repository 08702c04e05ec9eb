"""The ASGI application of a reward service: POST to any path scores, GET /health, GET /metrics."""

import asyncio
import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from protocol.http.bodies import BodyError, RewardReply, RewardRequest, read_request
from protocol.http.body_limit import BodyTooLargeError, read_body
from rewards.sample import Sample, SampleError, Score, Scorer, ScorerFailure, make_sample
from rewards.workers import Workers

MAX_REQUEST_BYTES = 64 << 20
# A call may end a little after its client's patience; one that has not after so long hangs.
_STUCK_S = 60.0


class RewardService:
    """Answers one scorer over HTTP. A scorer that fails gives a status that says so, never a reward."""

    def __init__(self, scorer: Scorer, name: str, workers: Workers | None = None) -> None:
        """workers: what the scorer runs on, if it is a user's sync function."""
        self._scorer = scorer
        self._name = name
        self._workers = workers
        self._metrics = _Metrics()

    def app(self) -> Starlette:
        """Return the application; one per service."""
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._show_metrics),
                Route("/{path:path}", self._score, methods=["POST"]),
            ]
        )

    async def _score(self, request: Request) -> Response:
        started = time.perf_counter()
        try:
            body = await read_body(request.stream(), request.headers.get("content-length"), MAX_REQUEST_BYTES)
            samples = _samples_of(read_request(RewardRequest, body))
            scores = await self._scored(request, samples)
        except ClientDisconnect:
            return self._refuse(499, {"detail": "the client left"})  # nobody hears it; it is counted
        except BodyTooLargeError as error:
            return self._refuse(413, {"detail": str(error)})
        except (BodyError, SampleError) as error:
            return self._refuse(422, {"detail": str(error)})
        except ScorerFailure as failure:
            return self._refuse(500, _explain(failure, request))
        self._metrics.requests.labels("200").inc()
        self._metrics.samples.inc(len(scores))
        self._metrics.seconds.observe(time.perf_counter() - started)
        return JSONResponse(_reply(scores).model_dump(exclude_none=True))

    async def _scored(self, request: Request, samples: list[Sample]) -> list[Score]:
        """Return the samples' scores. Raises: ClientDisconnect when the client has left; what was not begun is not."""
        scoring = asyncio.ensure_future(self._scorer(samples))
        leaving = asyncio.ensure_future(_left(request))
        try:
            await asyncio.wait([scoring, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not scoring.done():
                raise ClientDisconnect
            return scoring.result()
        finally:
            scoring.cancel()
            leaving.cancel()

    def _refuse(self, status: int, body: dict[str, Any]) -> Response:
        self._metrics.requests.labels(str(status)).inc()
        return JSONResponse(body, status)

    async def _health(self, request: Request) -> Response:
        stuck_s = self._workers.stuck_s if self._workers is not None else 0.0
        if stuck_s >= _STUCK_S:
            problem = f"every worker runs a call that nobody has waited for since {stuck_s:.0f} s"
            return JSONResponse({"status": "stuck", "scorer": self._name, "detail": problem}, 503)
        return JSONResponse({"status": "ok", "scorer": self._name})

    async def _show_metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _left(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _samples_of(asked: RewardRequest) -> list[Sample]:
    num = len(asked.query)
    prompts: list[str | None] = [*asked.prompts] if asked.prompts is not None else [None] * num
    labels = asked.labels if asked.labels is not None else [None] * num
    columns = asked.columns if asked.columns is not None else [{}] * num
    return [make_sample(*parts) for parts in zip(asked.query, prompts, labels, columns, strict=True)]


def _reply(scores: list[Score]) -> RewardReply:
    """Return the reply; a log that only some samples have is left out, since the lists are aligned."""
    filters = [score.score for score in scores if score.score is not None]
    names = set(scores[0].logs).intersection(*(score.logs for score in scores)) if scores else set()
    return RewardReply(
        rewards=[score.reward for score in scores],
        scores=filters if scores and len(filters) == len(scores) else None,
        extra_logs={name: [score.logs[name] for score in scores] for name in sorted(names)} or None,
    )


def _explain(failure: ScorerFailure, request: Request) -> dict[str, Any]:
    where = "the request" if failure.index is None else f"sample {failure.index}"
    return {
        "detail": f"the reward function failed on {where}: {failure}",
        "type": type(failure.error).__name__,
        "message": str(failure).partition(": ")[2],
        "sample": failure.index,
        "key": request.headers.get("idempotency-key"),
    }


class _Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "sluice_reward_requests", "Requests by HTTP status.", ["status"], registry=self.registry
        )
        self.samples = Counter("sluice_reward_samples", "Samples scored.", registry=self.registry)
        self.seconds = Histogram("sluice_reward_request_seconds", "Time of a scored request.", registry=self.registry)
