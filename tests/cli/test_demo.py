"""``taskstore demo``: it proves what it says, cleans up behind itself, and can fail."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from taskstore import AuthContext, StoreOptions, TaskStatus, TaskStore

KEYS = {
    "acknowledged",
    "finished_before_crash",
    "results_intact",
    "recovered",
    "lost",
    "first_poll_ms",
    "database",
}
PATIENCE_SECONDS = 30

# In the demo's server alone, which is the program that reads this at its start.
IN_THE_SERVER = "import sys\nif 'taskstore.cli.demo_server' in sys.orig_argv:\n"


def test_nothing_acknowledged_is_lost_on_sqlite(run: Any, tmp_path: Path) -> None:
    """The package's main promise, in a file that is gone afterwards, and by a server that is too."""
    demo = run("demo", "--json", TMPDIR=str(tmp_path))

    assert_all_kept(demo)
    assert demo.json["database"].startswith(f"sqlite:///{tmp_path}")
    assert list(tmp_path.iterdir()) == []
    assert_servers_gone(demo.err)


async def test_nothing_acknowledged_is_lost_on_postgres_nor_touched(
    postgres_server: Any, postgres_template: str, run_beside: Any, tmp_path: Path
) -> None:
    """A user's own database: their orphans, their secret and their tables are none of the demo's business."""
    url = postgres_server.create_database(template=postgres_template)
    options = StoreOptions(binding_secret=bytes(range(32)), upkeep=False)
    alice = AuthContext(subject="alice")
    async with TaskStore.open(url, options=options) as store:
        task = await store.create_task(auth=alice)
        disowned = await store.create_task(auth=alice)
        execute(url, f"UPDATE taskstore_tasks SET instance_id = 'ins_dead' WHERE task_id = '{disowned.task_id}'")
        before = tables(url)

        demo = await run_beside("demo", "--json", "--url", url, TMPDIR=str(tmp_path))

        assert_all_kept(demo)
        assert demo.json["database"] == url
        assert tables(url) == before
        page = await store.list_tasks(auth=alice)
    assert [(each.task_id, each.status) for each in page.tasks] == [
        (disowned.task_id, TaskStatus.WORKING),
        (task.task_id, TaskStatus.WORKING),
    ]
    assert os.listdir(tmp_path) == []
    assert_servers_gone(demo.err)
    postgres_server.drop_database(url)


def test_keep_leaves_the_database_and_says_where(run: Any, tmp_path: Path) -> None:
    """Whoever doubts the story can look for themselves."""
    path = tmp_path / "mine.db"

    demo = run("demo", "--json", "--keep", "--url", f"sqlite:///{path}", TMPDIR=str(tmp_path))
    told = re.search(r"taskstore (ls \S+ --prefix \S+)", demo.err)
    assert told is not None, demo.err
    listed = run(*told[1].split(), "--json")

    assert_all_kept(demo)
    statuses = [task["status"] for task in listed.json["tasks"]]
    assert statuses.count("failed") == demo.json["recovered"]
    assert statuses.count("completed") == demo.json["finished_before_crash"] + 1
    assert [left.name for left in tmp_path.iterdir()] == ["mine.db"]


def test_the_demo_fails_where_tasks_are_lost(run: Any, tmp_path: Path) -> None:
    """A demo that cannot fail proves nothing: here the server forgets to recover."""
    forgetful = "    from taskstore import recovery\n"
    forgetful += "    recovery.Recovery.recover_in_batches = lambda self, writer, on_batch: 0\n"
    (tmp_path / "sitecustomize.py").write_text(IN_THE_SERVER + forgetful)

    demo = run("demo", "--json", PYTHONPATH=str(tmp_path))

    assert demo.code == 1
    assert (demo.json["recovered"], demo.json["lost"]) == (0, 4)
    assert demo.json["results_intact"] == demo.json["finished_before_crash"] == 4
    assert "was lost" in demo.err


def test_a_server_that_does_not_start_shows_its_log(run: Any, tmp_path: Path) -> None:
    """The reason stands in the log of a process that is gone."""
    (tmp_path / "sitecustomize.py").write_text(IN_THE_SERVER + "    raise SystemExit('no ports left')\n")

    demo = run("demo", "--json", PYTHONPATH=str(tmp_path))

    assert (demo.code, demo.out) == (1, "")
    assert "no ports left" in demo.err


def test_an_unreachable_database_ends_the_demo_at_once(run: Any) -> None:
    """With the code and the message of every other command."""
    demo = run("demo", "--url", "postgresql+psycopg://user:hunter2@127.0.0.1:1/name")

    assert demo.code == 3
    assert "cannot be reached" in demo.err
    assert "hunter2" not in demo.err + demo.out


@pytest.mark.parametrize(("signal_number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_demo_cleans_up(tmp_path: Path, signal_number: int, code: int) -> None:
    """Ctrl-C in the middle leaves no server and no file."""
    with started_demo(tmp_path) as (demo, story):
        demo.send_signal(signal_number)

        assert demo.wait(PATIENCE_SECONDS) == code
    assert_servers_gone(story)
    assert list(tmp_path.iterdir()) == []


def test_the_server_goes_even_when_the_demo_is_killed(tmp_path: Path) -> None:
    """Nothing can be cleaned up then, but a forgotten server would hold its port for ever."""
    with started_demo(tmp_path) as (demo, story):
        demo.kill()
        demo.wait(PATIENCE_SECONDS)

        assert_port_freed(story)


@contextlib.contextmanager
def started_demo(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a demo and read its story until the server runs tasks."""
    command = [sys.executable, "-u", "-m", "taskstore", "demo"]
    # A group of its own: the signal is for the demo, which has to see to its server.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}, start_new_session=True
    ) as demo:
        assert demo.stdout is not None
        try:
            story = ""
            while "has a task id" not in story:
                line = demo.stdout.readline()
                assert line, story
                story += line
            yield demo, story
        finally:
            demo.kill()


def assert_all_kept(demo: Any) -> None:
    assert demo.code == 0, demo.err
    counts = demo.json
    assert set(counts) == KEYS
    assert counts["acknowledged"] == 8
    assert counts["finished_before_crash"] == counts["results_intact"] == 4
    assert counts["recovered"] == 4
    assert counts["lost"] == 0
    assert 0 < counts["first_poll_ms"] < PATIENCE_SECONDS * 1000
    assert json.loads(demo.out) == counts


def assert_servers_gone(story: str) -> None:
    """Check that no process that the story names is left; the demo has waited for each of them."""
    pids = [int(pid) for pid in re.findall(r"^Server +process (\d+)", story, flags=re.MULTILINE)]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def assert_port_freed(story: str) -> None:
    """Wait until nobody listens where the story's server did; whoever adopted the process may be slow to bury it."""
    found = re.search(r"127\.0\.0\.1:(\d+)", story)
    assert found is not None, story
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", int(found[1]))).close()
        except ConnectionError:
            return
    raise AssertionError(f"port {found[1]} is still served")


def tables(url: str) -> set[str]:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        return {name for (name,) in connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")}


def execute(url: str, statement: str) -> None:
    with psycopg.connect(url.replace("+psycopg", "")) as connection:
        connection.execute(statement.encode())
