"""Arguments: whatever is wrong with one, a documented error says so, and nothing has been written.

The cases are derived from the signatures, so a new method or parameter is covered when it comes.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, timedelta, timezone
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from taskstore import (
    AuthContext,
    DatabaseUnavailableError,
    OnCrash,
    OperatorView,
    Outcome,
    OwnerKind,
    PayloadError,
    StoreOptions,
    SyncOperatorView,
    SyncTaskHandle,
    SyncTaskStore,
    Task,
    TaskDetails,
    TaskHandle,
    TaskStatus,
    TaskStore,
    TaskStoreError,
)
from taskstore.testing import ManualClock

from .conftest import ALICE, drawn


class Case(NamedTuple):
    """One parameter of one public method."""

    owner: type
    method: str
    parameter: str

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.method}({self.parameter})"


def cases(*owners: type) -> list[Case]:
    return [
        Case(owner, name, parameter)
        for owner in owners
        for name, function in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_") and name != "stop_work"
        for parameter in inspect.signature(function).parameters
        if parameter != "self"
    ]


CASES = cases(TaskStore, OperatorView, TaskHandle)
SYNC_CASES = cases(SyncTaskStore, SyncOperatorView, SyncTaskHandle)

# What a call is given in place of its required parameters, while another one is odd.
Good = Mapping[str, Callable[[Task], object]]
GOOD: Good = {
    "task_id": lambda task: task.task_id,
    "task": lambda task: task,
    "auth": lambda task: ALICE,
    "responses": lambda task: {"name": 1},
    "requests": lambda task: {"name": {"method": "elicitation/create"}},
    "value": lambda task: 1,
    "result": lambda task: {"ok": True},
    "message": lambda task: "text",
    "names": lambda task: ["report"],
    "details": lambda task: details_of(task, task_id="imported"),
    "owner": lambda task: ALICE,
    "since_version": lambda task: 0,  # so that nothing is waited for
    "timeout": lambda task: timedelta(0),
}


def details_of(task: Task, *, outcome: Outcome | None = None, **changes: object) -> TaskDetails:
    """Make the record of a task that was kept elsewhere."""
    return TaskDetails(task=task.model_copy(update=changes), outcome=outcome, input_requests={})


ANY_JSON = ("request", "caller", "result", "data", "state")


class Target:
    """A store driven without an event loop of the test's own, and a look at everything it has stored."""

    def __init__(self, store: SyncTaskStore) -> None:
        self.store, self._loop = store, store._loop
        self._database = store._store._parts.database

    def fresh_task(self, *, queued: bool = False) -> Task:
        task = self.store.create_task(auth=ALICE, name="report", request={"a": 1}, on_crash=OnCrash.RETRY)
        if queued:
            self.store.handle(task).hand_over()
        return task

    def call(self, case: Case, task: Task, value: object) -> object:
        owner = self._owner(case.owner, task)
        method = getattr(owner, case.method)
        required = {
            name: GOOD[name](task)
            for name, parameter in inspect.signature(method).parameters.items()
            if parameter.default is inspect.Parameter.empty or case.method == "wait_for_task"
        }
        arguments = {**required, case.parameter: value}
        if case.method == "ask":
            return self._loop.run(self._ask(self._store.handle(task), task, arguments))
        called = method(**arguments)
        return self._loop.run(called) if inspect.iscoroutine(called) else called

    async def _ask(self, handle: TaskHandle, task: Task, arguments: dict[str, Any]) -> None:
        """Ask, and return once the questions are there: nobody is going to answer them."""
        asking = asyncio.create_task(handle.ask(**arguments))
        asked = asyncio.create_task(
            self._store.wait_for_task(
                task.task_id, auth=ALICE, since_version=task.version, timeout=timedelta(seconds=30)
            )
        )
        await asyncio.wait({asking, asked}, return_when=asyncio.FIRST_COMPLETED)
        for each in (asking, asked):
            if not each.done():
                each.cancel()
        await asyncio.wait({asking, asked})
        if not asking.cancelled():
            asking.result()

    @property
    def _store(self) -> TaskStore:
        return self.store._store

    def _owner(self, kind: type, task: Task) -> object:
        return {
            TaskStore: lambda: self._store,
            OperatorView: lambda: self._store.operator,
            TaskHandle: lambda: self._store.handle(task),
            SyncTaskStore: lambda: self.store,
            SyncOperatorView: lambda: self.store.operator,
            SyncTaskHandle: lambda: self.store.handle(task),
        }[kind]()

    def dump(self) -> list[list[dict[str, Any]]]:
        def read(transaction):
            return [sorted(transaction.rows(SELECTS[table], {}), key=repr) for table in ("tasks", "events", "inputs")]

        return self._database.read(read, snapshot=True).result()

    def clear(self) -> None:
        self._database.write(lambda transaction: transaction.execute(CLEAR, {})).result()


SELECTS = {table: text(f"SELECT * FROM taskstore_{table}") for table in ("tasks", "events", "inputs")}
CLEAR = text("DELETE FROM taskstore_tasks")


@pytest.fixture
def target(database_url: str) -> Iterator[Target]:
    with SyncTaskStore.open(database_url, options=StoreOptions(clock=ManualClock(), upkeep=False)) as store:
        yield Target(store)


def name_of(case: Case) -> str:
    """Return the name under which errors speak of a parameter."""
    names = {"value": "progress", "data": "error.data", "status": "TaskStatus", "on_crash": "OnCrash"}
    return names.get(case.parameter, case.parameter)


def error_of(case: Case) -> type[Exception]:
    """Say which error tells of an argument of a type that nothing takes."""
    return {"status": ValueError, "on_crash": ValueError, **dict.fromkeys(ANY_JSON, PayloadError)}.get(
        case.parameter, TypeError
    )


def test_an_argument_of_a_wrong_type_is_named_and_nothing_is_written(target):
    """An AttributeError from deep inside names neither; worse is what one database stores and the other refuses."""
    task = target.fresh_task()
    before = target.dump()

    for case in (*CASES, *SYNC_CASES):
        for wrong in (object(), {1, 2}):
            with pytest.raises(error_of(case), match=name_of(case)):
                target.call(case, task, wrong)

    assert target.dump() == before


def test_options_of_a_wrong_type_are_named_and_no_database_is_made(tmp_path):
    """A dictionary looks like options; what it breaks deep inside would not say so."""
    path = tmp_path / "tasks.db"
    url = f"sqlite:///{path}"

    async def open_it():
        async with TaskStore.open(url, options={"upkeep": False}):
            pass

    with pytest.raises(TypeError, match="options"):
        asyncio.run(open_it())
    with pytest.raises(TypeError, match="options"), SyncTaskStore.open(url, options={"upkeep": False}):
        pass

    assert not path.exists()


@pytest.mark.parametrize("name", ["limit", "after", "since_version", "code", "value", "total"])
def test_true_and_false_are_no_numbers(target, name):
    """They are in Python, and PostgreSQL refuses where SQLite stores a 1."""
    task = target.fresh_task()

    for case in (case for case in (*CASES, *SYNC_CASES) if case.parameter == name):
        with pytest.raises(TypeError, match="not bool"):
            target.call(case, task, True)


def test_what_is_wrong_with_a_report_keeps_all_of_it_out(target):
    """Half of a refused report would be stored with the next one."""
    task = target.fresh_task()
    handle = target.store.handle(task)

    for wrong in ({"total": "10"}, {"total": math.nan}, {"message": b"half"}, {"message": "\ud800"}):
        with pytest.raises((TypeError, PayloadError)):
            handle.progress(**{"value": 5, "total": 10, "message": "half", **wrong})
    done = handle.complete({})

    assert (done.progress, done.progress_total, done.status_message) == (None, None, None)


def test_a_negative_version_is_before_all_events(target):
    task = target.fresh_task()

    for after in (-1, -(10**30)):
        assert len(target.store.list_events(task.task_id, auth=ALICE, after=after)) == 1
    assert target.store.list_events(task.task_id, auth=ALICE, after=10**30) == []


@pytest.mark.parametrize("name", ["x" * 1001, "é" * 501], ids=["letters", "bytes"])
def test_a_name_that_no_index_of_postgresql_takes_is_refused_on_both_databases(target, name):
    """Its rows may have 2,700 bytes; beyond, the INSERT fails and looks like an outage."""
    task = target.fresh_task()

    with pytest.raises(PayloadError, match="more than 1000 bytes"):
        target.store.handle(task).ask({name: {}})
    with pytest.raises(PayloadError, match="more than 1000 bytes"):
        target.store.create_task(auth=ALICE, name=name)
    with pytest.raises(PayloadError, match="more than 1000 bytes"):
        StoreOptions(server=name)

    assert target.store.get_task(task.task_id, auth=ALICE) == task


# --- whatever comes


class Odd:
    """An object that knows nothing of JSON, nor of anything else."""


LONE_SURROGATES = st.sampled_from(["\ud800", "a\udfffb", "\ud83d"])
TEXTS = st.one_of(
    st.sampled_from(["", " ", "\x00", "a\x00b", "\n", "tsk_", "working", "x" * 300, "x" * 5000, "é" * 1500, "%s", "'"]),
    LONE_SURROGATES,
    st.text(max_size=20),
)
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 2**31, 2**63, -(2**63) - 1, 10**30, 10**5000, True, False]),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e308, -0.0, 0.5]),
    st.sampled_from([1 + 2j, timedelta.max, timedelta.min, timedelta(microseconds=1), timedelta(days=-1)]),
)
SCALARS = st.one_of(
    st.none(),
    TEXTS,
    NUMBERS,
    st.sampled_from([b"", b"bytes", bytearray(b"x"), Odd(), Odd, ALICE, AuthContext(subject="\ud800")]),
    st.binary(max_size=5),
)
ODD = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=2),
    st.tuples(SCALARS),
    st.dictionaries(st.one_of(TEXTS, st.integers(), st.none()), SCALARS, max_size=2),
    st.sampled_from([set(), {1}, frozenset(), range(3), iter(()), lambda: None]),
    st.recursive(st.just(1), lambda inner: st.lists(inner, min_size=1, max_size=1), max_leaves=3),
)


@settings(drawn(600), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.sampled_from([*CASES, *SYNC_CASES]), value=ODD)
def test_whatever_is_given_only_documented_errors_come_and_a_failed_call_writes_nothing(target, case, value):
    """Arguments come from clients and from tools; none of them may look like an outage, or half be stored."""
    target.clear()
    task = target.fresh_task(queued=case.method == "claim_task")  # so that there is nothing to wait for
    before = target.dump()

    try:
        target.call(case, task, value)
    except (TaskStoreError, ValueError, TypeError) as error:
        refused: Exception | None = error
    else:
        refused = None

    if refused is not None:
        assert not isinstance(refused, DatabaseUnavailableError | UnicodeError), refused
        assert not isinstance(refused, TypeError) or name_of(case) in str(refused), refused
        assert target.dump() == before


INSTANTS = st.one_of(
    st.datetimes(), st.datetimes(timezones=st.sampled_from([UTC, timezone(timedelta(hours=-23, minutes=-59))]))
)
SPANS = st.one_of(st.none(), st.timedeltas(), st.sampled_from([timedelta(0), timedelta(minutes=1)]))
COUNTS = st.one_of(st.sampled_from([0, 1, 2]), st.integers())
RECORDS = st.fixed_dictionaries(
    {"status": st.sampled_from(TaskStatus)},
    optional={
        "task_id": TEXTS,
        "created_at": INSTANTS,
        "last_updated_at": INSTANTS,
        "finished_at": st.one_of(st.none(), INSTANTS),
        "ttl": SPANS,
        "poll_interval": SPANS,
        "attempt": COUNTS,
        "crashes": COUNTS,
        "version": COUNTS,
        "progress": st.one_of(st.none(), st.floats()),
        "progress_total": st.one_of(st.none(), st.floats()),
        "status_message": st.one_of(st.none(), TEXTS),
        "method": TEXTS,
        "name": st.one_of(st.none(), TEXTS),
        "server": TEXTS,
        "owner_kind": st.sampled_from(OwnerKind),
    },
)
OUTCOMES = {
    TaskStatus.COMPLETED: Outcome(result={"ok": True}),
    TaskStatus.FAILED: Outcome(error={"code": -32603, "message": "it broke"}),
    TaskStatus.CANCELLED: Outcome(),
}


@settings(drawn(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=RECORDS)
def test_whatever_is_imported_can_be_read_again_or_is_refused_and_not_written(target, changes):
    """A row that one database takes and the other refuses, or that no read can show, would spoil every listing."""
    target.clear()
    operator, finished = target.store.operator, changes["status"].is_finished
    known = target.fresh_task()
    record = {"task_id": "imported", "finished_at": known.created_at if finished else None, **changes}
    before = target.dump()

    try:
        imported = operator.import_task(
            details_of(known, outcome=OUTCOMES.get(record["status"]), **record), owner=ALICE
        )
    except (ValueError, PayloadError):
        assert target.dump() == before
    else:
        assert len(target.dump()[0]) == 2
        if imported.expires_at is None or imported.expires_at > known.created_at:
            assert operator.get_task(record["task_id"]) == imported
            assert target.store.list_events(record["task_id"], auth=ALICE)[-1].to_status == imported.status
        assert len(target.store.list_tasks(auth=ALICE).tasks) >= 1
