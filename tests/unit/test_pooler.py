"""The contract of a store, kept behind PgBouncer, whose pool gives each transaction another connection."""

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta

import pytest
from sqlalchemy import make_url

from taskstore import StoreOptions, TaskStatus, TaskStore, dialects, waiting
from taskstore.testing import PostgresServer, StoreContract
from taskstore.testing.protocols import ALICE
from tests.unit.outside import query, wait_until

# Two connections for all, in turn: what is left behind on one of them is missed, or found by somebody else, at once.
CONFIGURATION = """
[databases]
* = host={host} port={port}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen_port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
pool_mode = transaction
default_pool_size = 2
server_round_robin = 1
max_client_conn = 1000
"""


@pytest.fixture(scope="module")
def pooled(postgres_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Start PgBouncer before the server; gives the URL by which a database is reached through it."""
    program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        missing = "No PgBouncer found; install the package pgbouncer."
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    folder = tmp_path_factory.mktemp("pgbouncer")
    behind = make_url(postgres_server.create_database())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    users, configuration = folder / "users.txt", folder / "pgbouncer.ini"
    users.write_text('"postgres" ""\n')
    configuration.write_text(CONFIGURATION.format(host=behind.host, port=behind.port, listen_port=port, users=users))
    # It refuses to run as root.
    demoted = ["-u", "nobody"] if os.geteuid() == 0 else []
    with subprocess.Popen([program, "-q", *demoted, str(configuration)], stderr=subprocess.PIPE, text=True) as process:
        wait_until(lambda: listens(port) or process.poll() is not None, "PgBouncer")
        assert process.poll() is None, process.communicate()[1]
        yield lambda url: make_url(url).set(port=port).render_as_string(hide_password=False)
        process.kill()


def listens(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def database_url(
    postgres_server: PostgresServer, postgres_template: str, pooled: Callable[[str], str]
) -> Iterator[str]:
    """URL of a migrated database behind the pool that no other test sees."""
    url = postgres_server.create_database(template=postgres_template)
    yield pooled(url)
    postgres_server.drop_database(url)


class TestBehindAPool(StoreContract):
    """Case 47, sqlalchemy/sqlalchemy#10226, MagicStack/asyncpg#1058: prepared statements and session state broke there.

    Everything that a store promises it keeps here too.
    """


async def test_a_database_is_migrated_through_a_pool(postgres_server, pooled):
    """Its lock must be the transaction's: one of the session would stay on a connection that others get.

    Case 47, sqlalchemy/sqlalchemy#10226, MagicStack/asyncpg#1058: prepared statements and session state broke there.
    """
    url = postgres_server.create_database()
    for _ in range(2):
        async with TaskStore.open(pooled(url), options=StoreOptions(migrate=True)) as store:
            task = await store.create_task(auth=ALICE, idempotency_key="once")
            locks = query(url, "SELECT mode FROM pg_locks WHERE locktype = 'advisory'")
            await store.cancel_task(task.task_id, auth=ALICE) if not task.existing else None
    postgres_server.drop_database(url)

    assert task.existing
    assert locks == []


async def test_behind_a_pool_the_poll_takes_over_from_listen_and_says_so_once(open_store, store, monkeypatch, caplog):
    """LISTEN succeeds there, and no notification ever comes; nor must the log fill up with it.

    Case 47, sqlalchemy/sqlalchemy#10226, MagicStack/asyncpg#1058: prepared statements and session state broke there.
    """
    monkeypatch.setattr(dialects, "_LISTEN_PROOF_SECONDS", 0.0)
    monkeypatch.setattr(waiting, "LINGER", timedelta(0))
    peer = await open_store()

    seen = []
    for number in range(2):
        task = await store.create_task(auth=ALICE)
        waiter = asyncio.create_task(peer.wait_for_task(task.task_id, auth=ALICE))
        async with asyncio.timeout(30):
            while "LISTEN brings" not in caplog.text or not peer._parts.waiting._waiters:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await store.handle(task).complete({"number": number})
        seen.append((await asyncio.wait_for(waiter, 30)).status)
        async with asyncio.timeout(30):
            while peer._parts.waiting._poll is not None:  # noqa: ASYNC110  nobody waits: the feed is closed
                await asyncio.sleep(0.01)

    assert seen == [TaskStatus.COMPLETED] * 2
    assert caplog.text.count("LISTEN brings no notifications") == 1
