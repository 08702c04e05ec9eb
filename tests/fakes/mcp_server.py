"""An MCP server made with the official library, as a user would have one: `python mcp_server.py [PORT]`.

Without a port it speaks over stdin and stdout. Its tools answer, refuse, hang, stand still and die.
"""

import asyncio
import math
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("things", log_level="CRITICAL")
notes: list[str] = []


@server.tool(description="Says the text again.")
async def echo(text: str) -> str:
    return text


@server.tool(description="Adds two numbers.")
async def add(a: int, b: int) -> int:
    return a + b


@server.tool(description="Keeps a note and says how many there are.")
async def keep(note: str) -> str:
    notes.append(note)
    return f"{os.getpid()} {len(notes)} {os.environ.get('THINGS_KEY', '')} {os.getcwd()}"


@server.tool(description="Knows nothing.")
async def refuse(text: str) -> str:
    raise ValueError(f"there is no {text}")


@server.tool(description="Is not a number, which JSON writes as null, against the tool's own schema.")
async def nan() -> float:
    return math.nan


@server.tool(description="Answers after so many seconds.")
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"


@server.tool(description="Lets nobody else have a turn for so many seconds.")
async def block(seconds: float) -> str:
    time.sleep(seconds)
    return "blocked"


@server.tool(description="Removes a tool, as a server that loads its tools anew.")
async def lose(tool: str) -> str:
    server.remove_tool(tool)
    return "lost"


@server.tool(description="Ends the server.")
async def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    for left_out in Path().glob("without_*"):  # a file in the working folder: the tool that it names is not there
        server.remove_tool(left_out.name.removeprefix("without_"))
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
