"""``taskstore migrate``, ``check``, ``recover`` and ``sweep``."""

import json
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from taskstore import AuthContext, StoreOptions, TaskStatus, TaskStore
from taskstore.schema import REVISIONS
from taskstore.testing import ManualClock

ALICE = AuthContext(subject="alice")
NEWEST = REVISIONS[-1]

# A server that creates some tasks, says so, and then waits to be killed.
WORKER = """
import asyncio, json, sys
from taskstore import AuthContext, TaskStore

CALLER = {"capabilities": {"elicitation": {}}}

async def work(url, policies):
    async with TaskStore.open(url) as store:
        ids = [
            (await store.create_task(auth=AuthContext(subject="alice"), on_crash=policy, caller=CALLER)).task_id
            for policy in policies
        ]
        print(json.dumps(ids), flush=True)
        await asyncio.Event().wait()

asyncio.run(work(sys.argv[1], sys.argv[2:]))
"""


def killed_worker(database_url: str, *policies: str) -> list[str]:
    """Let a process create a task of each policy, or three, and die; return their ids."""
    command = [sys.executable, "-c", WORKER, database_url, *(policies or ["fail"] * 3)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None
        ids: list[str] = json.loads(worker.stdout.readline())
        worker.send_signal(signal.SIGKILL)
    return ids


def test_recover_fails_what_a_killed_server_left(database_url: str, run: Any) -> None:
    """The server does not come back, and nobody shall wait for its tasks."""
    ids = killed_worker(database_url)
    before = run("check", database_url, "--json")

    recovered = run("recover", database_url, "--json")
    again = run("recover", database_url)

    assert before.json["orphans"] == 3
    assert recovered.code == 0
    assert (recovered.json["recovered"], recovered.json["dead_processes"]) == (3, 1)
    assert sorted(recovered.json["task_ids"]) == sorted(ids)
    shown = run("show", database_url, ids[0], "--json").json
    assert shown["outcome"]["error"]["data"]["reason"] == "CRASH_RECOVERY"
    assert (again.code, again.out) == (0, "0 tasks recovered, 0 dead processes.\n")


def test_recover_says_what_waits_to_be_run_again(database_url: str, run: Any) -> None:
    """Not all that is recovered failed: an operator who reads "2 recovered" may have two that still need a server."""
    killed_worker(database_url, "fail", "retry", "ask")

    recovered = run("recover", database_url)
    killed_worker(database_url, "retry")
    then = run("recover", database_url, "--json").json

    assert recovered.out == (
        "3 tasks recovered, 1 dead process.\n1 of them wait to be run again, 1 for their requestor's answer.\n"
    )
    assert (then["recovered"], then["queued"], then["asked"]) == (1, 1, 0)


def test_check_says_how_to_recover(database_url: str, run: Any) -> None:
    """An operator who sees orphans needs the next command, not a manual."""
    killed_worker(database_url)

    checked = run("check", database_url)

    assert ["orphans", "3"] in [line.split() for line in checked.out.splitlines()]
    assert "taskstore recover" in checked.out


async def test_no_command_harms_a_running_store(database_url: str, run_beside: Any) -> None:
    """Operators look while servers work: nothing is taken over, migrated, or left behind."""
    async with TaskStore.open(database_url) as store:
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)

        for command in ("ls", "check", "recover", "sweep", "migrate"):
            assert (await run_beside(command, database_url)).code == 0
        assert (await run_beside("show", database_url, task.task_id)).code == 0

        finished = await handle.complete("done")
        assert (await store.operator.health()).instances == 1
    assert finished.status is TaskStatus.COMPLETED
    assert finished.attempt == task.attempt


async def test_sweep_deletes_what_has_expired(database_url: str, run_beside: Any) -> None:
    """More than one batch of it, and nothing else."""
    long_ago = StoreOptions(clock=ManualClock(start_ms=0), upkeep=False)
    async with TaskStore.open(database_url, options=long_ago) as store:
        for _ in range(105):
            await store.handle(await store.create_task(auth=ALICE)).complete("done")
    async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
        kept = await store.create_task(auth=ALICE)
        before = await run_beside("check", database_url, "--json")

        swept = await run_beside("sweep", database_url, "--json")
        again = await run_beside("sweep", database_url)

        assert (await store.get_task(kept.task_id, auth=ALICE)).status is TaskStatus.WORKING
    assert (before.json["expired"], before.json["live"]) == (105, 1)
    assert (swept.code, swept.json) == (0, {"deleted": 105})
    assert again.out == "0 expired tasks deleted.\n"


def test_migrate_makes_the_tables_and_may_be_repeated(empty_database_url: str, run: Any) -> None:
    """It stands in deployment scripts, which run it every time."""
    first = run("migrate", empty_database_url, "--json")
    second = run("migrate", empty_database_url, "--json")
    told = run("migrate", empty_database_url)

    assert (first.code, first.json["from_revision"], first.json["revision"]) == (0, None, NEWEST)
    assert (second.code, second.json["from_revision"], second.json["revision"]) == (0, NEWEST, NEWEST)
    assert "up to date" in told.out
    assert run("check", empty_database_url).code == 0


def test_check_exits_1_without_tables(empty_database_url: str, run: Any) -> None:
    """A deployment can decide by the exit code whether to migrate; programs get the reason as JSON."""
    if empty_database_url.startswith("sqlite"):
        Path(empty_database_url.removeprefix("sqlite:///")).touch()

    checked = run("check", empty_database_url, "--json")
    listed = run("ls", empty_database_url)

    assert checked.code == 1
    assert (checked.json["current"], checked.json["revision"]) == (False, None)
    assert "taskstore migrate" in checked.json["problem"]
    assert (listed.code, listed.out) == (1, "")


@pytest.mark.parametrize("command", ["check", "ls", "recover", "sweep", "migrate"])
def test_a_schema_of_the_future_is_left_alone(database_url: str, run: Any, command: str) -> None:
    """A newer version has migrated; this one cannot know what it would break."""
    execute(database_url, "UPDATE taskstore_alembic_version SET version_num = '9999'")
    execute(database_url, "UPDATE taskstore_meta SET value = '9999' WHERE name = 'oldest_code'")

    ran = run(command, database_url)

    assert (ran.code, ran.out) == (1, "")
    assert "upgrade the package" in ran.err


def test_the_offline_sql_makes_the_same_tables(empty_database_url: str, run: Any) -> None:
    """Where only an administrator may change a schema, the administrator gets a script."""
    written = run("migrate", empty_database_url, "--sql", "--prefix", "app_")

    assert written.code == 0
    execute(empty_database_url, written.out)
    assert run("check", empty_database_url, "--prefix", "app_").code == 0
    assert run("check", empty_database_url).code == 1


def test_tables_may_lie_in_a_schema(postgres_server: Any, run: Any) -> None:
    """Many databases give each application a schema of its own."""
    url = postgres_server.create_database()
    execute(url, "CREATE SCHEMA mcp")

    migrated = run("migrate", url, "--schema", "mcp")
    checked = run("check", url, "--schema", "mcp")
    elsewhere = run("check", url)

    assert (migrated.code, checked.code, elsewhere.code) == (0, 0, 1)
    postgres_server.drop_database(url)


def execute(url: str, script: str) -> None:
    """Run SQL past the store."""
    if url.startswith("sqlite"):
        connection = sqlite3.connect(url.removeprefix("sqlite:///"))
        connection.executescript(script)
        connection.close()
    else:
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute(script.encode())
