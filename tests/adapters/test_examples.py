"""The examples run as they stand, as programs of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from mcp import StdioServerParameters

from taskstore import AuthContext, TaskStore
from taskstore.testing import PostgresServer

EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_SECONDS = 180


class Server:
    """An example that serves over HTTP, as a process of its own."""

    def __init__(self, example: str, environment: dict[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/mcp"
        self.process = start_example(example, env={**environment, "PORT": str(port)})
        ends = time.monotonic() + PATIENCE_SECONDS
        while not listens(port):
            assert self.process.poll() is None, "the example ended before it listened"
            assert time.monotonic() < ends
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Caller:
    """The example client, as a process of its own: somebody who reads, and types answers."""

    def __init__(self, *arguments: str) -> None:
        self.process = start_example("client.py", *arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def read_until(self, text: str) -> str:
        """Read to the first line that holds a text, or to a prompt that ends with it."""
        assert self.process.stdout is not None
        line = ""
        while text not in line:
            character = self.process.stdout.read(1)
            assert character, f"the client ended with {line!r}"
            line = character if line.endswith("\n") else line + character
        return line + self.process.stdout.readline() if not text.endswith(" ") else line

    def type(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def end(self) -> str:
        """Wait for its end; return the rest of what it told."""
        return self.process.communicate(timeout=PATIENCE_SECONDS)[0]


def start_example(example: str, *arguments: str, env: dict[str, str] | None = None, **pipes: int) -> Any:
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.Popen([sys.executable, str(EXAMPLES / example), *arguments], env=environment, text=True, **pipes)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def serve_example() -> Iterator[Callable[..., Server]]:
    """Serve an example; none outlives the test."""
    with ExitStack() as stack:

        def serve_one(example: str, **environment: str) -> Server:
            server = Server(example, environment)
            stack.callback(server.process.wait)
            stack.callback(server.process.kill)
            return server

        yield serve_one


@pytest.fixture
def call() -> Iterator[Callable[..., Caller]]:
    """Call a tool with the example client; none outlives the test."""
    with ExitStack() as stack:

        def call_one(*arguments: str) -> Caller:
            caller = Caller(*arguments)
            stack.callback(caller.process.communicate)
            stack.callback(caller.process.kill)
            return caller

        yield call_one


def test_a_person_can_answer_after_server_and_client_were_killed(
    database_url: str, serve_example: Callable[..., Server], call: Callable[..., Caller]
) -> None:
    """The point of the whole: a question is as durable as a result, and its answer finds the tool again."""
    server = serve_example("human_in_the_loop.py", DEPLOYMENTS_DATABASE=database_url)
    first = call(server.url, "deploy", '{"version": "1.4"}')
    task_id = first.read_until("task:").split()[1]
    first.read_until("(approved) ")
    server.kill()
    first.process.kill()

    server = serve_example("human_in_the_loop.py", DEPLOYMENTS_DATABASE=database_url)
    second = call(server.url, "--resume", task_id)
    asked = second.read_until("(approved) ")
    second.type("yes")
    told = second.end()

    assert "Deploy version 1.4?" in asked
    assert told.splitlines()[-1] == "Deployed the build of 1.4."


def test_users_see_their_own_tasks_alone(
    database_url: str, serve_example: Callable[..., Server], call: Callable[..., Caller], tmp_path: Path
) -> None:
    """And the tool knows who asked, for as long as it runs."""
    key_file = str(tmp_path / "users.key")
    server = serve_example("two_users.py", USERS_DATABASE=database_url, USERS_KEY_FILE=key_file)
    alice = call(server.url, "whoami", '{"seconds": 0.1}', "--token", "alices-token")
    task_id = alice.read_until("task:").split()[1]
    told = alice.end()
    again = call(server.url, "--resume", task_id, "--token", "alices-token")
    bob = start_example(
        "client.py",
        server.url,
        "--resume",
        task_id,
        "--token",
        "bobs-token",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    bobs, complaint = bob.communicate(timeout=PATIENCE_SECONDS)

    assert told.splitlines()[-1] == "You are alice."
    assert again.end().splitlines()[-1] == "You are alice."
    assert bob.returncode != 0
    assert "Task not found" in complaint
    assert "alice" not in bobs + complaint


def test_the_clients_model_thinks_in_the_middle_of_a_task(
    database_url: str, serve_example: Callable[..., Server], call: Callable[..., Caller]
) -> None:
    """The tool asks twice, and goes on where it waited."""
    server = serve_example("sampling.py", SUMMARIES_DATABASE=database_url)
    caller = call(server.url, "summarize", '{"texts": ["Once upon a time", "The end"]}')
    for prompt, answer in (("Once upon a time ", "It begins."), ("The end ", "It ends.")):
        caller.read_until(prompt)
        caller.type(answer)

    assert caller.end().splitlines()[-2:] == ["It begins.", "It ends."]


def test_what_one_replica_starts_another_shows_and_stops(
    postgres_server: PostgresServer, postgres_template: str
) -> None:
    """Several processes behind one address need nothing in common but the database."""
    database = postgres_server.create_database(template=postgres_template)

    shown = start_example("two_replicas.py", database, stdout=subprocess.PIPE).communicate(timeout=2 * PATIENCE_SECONDS)
    postgres_server.drop_database(database)

    started, finished, cancelled = shown[0].splitlines()
    first, second = started.split()[-1], finished.split()[2].rstrip(":")
    assert first != second
    assert finished.endswith("A report on tides, 2 pages long.")
    assert cancelled.startswith(f"cancelled at {second}, and so at {first}")


async def test_the_report_server_writes_a_report(database_url: str, connect: Any, local: AuthContext) -> None:
    """Users copy it; it must work, on stdio and on any database."""
    command = StdioServerParameters(
        command=sys.executable,
        args=[str(EXAMPLES / "report_server.py")],
        env={**os.environ, "REPORTS_DATABASE": database_url, "PYTHONPATH": str(EXAMPLES.parent)},
    )

    async with connect(command) as peer, TaskStore.open(database_url) as store:
        task_id = await peer.start("generate_report", topic="tides", pages=1)
        await peer.listen(taskIds=[task_id])  # to the end of the task
        finished = await store.get_task(task_id, auth=local)
        polled = await peer.get(task_id)

    assert (finished.progress, finished.progress_total) == (1, 1)
    assert polled["status"] == "completed"
    assert polled["result"]["content"][0]["text"] == "A report on tides, 1 pages long."
