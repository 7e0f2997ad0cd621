"""The hot statements use their indexes: their cost must not grow with the tasks that are kept."""

import pytest

from taskstore import statements
from tests.unit.outside import copy_task

from .conftest import ALICE

USES = {
    "GET": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1",
    "LIST": "ix_taskstore_tasks_list",
    "OPERATOR_LIST": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1|ix_taskstore_tasks_list",  # of one owner
    "DUE": "ix_taskstore_tasks_live|ix_taskstore_tasks_instance",  # each holds live rows only
    "SWEEP": "ix_taskstore_tasks_expiry",
    "ORPHANS_OF": "ix_taskstore_tasks_instance",
    "ORPHANS_OF_NOBODY": "ix_taskstore_tasks_instance|ix_taskstore_tasks_live",  # each holds live rows only
    "RELEASE": "ix_taskstore_tasks_instance",
    "PROGRESS": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1",
    "WATCH": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1",
    "EVENTS": "pk_taskstore_events|sqlite_autoindex_taskstore_events_1",
    "OPEN_INPUTS": "ix_taskstore_inputs_open|pk_taskstore_inputs|sqlite_autoindex_taskstore_inputs_1",
    "CANCEL": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1",
    "COMPLETE": "pk_taskstore_tasks|sqlite_autoindex_taskstore_tasks_1",
}


COLUMNS = [column.name for column in statements.tasks.c]
CHANGED = {
    "task_id": "task_id || i",
    "auth_key": "auth_key || (i % 50)",
    "instance_id": "instance_id || (i % 50)",
}
COPY = f"""
    WITH RECURSIVE copies(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM copies WHERE i < 1500)
    INSERT INTO taskstore_tasks ({", ".join(COLUMNS)})
    SELECT {", ".join(CHANGED.get(name, name) for name in COLUMNS)} FROM taskstore_tasks, copies
"""


@pytest.fixture
async def connection(store, finish):
    """A connection to a database with 3,002 tasks of 51 auth contexts, half of them finished."""
    await store.create_task(auth=ALICE)
    await finish(store)
    with store._parts.database._checkout() as connection:
        connection.execute(COPY)
        connection.execute("ANALYZE")
        yield connection


@pytest.mark.parametrize("name", USES)
async def test_a_hot_statement_uses_its_index(store, connection, name):
    """A scan is quick with ten tasks and a fault with a million.

    Case 57, timgit/pg-boss#282, #228: clean-ups at once met in deadlocks, and scanned millions of rows.
    """
    database = store._parts.database
    compiled, params = _example_of(database, name)

    if database.name == "postgresql":
        # Events and inputs are few here, and small tables are scanned; the question is whether an index could serve.
        connection.execute("SET enable_seqscan = off")
        rows = connection.execute(f"EXPLAIN {compiled.sql}", params).fetchall()
        connection.execute("RESET enable_seqscan")
        plan = "\n".join(row[0] for row in rows)
    else:
        rows = connection.execute(f"EXPLAIN QUERY PLAN {compiled.sql}", compiled.bind(params)).fetchall()
        plan = "\n".join(row[3] for row in rows)

    assert any(index in plan for index in USES[name].split("|")), plan
    assert "Seq Scan on taskstore_tasks" not in plan, plan
    assert not any(line.startswith("SCAN taskstore_tasks") and "USING" not in line for line in plan.splitlines()), plan


@pytest.mark.parametrize("name", ["ORPHANS_OF", "ORPHANS_OF_NOBODY"])
async def test_the_look_for_orphans_costs_nothing_for_what_is_finished(store, finish, database_url, name):
    """Recovery runs at every start and every few seconds, in a database that keeps results for a month.

    Case 57, timgit/pg-boss#282, #228: clean-ups at once met in deadlocks, and scanned millions of rows.
    """
    done = await finish(store)
    await store.create_task(auth=ALICE)
    database = store._parts.database
    compiled, params = _example_of(database, name)
    params["instance_id"] = "nobody's"

    with database._checkout() as connection:

        def cost() -> int:
            connection.execute("ANALYZE")
            if database.name == "postgresql":
                explain = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {compiled.sql}"
                plan = connection.execute(explain, params).fetchone()[0][0]["Plan"]
                return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
            steps = 0

            def step() -> None:
                nonlocal steps
                steps += 1

            connection.set_progress_handler(step, 1)  # called for each instruction of SQLite's machine
            connection.execute(compiled.sql, compiled.bind(params)).fetchall()
            connection.set_progress_handler(None, 0)
            return steps

        few = cost()
        copy_task(database_url, done.task_id, 5_000)
        many = cost()

    assert 0 < many <= few + 5


def _example_of(database, name):
    """Compile a statement, and give it parameters."""
    statement = getattr(statements, name)
    if isinstance(statement, statements.Change):
        statement = statement.write
    compiled = database._compiler.compiled(statement)
    binds = statement.compile(dialect=database._engine.dialect).binds
    return compiled, {key: compiled.constants.get(key, _example(str(bind.type))) for key, bind in binds.items()}


def _example(kind: str) -> object:
    """Give a value that a column of this type takes; the plan does not depend on which."""
    if "INT" in kind:
        return 1
    if kind == "JSON":
        return '{"x": null}'
    return "x" if kind in {"TEXT", "VARCHAR"} else None
