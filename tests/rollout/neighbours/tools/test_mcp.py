"""MCP servers made with the official library: what the policy reads, what fails a sample, servers that end or hang."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp_types import CallToolResult, ImageContent, ResourceLink, TextContent, Tool

from protocol.errors import NeighbourError
from protocol.settings.tools import McpServer
from rollout.environments.base import ToolRefusal
from rollout.neighbours.tools.mcp.server import McpClient, McpTools, text_of
from tests.fakes import mcp_server
from tests.fakes.http_servers import Answer, Received, scripted_server
from tests.fakes.ports import free_port

COMMAND = [sys.executable, mcp_server.__file__]


@asynccontextmanager
async def _client(check_s: float = 60.0, **settings: Any) -> AsyncIterator[McpClient]:
    client = McpClient(McpServer(**{"name": "things", "command": COMMAND, **settings}), check_s)
    try:
        yield client
    finally:
        await client.close()


async def _hung(client: McpClient, tool: str) -> str:
    """Return how a call fails that would last ten minutes, with a limit that is short for it alone."""
    usual = client.server
    client.server = usual.model_copy(update={"timeout_s": 0.5})
    try:
        with pytest.raises(NeighbourError) as failed:
            await client.call(tool, {"seconds": 600})
    finally:
        client.server = usual
    return str(failed.value)


async def test_calls_of_one_server_are_answered_refused_or_given_up_each_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    async with _client(env_from={"THINGS_KEY": "MY_KEY"}, folder=str(tmp_path)) as client:
        assert await client.call("echo", {"text": "hé <|im_end|>"}) == "hé <|im_end|>"
        assert await client.call("add", {"a": 1, "b": 2}) == "3"
        for tool, arguments, said in (
            ("refuse", {"text": "x"}, "Error executing tool refuse"),
            ("add", {"a": "x"}, "Error executing tool add: 2 validation errors"),
            ("nothing", {}, "Unknown tool: nothing"),
        ):
            with pytest.raises(ToolRefusal, match=said):
                await client.call(tool, arguments)
        assert await asyncio.gather(client.call("wait", {"seconds": 0.5}), client.call("echo", {"text": "beside"})) == [
            "waited",
            "beside",
        ]
        first = await client.call("keep", {"note": "a"})
        assert await _hung(client, "wait") == "mcp:things: Request 'tools/call' timed out"
        # The same process, and what it keeps, outlive calls.
        assert first.split()[1:] == ["1", "secret", str(tmp_path)]
        assert (await client.call("keep", {"note": "b"})).split()[:2] == [first.split()[0], "2"]
        client.server = client.server.model_copy(update={"tool_errors": "fail"})
        with pytest.raises(NeighbourError, match=r"^mcp:things: refuse: Error executing tool refuse"):
            await client.call("refuse", {"text": "x"})


async def test_result_against_the_tools_own_schema_costs_no_other_call_its_answer_or_its_server() -> None:
    async with _client() as client:
        others = asyncio.create_task(client.call("wait", {"seconds": 0.5}))
        first = (await client.call("keep", {"note": "a"})).split()[0]
        with pytest.raises(NeighbourError, match="Invalid structured content returned by tool nan"):
            await client.call("nan", {})
        assert await others == "waited"
        assert (await client.call("keep", {"note": "b"})).split()[:2] == [first, "2"]


async def test_arguments_that_cannot_be_sent_cost_no_other_call_its_answer() -> None:
    async with _client() as client:
        others = asyncio.create_task(client.call("wait", {"seconds": 0.5}))
        first = (await client.call("keep", {"note": "a"})).split()[0]
        for text in ("\ud800", json.loads("[" * 900 + "]" * 900)):
            with pytest.raises(ToolRefusal, match="the arguments "):
                await client.call("echo", {"text": text})
        assert (await client.call("keep", {"note": "b"})).split()[0] == first
        assert await others == "waited"


async def test_server_that_died_is_started_again() -> None:
    async with _client() as client:
        first = (await client.call("keep", {"note": "a"})).split()
        with pytest.raises(NeighbourError, match=r"^mcp:things: Connection closed"):
            await client.call("die", {})
        second = (await client.call("keep", {"note": "a"})).split()
        assert first[0] != second[0]
        assert (first[1], second[1]) == ("1", "1")


async def test_server_that_came_back_without_an_offered_tool_fails_samples_until_it_has_it_again(
    tmp_path: Path,
) -> None:
    """The policy would read "Unknown tool" as the result of a call that its prompt describes."""
    server = McpServer(name="things", command=COMMAND, folder=str(tmp_path), tools=["echo", "die"])
    tools = McpTools([server])
    try:
        found = await tools.list_tools(())
        for gone in ("without_add", "without_echo"):  # the run does not offer `add`
            (tmp_path / gone).touch()
        with pytest.raises(NeighbourError, match=r"^mcp:things: Connection closed"):
            await found["die"].answer({})
        with pytest.raises(NeighbourError, match=r"^mcp:things: its tool 'echo' is gone since the run began"):
            await found["echo"].answer({"text": "hello"})
        assert not found["echo"].is_accepting
        (tmp_path / "without_echo").unlink()
        assert await found["echo"].answer({"text": "hello"}) == "hello"
    finally:
        await tools.close()


async def test_server_that_loses_an_offered_tool_while_it_runs_fails_the_sample() -> None:
    tools = McpTools([McpServer(name="things", command=COMMAND, tools=["echo", "lose", "refuse"])])
    try:
        found = await tools.list_tools(())
        with pytest.raises(ToolRefusal, match="Error executing tool refuse"):
            await found["refuse"].answer({"text": "x"})
        await found["lose"].answer({"tool": "echo"})
        with pytest.raises(NeighbourError, match=r"^mcp:things: its tool 'echo' is gone since the run began"):
            await found["echo"].answer({"text": "hello"})
        assert await found["echo"].answer({"text": "hello"}) == "hello"  # of a new process
    finally:
        await tools.close()


async def test_server_that_stands_still_is_ended_and_started_again() -> None:
    async with _client(check_s=0.5) as client:
        first = (await client.call("keep", {"note": "a"})).split()
        await _hung(client, "block")
        # Until it is ended calls wait behind the one that blocks it, and fail with it.
        async with asyncio.timeout(120):
            while True:
                try:
                    second = (await client.call("keep", {"note": "a"})).split()
                    break
                except NeighbourError:
                    continue
        assert first[0] != second[0]


async def test_tools_of_one_name_are_told_apart_by_their_servers() -> None:
    first = McpServer(name="things", command=COMMAND, tools=["echo", "add", "keep"])
    tools = McpTools([first, McpServer(name="more", command=COMMAND, tools=["echo"])])
    try:
        found = await tools.list_tools(taken={"add"})
        assert set(found) == {"things.echo", "things.add", "keep", "more.echo"}
        function = found["things.echo"].schema["function"]
        assert (function["name"], function["description"]) == ("things.echo", "Says the text again.")
        assert function["parameters"]["required"] == ["text"]
        assert await found["more.echo"].answer({"text": "hello"}) == "hello"
        assert await found["keep"](note="a")
    finally:
        await tools.close()


def _listing(monkeypatch: pytest.MonkeyPatch, **names: list[str]) -> McpTools:
    """Return servers that list tools of these names."""

    async def listed(client: McpClient) -> list[Tool]:
        return [Tool(name=name, input_schema={"type": "object"}) for name in names[client.server.name]]

    monkeypatch.setattr(McpClient, "list_tools", listed)
    return McpTools([McpServer(name=server, command=COMMAND) for server in names])


@pytest.mark.parametrize(
    "names", [{"a": ["echo", "echo"]}, {"a": ["x"], "b": ["x", "a.x"]}, {"b": ["taken"], "a": ["b.taken"]}]
)
async def test_tools_that_would_have_one_name_are_told_instead_of_one_taking_anothers_place(
    monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]
) -> None:
    with pytest.raises(NeighbourError, match=r"^mcp:.: its tool .* would be called .*, as another is"):
        await _listing(monkeypatch, **names).list_tools({"taken"})


async def test_server_that_fails_ends_the_starts_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[asyncio.Task[Any] | None] = []

    async def listed(client: McpClient) -> list[Tool]:
        starts.append(asyncio.current_task())
        await asyncio.sleep(0 if client.server.name == "a" else 60)
        raise NeighbourError("mcp:a", "it is gone")

    tools = _listing(monkeypatch, a=[], b=[])
    monkeypatch.setattr(McpClient, "list_tools", listed)
    with pytest.raises(NeighbourError, match="mcp:a: it is gone"):
        await tools.list_tools(())
    assert [task is not None and task.done() for task in starts] == [True, True]


PICTURE = ImageContent(type="image", data="AA==", mime_type="image/png")
LINK = ResourceLink(type="resource_link", name="plan", uri="file:///plan.txt")
TEXT = TextContent(type="text", text="below:")


@pytest.mark.parametrize(
    ("content", "read"),
    [
        ([TEXT, PICTURE], "below:\n[image: cannot be read here]"),
        ([TEXT, LINK], "below:\nplan: file:///plan.txt"),
        ([], ""),
    ],
)
def test_of_a_part_that_is_no_text_the_policy_reads_that_it_was_there(content: list[Any], read: str) -> None:
    assert text_of(CallToolResult(content=content)) == read


def test_a_result_of_pictures_alone_is_refused_unless_it_has_structure() -> None:
    with pytest.raises(ToolRefusal, match="no text but image"):
        text_of(CallToolResult(content=[PICTURE]))
    assert text_of(CallToolResult(content=[PICTURE], structured_content={"a": 1})) == '{"a": 1}'


def test_an_error_of_pictures_alone_is_text_so_that_it_can_fail_the_sample() -> None:
    assert text_of(CallToolResult(content=[PICTURE], is_error=True)) == "[image: cannot be read here]"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"command": ["/no/such/program"]}, "FileNotFoundError"),
        ({"command": [sys.executable, "-c", "raise SystemExit(3)"]}, "Connection closed"),
        ({"tools": ["no_such"]}, "it has no tool 'no_such'. It has echo, add, keep"),
        ({"command": [], "url": "http://127.0.0.1:1/mcp"}, "onnect"),
        ({"command": [], "url": "http://127.0.0.1:1/sse"}, "A url has to speak streamable HTTP"),
    ],
)
async def test_server_that_cannot_be_used_is_told_with_what_to_change(settings: dict[str, Any], problem: str) -> None:
    tools = McpTools([McpServer(**{"name": "things", "command": COMMAND, **settings})])
    try:
        with pytest.raises(NeighbourError) as failed:
            await tools.list_tools(())
    finally:
        await tools.close()
    assert str(failed.value).startswith("mcp:things: ")
    assert problem in str(failed.value)
    assert "Change its `tools`." in str(failed.value) or "or change tools.mcp (name things)." in str(failed.value)


@contextmanager
def _serving(port: int) -> Iterator[None]:
    process = subprocess.Popen([*COMMAND, str(port)], stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait(60)


async def test_server_behind_a_url_is_found_again_once_it_is_back() -> None:
    port = free_port()
    async with _client(command=[], url=f"http://127.0.0.1:{port}/mcp") as client:

        async def kept() -> list[str]:
            async with asyncio.timeout(120):
                while True:
                    try:
                        return (await client.call("keep", {"note": "a"})).split()
                    except NeighbourError:
                        await asyncio.sleep(0.05)

        with _serving(port):
            first = await kept()
            assert (await kept())[:2] == [first[0], "2"]
        with pytest.raises(NeighbourError):
            await client.call("keep", {"note": "a"})
        with _serving(port):
            assert (await kept())[0] != first[0]


async def test_server_that_forgot_the_session_gets_another_one() -> None:
    known: list[str] = []  # sessions, as most servers have them: those of the library's first generation

    def answer(request: Received) -> Answer:
        body, session = request.body, request.headers.get("mcp-session-id")

        def reply(status: int = 200, **what: Any) -> Answer:
            headers = {"content-type": "application/json", **({"mcp-session-id": known[-1]} if known else {})}
            return Answer({"jsonrpc": "2.0", "id": body.get("id"), **what}, status, headers=headers)

        if body["method"] == "initialize":
            known.append(f"session{len(known)}")
            about = {"serverInfo": {"name": "things", "version": "1"}, "capabilities": {"tools": {}}}
            return reply(result={"protocolVersion": "2025-06-18", **about})
        if session is not None and session != known[-1]:
            return reply(404, error={"code": -32600, "message": "Session not found"})
        if body["method"] == "tools/call":
            return reply(result={"content": [{"type": "text", "text": session}]})
        if body["method"] == "tools/list":
            return reply(result={"tools": [{"name": "where", "inputSchema": {"type": "object"}}]})
        return reply(404, error={"code": -32601, "message": "Method not found"})

    with scripted_server() as server:
        async with _client(command=[], url=server.script_by("mcp", answer)) as client:
            assert await client.call("where", {}) == "session0"
            known.append("restarted")
            with pytest.raises(NeighbourError, match="Session not found"):
                await client.call("where", {})
            assert await client.call("where", {}) == "session2"
