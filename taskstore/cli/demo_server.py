"""The server of ``taskstore demo``: one tool that writes reports page by page, and two users with a token each.

Run as a program, it reads its configuration from standard input, one line of JSON, and then lives no longer than
standard input stays open: however the process at the other end dies, this one goes too.
"""

import json
import os
import secrets
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import anyio
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import Context, MCPServer
from pydantic import AnyHttpUrl

from taskstore import StoreOptions
from taskstore.adapters.mcp_v2 import TasksExtension

SECONDS_A_PAGE = 0.05
POLL_INTERVAL = timedelta(milliseconds=100)

_HOST = "127.0.0.1"
_ISSUER = "https://issuer.example"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the server is told at its start.

    Attributes:
        database_url: May hold a password, so it comes by standard input, not on the command line.
        table_prefix: Of the tables, which the server makes.
        port: To listen on, on the loopback interface.
        tokens: Bearer token to user name.
    """

    database_url: str
    table_prefix: str
    port: int
    tokens: Mapping[str, str]

    @property
    def url(self) -> str:
        """Where clients reach the server."""
        return f"http://{_HOST}:{self.port}/mcp"

    def to_json(self) -> str:
        """Write the configuration as the line that the program reads."""
        return json.dumps(asdict(self)) + "\n"


class Tokens:
    """Knows which user a bearer token stands for."""

    def __init__(self, users: Mapping[str, str]) -> None:
        self._users = users

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return who comes with a token; None refuses the request."""
        user = self._users.get(token)
        if user is None:
            return None
        return AccessToken(token=token, client_id="taskstore-demo", scopes=[], subject=user, claims={"iss": _ISSUER})


def build(configuration: Configuration) -> MCPServer[dict[str, object]]:
    """Build the server, the way any server with durable tasks is built."""
    tasks = TasksExtension(
        configuration.database_url,
        options=StoreOptions(migrate=True, table_prefix=configuration.table_prefix),
        default_poll_interval=POLL_INTERVAL,
    )
    server = MCPServer(
        "taskstore-demo",
        extensions=[tasks],
        lifespan=tasks.lifespan,
        token_verifier=Tokens(configuration.tokens),
        auth=AuthSettings(
            issuer_url=AnyHttpUrl(_ISSUER),
            resource_server_url=AnyHttpUrl(configuration.url),
            validate_token_resource=False,
        ),
    )

    @server.tool()
    @tasks.task(mode="required", ttl=timedelta(hours=1))
    async def generate_report(topic: str, pages: int, ctx: Context) -> str:
        """Write a report, page by page; no two are alike, so that a result can only come out of the database."""
        written = []
        for page in range(1, pages + 1):
            await anyio.sleep(SECONDS_A_PAGE)
            written.append(f"{topic}, page {page} of {pages} \u2014 {secrets.token_hex(500)}")
            await ctx.report_progress(page, pages, f"page {page}")
        return "\n".join(written)

    return server


def main() -> None:
    """Serve until standard input ends, or a signal comes."""
    configuration = Configuration(**json.loads(_first_line()))
    threading.Thread(target=_die_with_parent, name="demo-lifeline", daemon=True).start()
    build(configuration).run("streamable-http", host=_HOST, port=configuration.port)


# Plain os.read, since a daemon thread that holds the lock of sys.stdin would stop the interpreter from exiting.


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        got = os.read(sys.stdin.fileno(), 4096)
        if not got:
            sys.exit("The demo's server is started by: taskstore demo")
        line += got
    return line


def _die_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
