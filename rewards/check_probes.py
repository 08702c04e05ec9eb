"""The probes of `rewards.check`: one sample, two different samples, the same sample again, and batches."""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

import httpx

from protocol.http.bodies import BodyError, read_scores

_CONNECT_S = 2.0
_MAX_REPLY_BYTES = 1 << 20
_SLOW_S = 10.0
_FINAL = "A run does not retry such a response."
_ADVICE = {
    301: "Give the address that it redirects to, if it is yours.",
    401: "Name the required header in the endpoint's headers_env (here: --header or --token-file).",
    404: "The path is used exactly as given: add the service's own, such as /get_reward.",
    405: "The address must accept POST: add the service's own path.",
    413: "The request is too large: lower batch_size, or raise the service's limit.",
    422: "The service expects other fields: make it read query, prompts and labels.",
    429: "It limits the request rate: lower max_concurrency.",
    500: "See the log of the service. A run retries a failed sample once, then returns its group.",
    503: "It is starting or overloaded: wait, or lower max_concurrency.",
}


@dataclass(frozen=True)
class Finding:
    """One fact about an endpoint."""

    kind: Literal["ok", "warning", "problem"]  # warning: usable, but check the fact; problem: unusable
    fact: str  # a sentence
    advice: str = ""  # remedy, or empty


@dataclass(frozen=True)
class Probe:
    """A sample that is sent to the endpoint."""

    prompt: str
    response: str
    label: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)  # other columns of the data row


class _Stop(Exception):
    """A problem that ends the check."""

    def __init__(self, fact: str, advice: str) -> None:
        super().__init__(fact)
        self.finding = Finding("problem", fact, advice)


class Endpoint:
    """A context manager that requests rewards from a URL as a run does."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            headers={"accept-encoding": "identity", **headers},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        )
        self.last_s = 0.0  # duration of the last request

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def ask(self, samples: Sequence[Probe]) -> tuple[float, ...]:
        """Return one reward per sample. Raises: _Stop for any other response, or none."""
        body: dict[str, Any] = {
            "query": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.label for sample in samples],
        }
        if any(sample.columns for sample in samples):
            body["columns"] = [dict(sample.columns) for sample in samples]
        reply = self._post(body)
        try:
            return tuple(scored.reward for scored in read_scores(reply, len(samples)))
        except BodyError as error:
            raise _Stop(f"In the reply {error}.", _reply_advice(reply, error, len(samples))) from None

    def _post(self, body: dict[str, Any]) -> bytes:
        started = time.monotonic()
        try:
            answer, content = self._runner.run(self._fetch(body))
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise _Stop(f"{self._url} is not an address ({error}).", "Expected http://HOST:PORT/PATH.") from None
        except httpx.ConnectTimeout:
            raise _Stop(
                f"No connection within {_CONNECT_S:g} s.", "Is the host right, and its port open to this machine?"
            ) from None
        except httpx.ConnectError as error:
            raise _Stop(f"No connection ({error}).", _connect_advice(str(error))) from None
        except TimeoutError:
            raise _Stop(
                f"No answer within {self._timeout_s:g} s.",
                "Raise the endpoint's timeout_s, or make the service faster.",
            ) from None
        except httpx.HTTPError as error:
            raise _Stop(
                f"The connection was lost ({type(error).__name__}: {error}).",
                "Does the service speak HTTP and stay up?",
            ) from None
        self.last_s = time.monotonic() - started
        return _check_answer(answer, content)

    async def _fetch(self, body: dict[str, Any]) -> tuple[httpx.Response, bytes]:
        """Return the response and its body, cut above the size limit.

        Raises: TimeoutError after timeout_s in total; httpx.HTTPError.
        """
        headers = {"idempotency-key": "sluice-check"}
        content = bytearray()
        async with (
            asyncio.timeout(self._timeout_s),
            self._client.stream("POST", self._url, json=body, headers=headers) as answer,
        ):
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > _MAX_REPLY_BYTES:
                    break
        return answer, bytes(content)


def _check_answer(answer: httpx.Response, content: bytes) -> bytes:
    """Return the body of a usable response. Raises: _Stop for any other."""
    status = answer.status_code
    if answer.has_redirect_location:
        raise _Stop(f"It redirects to {answer.headers['location']!r}, which a run does not follow.", _ADVICE[301])
    if status != 200:
        known = {403: 401, 400: 422, 502: 503, 504: 503}.get(status, status)
        text = content.decode(errors="replace")[:300].strip()
        raise _Stop(f"It answered {status}: {text}", _ADVICE.get(known, _FINAL))
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise _Stop("The reply is compressed, which was not requested.", "Disable compression in the service.")
    if len(content) > _MAX_REPLY_BYTES:
        raise _Stop(f"The reply is over {_MAX_REPLY_BYTES} bytes.", "Send the rewards only.")
    return content


def findings(endpoint: Endpoint, samples: Sequence[Probe]) -> Iterator[Finding]:
    """Yield the findings for two samples. The first problem ends the check."""
    first, second = samples
    try:
        rewards = endpoint.ask([first])
        yield Finding("ok", f"One sample got the reward {rewards[0]:g} in {endpoint.last_s:.2f} s.")
        yield from _slowness(endpoint)
        yield from _batch(endpoint, first, second, rewards[0])
    except _Stop as stop:
        yield stop.finding


def _slowness(endpoint: Endpoint) -> Iterator[Finding]:
    if endpoint.last_s > _SLOW_S:
        yield Finding(
            "warning",
            f"That is slow: 64 at a time make {64 / endpoint.last_s:.1f} samples/s at the most.",
            "Raise max_concurrency if the service takes more at once.",
        )


def _batch(endpoint: Endpoint, first: Probe, second: Probe, alone: float) -> Iterator[Finding]:
    """Yield whether two samples in one request get the same rewards as alone, in their order."""
    other = endpoint.ask([second])[0]
    again = endpoint.ask([first])[0]
    if again != alone:
        yield Finding(
            "warning",
            f"One sample got {alone:g}, then {again:g}.",
            "Is that intended? A sample may be sent twice.",
        )
    if alone == other:
        yield Finding("warning", f"Two different samples both got {alone:g}.", "Try --sample with your own row.")
    try:
        both, turned = endpoint.ask([first, second]), endpoint.ask([second, first])
    except _Stop as stop:
        advice = f"Leave batch_size at 1, or let the service accept several. {stop.finding.advice}".strip()
        yield Finding("warning", f"Two samples in one request fail: {stop.finding.fact}", advice)
        return
    if again == alone and both != (alone, other):
        fact = f"Alone two samples got {alone:g} and {other:g}, in one request {both[0]:g} and {both[1]:g}."
        yield Finding("warning", fact, "Leave batch_size at 1: rewards come back in another order, or are mixed.")
    elif again == alone and turned != both[::-1]:
        fact = "In one request the second reward depends on the first sample."
        yield Finding("warning", fact, "Leave batch_size at 1.")
    else:
        yield Finding("ok", "Two samples in one request got a reward each: batch_size may be above 1.")


def _connect_advice(problem: str) -> str:
    if "certificate" in problem.lower() or "ssl" in problem.lower():
        return "Its certificate is not trusted, or the port does not speak https: check http:// or https://."
    if "name" in problem.lower() and ("known" in problem or "resolution" in problem or "service" in problem):
        return "The host's name is not known here: check it, or give its address."
    return "Start the service, or check host and port. On another machine it must listen on more than 127.0.0.1."


def _reply_advice(reply: bytes, error: BodyError, num_samples: int) -> str:
    if reply.lstrip()[:1] == b"<":
        return "That is a web page: check the port and the path."
    if "NaN" in error.problem or "finite" in error.problem or "null" in error.problem or "None" in error.problem:
        return "Return a finite number for every sample: a reward is never invented."
    if "entries" in error.problem:
        return f"Return one reward for each of the {num_samples} queries, in their order."
    if "number" in error.problem:
        return "Return numbers, not text or truth values."
    return 'Return {"rewards": [one finite number for each query]}.'
