"""The official SDKs' own clients of 2025-11-25 against this server: they know nothing of us, their models are strict.

The one of Python is the SDK 1.x in an environment of its own, the one of TypeScript comes from npm. Each plays the
same story and says what it saw.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.environments import PeerUnavailableError, python_of
from tests.adapters.legacy.peers import fastmcp_server, server
from tests.npm import NodeUnavailableError, find_node, install

PEERS = Path(__file__).with_name("peers")
PATIENCE_SECONDS = 180

EXPECTED: dict[str, Any] = {
    "declared": ["cancel", "list", "requests"],
    "support": {
        "add": "required",
        **dict.fromkeys(["refuse", "break_down", "hold", "count", "confirm", "summarize"], "optional"),
    },
    "added": ["working", 60_000, "completed", "3"],
    "greeted": "Hello, Ada!",
    "replayed": [-31999, "Quota exceeded", {"limit": 3}],
    "broken": [True, "failed"],
    "cancelled": "cancelled",
    "codes": {"cancel again": -32602, "never a task": -32601, "only a task": -32601, "unknown": -32602},
    "listed": True,
    "asked": [True],
    "confirmed": "accept: True",
    "sampled": "Short.",
    "progress": [1, 2],
}

Play = Callable[[dict[str, Any]], Any]

# The server under test, on each SDK that it can stand on.
each_server = pytest.mark.parametrize("module", [server, fastmcp_server], ids=["sdk", "fastmcp"])


@pytest.fixture(scope="module", params=["python", "typescript"])
def command(request: pytest.FixtureRequest) -> list[str]:
    """The command of a client; without it a test is skipped at home and fails in CI."""
    try:
        if request.param == "python":
            return [python_of("mcp-1x", ("mcp==1.30.0",), install=True, say=print), str(PEERS / "client_1x.py")]
        modules = install("@modelcontextprotocol/sdk", "1.32.2")
        return [find_node()[0], str(PEERS / "client.mjs"), str(modules)]
    except (PeerUnavailableError, NodeUnavailableError) as problem:
        if os.environ.get("CI"):
            pytest.fail(str(problem))
        pytest.skip(str(problem))


@pytest.fixture
def play(command: list[str]) -> Play:
    """Let the client play its story with a server; return what it saw."""

    async def run(target: dict[str, Any]) -> Any:
        client = await asyncio.create_subprocess_exec(
            *command, json.dumps(target), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            output, errors = await asyncio.wait_for(client.communicate(), PATIENCE_SECONDS)
        finally:
            if client.returncode is None:
                client.kill()
                await client.wait()
        assert client.returncode == 0, errors.decode()
        return json.loads(output)

    return run


@each_server
async def test_an_official_client_is_served_over_stdio(database_url: str, play: Play, module: Any) -> None:
    """The local user's client: it can be told apart, so it has a list."""
    seen = await play({"command": sys.executable, "args": [str(module.__file__), database_url]})

    assert seen == EXPECTED


@each_server
@pytest.mark.filterwarnings("ignore:The sampling capability is deprecated")
async def test_an_official_client_is_served_over_http(
    request: pytest.FixtureRequest, database_url: str, play: Play, serve: Any, module: Any
) -> None:
    """With a token, as most servers on a network are used."""
    options = request.getfixturevalue("authorization" if module is server else "fastmcp_authorization")

    async with serve(module.make_server(database_url, **options)) as url:
        seen = await play({"url": url, "token": "alice"})

    assert seen == EXPECTED


@each_server
@pytest.mark.filterwarnings("ignore:The sampling capability is deprecated")
async def test_an_official_client_is_served_over_http_without_authorization(
    database_url: str, play: Play, serve: Any, module: Any
) -> None:
    """Nobody can be told apart there: all is the same, but there is no list (T25-45)."""
    async with serve(module.make_server(database_url)) as url:
        seen = await play({"url": url})

    assert seen == {**EXPECTED, "declared": ["cancel", "requests"], "listed": -32601}
