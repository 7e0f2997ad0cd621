"""An MCP server with authorization: each user's tasks are his own, and nobody else can tell that they exist.

Tasks are bound to the access token's client, issuer and subject. Here a token is looked up in a table; put your
authorization server's verifier in its place. Try it:

    python examples/two_users.py
    python examples/client.py http://127.0.0.1:8000/mcp whoami '{}' --token alices-token
    python examples/client.py http://127.0.0.1:8000/mcp --resume ALICES-TASK --token bobs-token
"""

import os
import secrets
from pathlib import Path

import anyio
from mcp.server.auth.middleware.auth_context import get_access_token
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from pydantic import AnyHttpUrl

from taskstore import StoreOptions
from taskstore.adapters.mcp_v2 import TasksExtension

ISSUER = "https://login.example"
USERS = {"alices-token": "alice", "bobs-token": "bob"}


class Tokens:
    """Knows whose token a token is."""

    async def verify_token(self, token: str) -> AccessToken | None:
        """Return what the token stands for; None refuses it."""
        user = USERS.get(token)
        if user is None:
            return None
        return AccessToken(token=token, client_id="example", scopes=[], subject=user, claims={"iss": ISSUER})


# What is sealed with a key can't be read without it: keep keys where your other secrets are, not like this.
KEY_FILE = Path(os.environ.get("USERS_KEY_FILE", "users.key"))
if not KEY_FILE.exists():
    KEY_FILE.write_bytes(secrets.token_bytes(32))
OPTIONS = StoreOptions(keys=[KEY_FILE.read_bytes()])

tasks = TasksExtension(os.environ.get("USERS_DATABASE", "sqlite:///users.db"), options=OPTIONS)
server = MCPServer(
    "users",
    extensions=[tasks],
    middleware=[tasks.legacy],
    lifespan=tasks.lifespan,
    token_verifier=Tokens(),
    auth=AuthSettings(
        issuer_url=AnyHttpUrl(ISSUER),
        resource_server_url=AnyHttpUrl("http://127.0.0.1:8000/mcp"),
        validate_token_resource=False,  # the tokens of this table are for no resource in particular
    ),
)


@server.tool()
@tasks.task(mode="required", on_crash="retry", needs_token=True)
async def whoami(seconds: float = 1) -> str:
    """Think for a while about who is asking; the token is there in every run, also after a crash."""
    await anyio.sleep(seconds)
    token = get_access_token()
    return f"You are {'nobody' if token is None else token.subject}."


if __name__ == "__main__":
    server.run("streamable-http", port=int(os.environ.get("PORT", "8000")))
