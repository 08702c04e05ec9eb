"""A user's tool behind a URL: what is posted, what the policy reads, and what fails the sample instead."""

from typing import Any

import pytest

from protocol.errors import NeighbourError, OperatorError
from protocol.settings.tools import HttpTool
from rollout.environments.base import ToolRefusal
from rollout.neighbours.tools.http_tool import HttpToolClient
from tests.fakes.http_servers import Answer, ScriptedServer, free_address

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def _tool(url: str, **settings: Any) -> HttpToolClient:
    given = {"name": "weather", "url": url, "description": "Says how it is.", "parameters": WEATHER, **settings}
    return HttpToolClient(HttpTool(**given))


async def test_call_posts_its_arguments_with_headers_and_a_key(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEATHER_KEY", "secret")
    tool = _tool(server.script("call", Answer(b"dry")), headers_env={"Authorization": "WEATHER_KEY"})
    assert await tool.answer({"city": "Ürgüp", "days": [1, 2]}) == "dry"
    assert await tool(city="Ürgüp") == "dry"
    first, second = server.received["call"]
    assert first.body == {"city": "Ürgüp", "days": [1, 2]}
    assert first.headers["authorization"] == "secret"
    assert first.headers["idempotency-key"] != second.headers["idempotency-key"]
    assert tool.schema["function"] == {"name": "weather", "description": "Says how it is.", "parameters": WEATHER}
    await tool.close()


@pytest.mark.parametrize(
    ("reply", "read"),
    [
        (b"dry\n", "dry\n"),
        (b"", ""),
        ({"result": "dry"}, "dry"),
        ({"result": {"sky": "grün"}}, '{"sky": "grün"}'),
        ({"result": None}, "null"),
        ({"result": "dry", "error": None}, "dry"),
        ({"error": None}, '{"error": null}'),
        ({"sky": "grey"}, '{"sky": "grey"}'),
        ([1, 2], "[1, 2]"),
        (b'\xef\xbb\xbf{"result": "dry"}', "dry"),
        (b'{"result": "sun \\ud83d"}', "sun ?"),
        (b'{"result": {"sky": "\\ud83d"}}', '{"sky": "?"}'),
        (b'{"result": ', '{"result": '),
        (b"[" * 100_000, "[" * 100_000),
    ],
)
async def test_reply_is_read_as_text_or_as_its_result(server: ScriptedServer, reply: Any, read: str) -> None:
    tool = _tool(server.script("reply", Answer(reply)))
    assert await tool.answer({"city": "Ulm"}) == read
    await tool.close()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer({"error": "no such city"}), "no such city"),
        (Answer({"result": None, "error": {"code": 7}}), '{"code": 7}'),
        (Answer({"detail": [{"loc": ["city"]}]}, 422), '[{"loc": ["city"]}]'),
        (Answer({"error": None, "message": "which city?"}, 400), "which city?"),
        (Answer(b"no city", 400), "no city"),
    ],
)
async def test_call_that_the_tool_refuses_is_the_policys_to_mend(
    server: ScriptedServer, answer: Answer, reason: str
) -> None:
    tool = _tool(server.script("refused", answer))
    with pytest.raises(ToolRefusal) as refused:
        await tool.answer({"city": "Nowhere"})
    assert str(refused.value) == reason
    assert len(server.received["refused"]) == 1
    await tool.close()


@pytest.mark.parametrize(
    ("answer", "said", "num_attempts"),
    [
        (Answer({"result": "a stack trace"}, 500), "answered 500", 2),
        (Answer({"error": "who are you?"}, 401), "answered 401", 1),
        (Answer(b"nothing here", 404), "answered 404", 1),
        (Answer({"result": "moved"}, 307, headers={"location": "http://127.0.0.1:1/"}), "redirected to", 1),
        (Answer(b"\xff\xfe"), "is not text in UTF-8", 2),
        (Answer(b"x" * ((1 << 20) + 1)), "the reply is over 1048576 bytes", 2),
    ],
)
async def test_tool_that_fails_is_the_samples_failure_and_tells_the_policy_nothing(
    server: ScriptedServer, answer: Answer, said: str, num_attempts: int
) -> None:
    tool = _tool(server.script("failing", answer))
    with pytest.raises(NeighbourError, match=f"^tool:weather: .*{said}"):
        await tool.answer({"city": "Ulm"})
    assert len(server.received["failing"]) == num_attempts
    await tool.close()


async def test_attempts_of_one_call_carry_one_key(server: ScriptedServer) -> None:
    tool = _tool(server.script("flaky", Answer(b"busy", 503), Answer(b"busy", 429), Answer(b"dry")))
    assert await tool.answer({"city": "Ulm"}) == "dry"
    assert len(server.received["flaky"]) == 3
    assert len({received.headers["idempotency-key"] for received in server.received["flaky"]}) == 1
    await tool.close()


async def test_attempt_that_hangs_is_given_up_at_its_limit(server: ScriptedServer) -> None:
    tool = _tool(server.script("slow", Answer(b"late", delay_s=4.0), Answer(b"dry")), timeout_s=1.5)
    assert await tool.answer({"city": "Ulm"}) == "dry"
    assert len(server.received["slow"]) > 1
    await tool.close()


async def test_check_makes_the_call_that_the_settings_name(server: ScriptedServer) -> None:
    tool = _tool(server.script("checked", Answer(b"dry"), Answer({"error": "what?"})), check={"city": "Ulm"})
    await tool.check()
    assert [received.body for received in server.received["checked"]] == [{"city": "Ulm"}]
    advice = r"Start the tool, or change tools.http \(name weather\)\."
    with pytest.raises(NeighbourError, match=rf"^tool:weather: its first call was refused: what\?\. {advice}"):
        await tool.check()
    await tool.close()


async def test_check_without_a_call_sees_that_somebody_listens(server: ScriptedServer) -> None:
    tool = _tool(server.script("unasked", Answer(b"dry")))
    await tool.check()
    assert server.received["unasked"] == []
    await tool.close()
    tool = _tool(free_address())
    with pytest.raises(NeighbourError, match=r"no connection .*Start the tool, or change tools\.http \(name weather\)"):
        await tool.check()
    await tool.close()


def test_header_whose_variable_is_not_set_is_told_before_anything_starts() -> None:
    with pytest.raises(OperatorError) as missing:
        _tool("http://127.0.0.1:1/", headers_env={"X-Key": "NOT_SET_HERE"})
    assert str(missing.value) == (
        "settings: tools.http weather: the header X-Key comes from the environment variable NOT_SET_HERE, which is "
        "not set. Export it before you start the cluster."
    )
