"""What stands outside the store: connections of other tools, and other processes."""

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import psycopg
from sqlalchemy import make_url

from taskstore.statements import events, tasks

# Generous: it only bounds how long a broken test hangs.
PATIENCE_SECONDS = 120


def connect(url: str) -> Any:
    """Connect to a database with its driver alone, in autocommit mode."""
    parsed = make_url(url)
    if parsed.get_backend_name() == "sqlite":
        return sqlite3.connect(parsed.database or "", isolation_level=None, check_same_thread=False)
    driver_url = parsed.set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(driver_url, autocommit=True)


def query(url: str, sql: str) -> list[tuple[Any, ...]]:
    """Run one statement on a connection of its own and return its rows."""
    with closing(connect(url)) as connection:
        cursor = connection.execute(sql)
        return [tuple(row) for row in cursor.fetchall()] if cursor.description else []


def value(url: str, sql: str) -> Any:
    """Run a query and return the only value of its only row."""
    ((found,),) = query(url, sql)
    return found


def lock_waits(url: str) -> int:
    """Count the connections to a PostgreSQL database that wait for a lock."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    return int(value(url, waiting))


@contextmanager
def write_lock(url: str, table: str = "taskstore_tasks") -> Iterator[None]:
    """Keep everybody from writing to a table while inside, as a transaction of another tool does; it can be read."""
    with closing(connect(url)) as holder:
        sqlite = url.startswith("sqlite")
        holder.execute("BEGIN IMMEDIATE" if sqlite else f"BEGIN; LOCK TABLE {table} IN EXCLUSIVE MODE")
        try:
            yield
        finally:
            holder.execute("ROLLBACK")


def copy_task(url: str, task_id: str, copies: int, **values: str) -> None:
    """Copy a task with its history so many times; ``values`` are SQL for columns, of the copy's number ``i``."""
    changed = {"task_id": "task_id || i"}
    with closing(connect(url)) as connection:
        connection.execute("BEGIN")  # for a sweep that runs, all of it is there or nothing
        if not url.startswith("sqlite"):
            connection.execute("SET LOCAL statement_timeout = 0")  # a limit of the database is for what is tested
        for table, changes in ((tasks, {**changed, **values}), (events, changed)):
            columns = [column.name for column in table.c]
            connection.execute(
                f"""
                WITH RECURSIVE copies(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM copies WHERE i < {copies})
                INSERT INTO {table.name} ({", ".join(columns)})
                SELECT {", ".join(changes.get(name, name) for name in columns)} FROM {table.name}, copies
                WHERE task_id = '{task_id}'
                """
            )
        connection.execute("COMMIT")
        connection.execute("ANALYZE")


def wait_until(due: Callable[[], bool], what: str) -> None:
    """Return when something outside this process's control has come about; fail the test if it never does."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not due():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come about within {PATIENCE_SECONDS} s")
        time.sleep(0.005)


def run_python(script: str, *args: str, patience: float = PATIENCE_SECONDS) -> "subprocess.CompletedProcess[str]":
    """Run a script in a process of its own, to its end; ``patience`` is in seconds."""
    command = [sys.executable, "-c", script, *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience, check=False)


class Process:
    """A script in a process of its own that says with lines on stdout what it did, and waits for lines on stdin."""

    def __init__(self, script: str, *args: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", script, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        """Wait for the next line."""
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def go_on(self) -> None:
        """Let it go on that waits for a line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write("\n")
        self.popen.stdin.flush()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its exit code and what it wrote since, stdout and stderr."""
        out, err = self.popen.communicate(timeout=PATIENCE_SECONDS)
        return self.popen.returncode, out, err


@contextmanager
def process(script: str, *args: str) -> Iterator[Process]:
    """Run a script beside the test; it is killed if it outlives the block."""
    started = Process(script, *args)
    with started.popen as popen:
        try:
            yield started
        finally:
            if popen.poll() is None:
                popen.kill()


def run_at_once(script: str, *args: str, processes: int) -> Sequence[tuple[int, str, str]]:
    """Run a script in several processes that all pass its ``input()`` at the same time; return how each ended."""
    started = [Process(script, *args) for _ in range(processes)]
    try:
        for each in started:
            each.says()
        for each in started:
            each.go_on()
        return [each.end() for each in started]
    finally:
        for each in started:
            with each.popen as popen:
                popen.kill()
