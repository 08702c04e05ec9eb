"""`sluice check-reward URL`: check that a run can use a reward endpoint, and print what to change.

It waits up to 10 s for a service that starts. It sends requests as a run does, with two built-in samples or one of
yours (--sample), whose response must be right.
Each line of output is one fact: ok, a warning, or a problem. Exit 0: no problem.
"""

import argparse
import asyncio
import json
import math
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import httpx

from protocol.errors import OperatorError
from protocol.http.bearer import read_token
from protocol.http.bodies import BodyError, SampleScore, read_scores
from protocol.waits import until

_CONNECT_S = 2.0
_MAX_REPLY_BYTES = 1 << 20
_SLOW_S = 10.0
_START_S = 10.0
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
# Statuses of a service that may want rows of another form than the built-in ones.
_OF_THE_ROW = (400, 422, 500)
_OTHER_ROWS = "The built-in sample has the label '2' and no columns. If your rows have others, give one with --sample."
_SAME_ADVICE = {403: 401, 400: 422, 502: 503, 504: 503}


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
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_right: bool = False  # whether the user calls the response right


BUILT_IN = (
    Probe("What is 1 + 1?", " <think>one more</think><answer>2</answer>", "2"),
    Probe("What is 2 + 2?", " <think>hm</think><answer>5</answer>", "4"),
)


class Unusable(Exception):
    """A response that a run cannot use."""

    def __init__(self, fact: str, advice: str, status: int = 200) -> None:
        super().__init__(fact)
        self.finding = Finding("problem", fact, advice)
        self.status = status  # HTTP status of the response; 200 also without one


class Endpoint:
    """Requests rewards from a URL as a run does."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        self._url = url
        self._headers = {"accept-encoding": "identity", "idempotency-key": "sluice-check", **headers}
        self._timeout_s = timeout_s
        self.doubts: dict[str, Finding] = {}  # by what they are about: what a run does not use of the replies so far

    async def ask(self, *samples: Probe) -> tuple[float, ...]:
        """Return one reward per sample. Raises: Unusable for any other response, or none."""
        body: dict[str, Any] = {
            "query": [sample.prompt + sample.response for sample in samples],
            "responses": [sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.label for sample in samples],
            "num_turns": [1 for _ in samples],
        }
        if any(sample.columns for sample in samples):
            body["columns"] = [dict(sample.columns) for sample in samples]
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, content = await self._post(body)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise Unusable(f"{self._url} is not an address ({error}).", "Expected http://HOST:PORT/PATH.") from None
        except TimeoutError:
            advice = "Raise the endpoint's timeout_s, or make the service faster."
            raise Unusable(f"No answer within {self._timeout_s:g} s.", advice) from None
        except httpx.HTTPError as error:
            advice = "Start the service, or check host, port and http:// or https://. It must listen on this address."
            raise Unusable(f"No connection ({type(error).__name__}: {error}).", advice) from None
        _check_answer(answer, content)
        try:
            scored = read_scores(content, len(samples))
            self.doubts |= _doubts(json.loads(content), scored)
            return tuple(each.reward for each in scored)
        except BodyError as error:
            advice = f"Return one finite number for each of the {len(samples)} queries, in their order."
            advice = "That is a web page: check the port and the path." if content[:1] == b"<" else advice
            raise Unusable(f"In the reply {error}.", f'{advice} The form is {{"rewards": [..]}}.') from None

    async def _post(self, body: dict[str, Any]) -> tuple[httpx.Response, bytes]:
        """Return the response and its body, cut above the size limit."""
        content = bytearray()
        async with (
            httpx.AsyncClient(timeout=httpx.Timeout(None, connect=_CONNECT_S), trust_env=False) as client,
            client.stream("POST", self._url, json=body, headers=self._headers) as answer,
        ):
            async for chunk in answer.aiter_raw():
                content += chunk
                if len(content) > _MAX_REPLY_BYTES:
                    break
        return answer, bytes(content)


def _check_answer(answer: httpx.Response, content: bytes) -> None:
    """Raises: Unusable for any response but a complete reply."""
    status = answer.status_code
    if answer.has_redirect_location:
        raise Unusable(f"It redirects to {answer.headers['location']!r}, which a run does not follow.", _ADVICE[301])
    if status != 200:
        text = content.decode(errors="replace")[:300].strip()
        advice = _ADVICE.get(_SAME_ADVICE.get(status, status), "A run does not retry such a response.")
        raise Unusable(f"It answered {status}: {text}", advice, status)
    if answer.headers.get("content-encoding", "identity") != "identity":
        raise Unusable("The reply is compressed, which was not requested.", "Disable compression in the service.")
    if len(content) > _MAX_REPLY_BYTES:
        raise Unusable(f"The reply is over {_MAX_REPLY_BYTES} bytes.", "Send the rewards only.")


def _doubts(reply: Any, scored: Sequence[SampleScore]) -> dict[str, Finding]:
    """Return what a run does not use of a reply, or reads otherwise than meant."""
    fields, found = reply if isinstance(reply, dict) else {}, {}
    logs = fields.get("extra_logs")
    names = logs if isinstance(logs, dict) else ["extra_logs"] if logs is not None else []
    if unread := sorted(name for name in names if not any(name in each.logs for each in scored)):
        fact = f"extra_logs has no number for {', '.join(unread)}: such a curve is not drawn."
        advice = "Return one number or null for each sample, or one number for all."
        found["extra_logs"] = Finding("warning", fact, advice)
    if outside := [each.score for each in scored if each.score is not None and not 0 <= each.score <= 1]:
        fact = f"scores has {outside[0]:g}, and filter.low and filter.high mean 0 and 1 unless you set them."
        found["scores"] = Finding("warning", fact, "Return scores from 0 to 1, or set both.")
    return found


async def findings(endpoint: Endpoint, first: Probe, second: Probe) -> AsyncIterator[Finding]:
    """Yield the findings for two samples: alone, again and in one request. An unusable response ends the check."""
    try:
        started = time.monotonic()
        (alone,) = await endpoint.ask(first)
        took_s = time.monotonic() - started
        yield Finding("ok", f"One sample got the reward {alone:g} in {took_s:.2f} s.")
        if took_s > _SLOW_S:
            fact = f"That is slow: 64 at a time make {64 / took_s:.1f} samples/s at the most."
            yield Finding("warning", fact, "Raise max_concurrency if the service takes more at once.")
        (other,), (again,) = await endpoint.ask(second), await endpoint.ask(first)
    except Unusable as unusable:
        if first in BUILT_IN and unusable.status in _OF_THE_ROW:
            yield replace(unusable.finding, advice=_OTHER_ROWS)
        else:
            yield unusable.finding
        return
    if again != alone:
        fact = f"One sample got {alone:g}, then {again:g}."
        yield Finding("warning", fact, "Is that intended? A sample may be sent twice.")
    if first.is_right and alone == other <= 0:
        fact = f"Your right response got {alone:g}, as a wrong one did."
        yield Finding(
            "problem", fact, "The service does not recognise right answers: see its log and the label's form."
        )
    elif alone == other:
        yield Finding("warning", f"Two different samples both got {alone:g}.", "Try --sample with your own row.")
    try:
        both = await endpoint.ask(first, second)
    except Unusable as unusable:
        advice = f"Leave batch_size at 1, or let the service accept several. {unusable.finding.advice}"
        yield Finding("warning", f"Two samples in one request fail: {unusable}", advice)
        return
    # A model computes texts of a batch together, and its rewards round otherwise.
    rounding = 0.01 * abs(alone - other) + 1e-6 * max(abs(alone), abs(other))
    if again == alone and max(abs(both[0] - alone), abs(both[1] - other)) > rounding:
        fact = f"Alone two samples got {alone:g} and {other:g}, in one request {both[0]:g} and {both[1]:g}."
        yield Finding(
            "warning",
            fact,
            "Leave batch_size at 1: rewards come back in another order, are mixed, "
            "or compare the samples of a request, which a run does not group.",
        )
    else:
        yield Finding("ok", "Two samples in one request got a reward each: batch_size may be above 1.")
    for doubt in endpoint.doubts.values():
        yield doubt


def read_samples(path: Path | None) -> Sequence[Probe]:
    """Return two samples: built-in, or the user's and a wrong response to its prompt. Raises: OperatorError."""
    if path is None:
        return BUILT_IN
    try:
        row = json.loads(path.read_text(encoding="utf-8-sig").partition("\n")[0])  # other separators may be in a text
        given = Probe(**{"response": " <answer>1</answer>", **row}, is_right="response" in row)
        if not isinstance(given.prompt, str) or not isinstance(given.response, str):
            raise ValueError("prompt and response must be text")
        if not isinstance(given.columns, dict):
            raise ValueError("columns must be an object")
        return given, Probe(given.prompt, " <answer>none</answer>", given.label, given.columns)
    except (OSError, ValueError, TypeError) as error:
        raise OperatorError(
            f"rewards: --sample {path} is not a sample ({error}). Expected one line of JSON: "
            '{"prompt": "..", "response": "..", "label": ..}, and the row\'s other columns as "columns".'
        ) from None


def read_headers(given: Sequence[str], token_file: Path | None) -> dict[str, str]:
    """Return the request's headers. Raises: OperatorError for a text that is not a header."""
    headers = {"authorization": f"Bearer {read_token(token_file)}"} if token_file is not None else {}
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip() or not (header.isascii() and header.isprintable()):
            raise OperatorError(f"rewards: --header {header!r} is not a header. Expected NAME: VALUE in ASCII.")
        headers[name.strip().lower()] = value.strip()
    return headers


def _await_listener(url: str, timeout_s: float) -> None:
    """Return once the URL's port takes connections, at the latest after the limit: a service that starts refuses them.

    Other faults of the address return at once; the first request reports them.
    """
    with suppress(OSError, httpx.InvalidURL):
        address = listener_of(url)
        for _ in until(timeout_s, poll_s=0.2):
            with suppress(ConnectionRefusedError):
                socket.create_connection(address, timeout=_CONNECT_S).close()
                return


def listener_of(url: str) -> tuple[str, int]:
    """Return the host and port that a URL's requests go to. Raises: httpx.InvalidURL."""
    address = httpx.URL(url)
    return address.host, address.port or (443 if address.scheme == "https" else 80)


async def _check(arguments: argparse.Namespace) -> int:
    first, second = read_samples(arguments.sample)
    endpoint = Endpoint(arguments.url, read_headers(arguments.header, arguments.token_file), arguments.timeout_s)
    _await_listener(arguments.url, min(_START_S, arguments.timeout_s))
    is_usable, seen = True, []
    async for finding in findings(endpoint, first, second):
        seen.append(asdict(finding))
        if not arguments.json:
            print(f"{finding.kind:8} {finding.fact} {finding.advice}".rstrip(), flush=True)
        is_usable = is_usable and finding.kind != "problem"
    if arguments.json:
        print(json.dumps({"url": arguments.url, "is_usable": is_usable, "findings": seen}))
    else:
        verb = "can" if is_usable else "perhaps cannot" if seen[-1]["advice"] == _OTHER_ROWS else "cannot"
        print(f"{arguments.url} {verb} be used by a run.")
    return 0 if is_usable else 1


def main(arguments: Sequence[str]) -> int:
    try:
        return asyncio.run(_check(_parser().parse_args(arguments)))
    except OperatorError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a time limit. Expected seconds above 0")
    return seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice check-reward", description=__doc__)
    parser.add_argument("url", metavar="URL", help="as in rewards.endpoints")
    parser.add_argument(
        "--sample", type=Path, help='file with a line {"prompt", "response", "label", "columns"}; the response is right'
    )
    parser.add_argument("--header", action="append", default=[], help="NAME: VALUE, sent with each request")
    parser.add_argument("--token-file", type=Path, help="send the bearer token in this file")
    parser.add_argument("--timeout-s", type=_seconds, default=60.0, help="time limit of a request, as in the settings")
    parser.add_argument("--json", action="store_true", help="print the same facts as one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
