"""The contract of a unit of work, as those see it who hand units over: on both databases, and for SQLite's batches."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, wait
from contextlib import ExitStack, closing, contextmanager
from dataclasses import FrozenInstanceError, fields

import psycopg
import pytest
from sqlalchemy import LargeBinary, Text, bindparam, text

from taskstore import (
    AuthContext,
    DatabaseUnavailableError,
    Limits,
    OwnerKind,
    SchemaError,
    StoreOptions,
    TaskNotFoundError,
)
from taskstore.binding import new_task_id
from taskstore.database import Database
from taskstore.operations import (
    Call,
    Decided,
    Fence,
    Progress,
    Queued,
    Refused,
    Row,
    Rules,
    Swept,
    Transaction,
)
from taskstore.statements import CREATE, OPERATOR_CANCEL, OPERATOR_GET, tasks
from tests.unit.outside import PATIENCE_SECONDS, query

NOW = 1_767_225_600_000

ADD_NOTE = text("INSERT INTO taskstore_meta (name, value) VALUES (:name, :value)").bindparams(
    bindparam("name", type_=Text), bindparam("value", type_=LargeBinary)
)
NOTES = "SELECT name FROM taskstore_meta WHERE name LIKE 'note %' ORDER BY name"


VALUES = [
    AuthContext(subject="alice"),
    Limits(),
    StoreOptions().rules(),
    Call(None, NOW, "", StoreOptions().rules()),
    Fence("tsk_a", "ins_a", 1),
    Progress(),
    Refused(TaskNotFoundError("tsk_a")),
    Decided("tsk_a", "", OwnerKind.QUEUED),
    Queued("tsk_a", "render", NOW),
    Swept([], []),
    CREATE,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_what_a_unit_gets_and_gives_cannot_change(value: object) -> None:
    """A unit may run twice, and its caller goes on while it runs: both must see what they saw."""
    attribute = next(field.name for field in fields(value))  # type: ignore[arg-type]

    with pytest.raises(FrozenInstanceError):
        setattr(value, attribute, None)
    with pytest.raises((AttributeError, TypeError)):  # a frozen class with slots raises TypeError for what it has not
        value.misspelled = None  # type: ignore[attr-defined]
    if value is not CREATE:  # which caches its statements
        assert not hasattr(value, "__dict__")


@pytest.mark.parametrize("kind", [AuthContext, Limits, Rules])
def test_what_has_many_parts_takes_them_by_name(kind: type) -> None:
    """The second string of an AuthContext would be anybody's guess."""
    with pytest.raises(TypeError, match="positional"):
        kind("a", "b")


class OwnError(Exception):
    """What a unit with a fault of its own raises."""


class Note:
    """A unit that writes one row, counts its runs, and then does what a test asks for."""

    def __init__(self, name: str, afterwards: Callable[[int], object] = lambda run: None) -> None:
        self.name, self.runs, self._afterwards = name, 0, afterwards

    def __call__(self, transaction: Transaction) -> str:
        self.runs += 1
        transaction.execute(ADD_NOTE, {"name": f"note {self.name}", "value": b""})
        self._afterwards(self.runs)
        return self.name


def task_row(**values: object) -> Row:
    """Every column of a new task of alice's."""
    row: Row = dict.fromkeys(column.name for column in tasks.c)
    row.update(
        task_id=new_task_id(NOW),
        auth_key="alice",
        server="",
        method="tools/call",
        status="working",
        is_error=False,
        created_at=NOW,
        last_updated_at=NOW,
        owner_kind="instance",
        instance_id="ins_1",
        attempt=1,
        crashes=0,
        max_attempts=1,
        on_crash="fail",
        version=1,
    )
    return row | values


def create(row: Row) -> Callable[[Transaction], Row | None]:
    """Unit: create a task."""
    return lambda transaction: transaction.change(CREATE, {**row, "writer": "ins_1"})


def cancel(task_id: str) -> Callable[[Transaction], Row | None]:
    """Unit: cancel a task."""
    values = {
        "task_id": task_id,
        "now": NOW,
        "writer": "ins_1",
        "status_message": b"",
        "min_retention": 1000,
        "strict": False,
    }
    return lambda transaction: transaction.change(OPERATOR_CANCEL, values)


def refuse(transaction: Transaction) -> Refused:
    """Unit: refuse."""
    return Refused(TaskNotFoundError("tsk_unknown"))


def fail_in_the_driver(_run: int = 0) -> None:
    """Raise what running the same again cannot help."""
    raise sqlite3.IntegrityError("CHECK constraint failed")


def fail_by_itself(_run: int = 0) -> None:
    """Raise what has nothing to do with the database."""
    raise OwnError


@contextmanager
def held_writers(database: Database) -> Iterator[None]:
    """Keep every thread that writes in a unit, so that what is handed over meanwhile comes together."""
    release = threading.Event()
    with ExitStack() as leaving:
        leaving.callback(release.set)
        for _ in range({"sqlite": 1, "postgresql": 4}[database.name]):
            entered = threading.Event()

            def hold(transaction: Transaction, entered: threading.Event = entered) -> None:
                entered.set()
                release.wait()

            database.write(hold)
            entered.wait()
        yield


@pytest.fixture
def sqlite_database(sqlite_url: str) -> Iterator[Database]:
    """An open SQLite database, whose one writer takes what has come together as one transaction."""
    with closing(Database(sqlite_url)) as opened:
        yield opened


# --- on both databases


def test_a_refused_unit_does_not_harm_those_handed_over_with_it(database: Database, database_url: str) -> None:
    """Somebody's late cancel must not cost other callers their writes."""
    units: list[Callable[[Transaction], object]] = [Note("1"), refuse, Note("2")]

    with held_writers(database):
        futures = [database.write(unit) for unit in units]
    first, refused, second = [future.result() for future in futures]

    assert (first, second) == ("1", "2")
    assert isinstance(refused, Refused)
    assert isinstance(refused.error, TaskNotFoundError)
    assert query(database_url, NOTES) == [("note 1",), ("note 2",)]


def test_a_unit_that_breaks_a_constraint_fails_alone(database: Database, database_url: str) -> None:
    """The database refuses one row; the rows of those beside it are right, and are stored."""
    units: list[Callable[[Transaction], object]] = [Note("1"), create(task_row(status="paused")), Note("2")]

    with held_writers(database):
        futures = [database.write(unit) for unit in units]

    with pytest.raises(SchemaError, match="ck_taskstore_tasks_status"):
        futures[1].result()
    assert (futures[0].result(), futures[2].result()) == ("1", "2")
    assert query(database_url, NOTES) == [("note 1",), ("note 2",)]
    assert query(database_url, "SELECT * FROM taskstore_tasks") == []


def test_a_unit_that_raises_fails_alone_and_stores_nothing(database: Database, database_url: str) -> None:
    """A unit with a fault of its own hears of it unchanged, and what it had written is taken back."""

    def fail(run: int) -> None:
        raise OwnError

    units = [Note("1"), Note("faulty", fail), Note("2")]

    with held_writers(database):
        futures = [database.write(unit) for unit in units]

    with pytest.raises(OwnError):
        futures[1].result()
    assert (futures[0].result(), futures[2].result()) == ("1", "2")
    assert query(database_url, NOTES) == [("note 1",), ("note 2",)]


@pytest.mark.parametrize("error", [OwnError, SystemExit], ids=["an exception", "an exit"])
def test_the_writers_serve_the_next_caller_after_any_failure(database: Database, error: type[BaseException]) -> None:
    """A thread that died of somebody's exception would let every later call wait for ever."""

    def leave(run: int) -> None:
        raise error

    with held_writers(database):
        failing = [database.write(Note(f"{number}", leave)) for number in range(8)]
        unstorable = [database.write(create(task_row(status="paused"))) for _ in range(8)]
    failures = [future.exception(timeout=PATIENCE_SECONDS) for future in failing]
    failures += [future.exception(timeout=PATIENCE_SECONDS) for future in unstorable]

    assert [type(failure) for failure in failures] == [error] * 8 + [SchemaError] * 8
    assert database.write(Note("after")).result(timeout=PATIENCE_SECONDS) == "after"


def test_each_of_many_units_with_failures_among_them_is_stored_once(database: Database, database_url: str) -> None:
    """Running a batch again must not write twice what its first run had written."""
    notes = [Note(f"{number:03}") for number in range(100)]
    bad = [create(task_row(status="paused")) for _ in range(5)]

    with held_writers(database):
        futures = []
        for position, note in enumerate(notes):
            if position % 20 == 10:
                database.write(bad[position // 20])
            futures.append(database.write(note))

    assert [future.result() for future in futures] == [note.name for note in notes]
    assert query(database_url, NOTES) == [(f"note {note.name}",) for note in notes]


def test_a_caller_that_gave_up_before_its_unit_began_has_changed_nothing(database: Database, database_url: str) -> None:
    """Whoever was told that the call is cancelled may rely on it."""
    unit = Note("given up")

    with held_writers(database):
        future = database.write(unit)
        beside = database.write(Note("1"))
        was_cancelled = future.cancel()

    assert was_cancelled
    with pytest.raises(CancelledError):
        future.result()
    assert beside.result() == "1"
    assert unit.runs == 0
    assert query(database_url, NOTES) == [("note 1",)]


def test_a_unit_that_has_begun_cannot_be_given_up(database: Database, database_url: str) -> None:
    """Then the caller must wait for the truth: the unit may be committed at any moment."""
    entered, release = threading.Event(), threading.Event()

    def hold(run: int) -> None:
        entered.set()
        release.wait()

    future = database.write(Note("begun", hold))
    entered.wait()
    was_cancelled = future.cancel()
    release.set()

    assert not was_cancelled
    assert future.result() == "begun"
    assert query(database_url, NOTES) == [("note begun",)]


def test_nobody_hears_of_a_unit_before_its_commit(database: Database, database_url: str) -> None:
    """An answer that came earlier would be a promise that a crash could break."""
    entered, release = threading.Event(), threading.Event()

    def hold(run: int) -> None:
        entered.set()
        release.wait()

    future = database.write(Note("1", hold))
    entered.wait()
    seen_meanwhile, done_meanwhile = query(database_url, NOTES), future.done()
    release.set()

    assert (seen_meanwhile, done_meanwhile) == ([], False)
    assert future.result() == "1"
    assert query(database_url, NOTES) == [("note 1",)]


def test_a_unit_that_had_to_run_twice_leaves_one_row_and_one_event(database: Database, database_url: str) -> None:
    """A conflict with another transaction after the unit's writes is nothing that its caller sees."""
    runs: list[int] = []
    row = task_row()

    def unit(transaction: Transaction) -> Row | None:
        runs.append(len(runs))
        created = create(row)(transaction)
        if len(runs) == 1:
            if database.name == "postgresql":
                raise psycopg.errors.SerializationFailure
            raise sqlite3.OperationalError("interrupted")
        return created

    with held_writers(database):
        future = database.write(unit)
        database.write(Note("beside"))  # a batch of one is not run again on SQLite, where nothing can conflict
    created = future.result()

    assert created is not None
    assert len(runs) == 2
    assert query(database_url, "SELECT task_id, version FROM taskstore_tasks") == [(row["task_id"], 1)]
    assert query(database_url, "SELECT task_id, version, kind FROM taskstore_events") == [
        (row["task_id"], 1, "created")
    ]


def test_a_unit_sees_what_it_has_written_itself(database: Database) -> None:
    """A refusal that is explained after a write must explain the state that the write met."""
    row = task_row()

    def unit(transaction: Transaction) -> list[object]:
        written = [create(row)(transaction), cancel(row["task_id"])(transaction)]
        read = transaction.row(OPERATOR_GET, {"task_id": row["task_id"], "now": NOW})
        return [each and each["status"] for each in (*written, read)]

    assert database.write(unit).result() == ["working", "cancelled", "cancelled"]


# --- batches, which only SQLite has: there every COMMIT is a disk write that others can share


def test_a_batch_runs_in_the_order_of_its_callers(sqlite_database: Database) -> None:
    """Whoever hands over two changes of one task, one after the other, means them in that order."""
    order: list[int] = []

    with held_writers(sqlite_database):
        futures = [
            sqlite_database.write(Note(f"{number}", lambda run, number=number: order.append(number)))  # type: ignore[misc]
            for number in range(50)
        ]
    wait(futures)

    assert order == list(range(50))


def test_nobody_of_a_batch_hears_of_it_before_its_one_commit(sqlite_database: Database, sqlite_url: str) -> None:
    """The first in the batch waits for the last: until then its row is as good as lost in a crash."""
    entered, release = threading.Event(), threading.Event()

    def hold(run: int) -> None:
        entered.set()
        release.wait()

    with held_writers(sqlite_database):
        first, last = sqlite_database.write(Note("first")), sqlite_database.write(Note("last", hold))
    entered.wait()
    seen_meanwhile, done_meanwhile = query(sqlite_url, NOTES), first.done()
    release.set()

    assert (seen_meanwhile, done_meanwhile) == ([], False)
    assert (first.result(), last.result()) == ("first", "last")
    assert query(sqlite_url, NOTES) == [("note first",), ("note last",)]


@pytest.mark.parametrize("failure", [fail_in_the_driver, fail_by_itself], ids=["driver", "own"])
def test_a_batch_with_a_failure_is_run_again_one_by_one(
    sqlite_database: Database, sqlite_url: str, failure: Callable[[int], object]
) -> None:
    """Its units run twice, but count once; the one at fault alone hears of the error."""
    before, faulty, after = Note("before"), Note("faulty", failure), Note("after")

    with held_writers(sqlite_database):
        futures = [sqlite_database.write(unit) for unit in (before, faulty, after)]
    wait(futures)

    assert (before.runs, faulty.runs, after.runs) == (2, 2, 1)
    assert [future.exception() is None for future in futures] == [True, False, True]
    assert query(sqlite_url, NOTES) == [("note after",), ("note before",)]


def test_a_unit_that_fails_in_company_only_is_stored(sqlite_database: Database, sqlite_url: str) -> None:
    """What a batch stumbled over may be gone when its units run alone, and then nobody hears of it."""

    def fail_at_first(run: int) -> None:
        if run == 1:
            raise sqlite3.OperationalError("interrupted")

    with held_writers(sqlite_database):
        futures = [sqlite_database.write(Note("1", fail_at_first)), sqlite_database.write(Note("2"))]

    assert [future.result() for future in futures] == ["1", "2"]
    assert query(sqlite_url, NOTES) == [("note 1",), ("note 2",)]


def test_an_error_of_the_driver_alone_is_translated_too(sqlite_database: Database) -> None:
    """Python's module raises some errors by itself, without SQLite's code, such as for text that is no UTF-8."""

    def unit(transaction: Transaction) -> object:
        return transaction.row(text("SELECT CAST(x'ff' AS TEXT) AS broken"), {})

    for call in (sqlite_database.read, sqlite_database.write):
        with pytest.raises(DatabaseUnavailableError, match="Could not decode"):
            call(unit).result()
