"""Every SQL statement of the store, built once with named bind parameters; nothing here runs.

A change of a task is one UPDATE whose WHERE carries every condition: the statuses it may start from, and who may
make it (the auth key of a requestor, or the fence of a handle: instance and attempt). No row back means refused.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ColumnElement,
    Double,
    Insert,
    Integer,
    LargeBinary,
    Select,
    Text,
    Update,
    and_,
    bindparam,
    case,
    delete,
    func,
    insert,
    literal_column,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.sql.base import ReadOnlyColumnCollection
from sqlalchemy.sql.dml import ReturningInsert, ReturningUpdate
from sqlalchemy.sql.elements import BindParameter

from taskstore.schema import DEFAULT_PREFIX, build_tables
from taskstore.task import LIVE, EventKind, OwnerKind, ReasonCode, TaskStatus, statuses_before

_tables = build_tables().tables
tasks, events, inputs, instances, tombstones, meta = (
    _tables[DEFAULT_PREFIX + name] for name in ("tasks", "events", "inputs", "instances", "tombstones", "meta")
)

PAYLOADS = ("request", "caller", "parked", "result", "error")
TASK_COLUMNS = tuple(column for column in tasks.c if column.name not in PAYLOADS)


def _number(name: str) -> BindParameter[int]:
    return bindparam(name, type_=BigInteger)


def _text(name: str) -> BindParameter[str]:
    return bindparam(name, type_=Text)


def _constant(value: str) -> ColumnElement[str]:
    # Written into the SQL, not bound, so that a planner can match it with a partial index.
    return literal_column(f"'{value}'", Text)


def _one_of(statuses: tuple[TaskStatus, ...]) -> ColumnElement[bool]:
    return tasks.c.status.in_([_constant(status) for status in statuses])


_NOW = _number("now")
_IS_LIVE = tasks.c.finished_at.is_(None)
_NOT_EXPIRED = or_(_IS_LIVE, tasks.c.expires_at.is_(None), tasks.c.expires_at > _NOW)
_THIS = tasks.c.task_id == _text("task_id")
_OWN = tasks.c.auth_key == _text("auth_key")
_KEYED = tasks.c.idempotency_digest == _text("idempotency_digest")
# A live task ends at its ttl when no process holds it, and under strict rules always; until whoever finds it due has
# ended it, nothing else may change it.
_KEPT_BY_PROCESS = and_(tasks.c.owner_kind == _constant(OwnerKind.INSTANCE), ~bindparam("strict", type_=Boolean))
_NOT_DUE = or_(tasks.c.expires_at.is_(None), tasks.c.expires_at > _NOW, _KEPT_BY_PROCESS)
# No instance holds an external task; the handles of its outcome are all of one holder, ''.
_FENCE = and_(
    func.coalesce(tasks.c.instance_id, literal_column("''", Text)) == _text("instance_id"),
    tasks.c.attempt == bindparam("attempt", type_=Integer),
)


def keys_of(name: str) -> Select[Any]:
    """Select the keys of a JSON object, which stands for a list of any length.

    json_each of an object is the one function with a name and a column that both databases have.
    """
    return select(func.json_each(bindparam(name, type_=JSON)).table_valued("key").c.key)


# --- changes: a write of one task, and the event row that records it


@dataclass(frozen=True, eq=False)
class Change:
    """One state change: the write of a task and its event, as one statement and as two.

    Each form is built when it is first used; no dialect uses them all.

    Attributes:
        bare: INSERT or UPDATE of one task, returning nothing.
    """

    kind: EventKind
    reason: ReasonCode | None
    bare: Insert | Update

    @property
    def inserts(self) -> bool:
        """Whether the task is a new one, of which every column is a parameter."""
        return isinstance(self.bare, Insert)

    @cached_property
    def write(self) -> ReturningInsert[Any] | ReturningUpdate[Any]:
        """The write alone, returning TASK_COLUMNS; EVENT takes its values from there."""
        return self.bare.returning(*TASK_COLUMNS)

    @cached_property
    def record(self) -> Insert:
        """INSERT of the events of many tasks, from their rows as ``bare`` has left them."""
        return self._event(tasks.c, tasks.c.task_id.in_(keys_of("changed")))

    @cached_property
    def combined(self) -> Select[Any]:
        """Both in one statement, with a notification, for PostgreSQL; returns what ``write`` returns, and more."""
        changed = self.write.cte("changed")
        notify = func.pg_notify(_text("channel"), _text("notice"))
        return select(changed, notify.label("notified")).add_cte(self._event(changed.c).cte("recorded"))

    def _event(self, source: ReadOnlyColumnCollection[str, Any], *where: ColumnElement[bool]) -> Insert:
        row = select(
            *(source[column] for _, column in FROM_ROW),
            _constant(self.kind).label("kind"),
            _text("writer").label("instance_id"),
            (_constant(self.reason) if self.reason else literal_column("NULL", Text)).label("reason"),
        ).where(*where)
        return insert(events).from_select([*(column for column, _ in FROM_ROW), "kind", "instance_id", "reason"], row)


# The event takes these from the new row of the task, as (column of events, column of tasks).
FROM_ROW = (
    ("task_id", "task_id"),
    ("version", "version"),
    ("at", "last_updated_at"),
    ("from_status", "previous_status"),
    ("to_status", "status"),
    ("attempt", "attempt"),
)
EVENT = insert(events).values({column.name: bindparam(column.name, type_=column.type) for column in events.c})


def _change(kind: EventKind, write: Insert | Update, reason: ReasonCode | None = None) -> Change:
    return Change(kind, reason, write)


def _become(status: TaskStatus, /, **values: object) -> Update:
    return _change_status(statuses_before(status), status, **values)


def _change_status(before: tuple[TaskStatus, ...], status: TaskStatus, /, **values: object) -> Update:
    return (
        update(tasks)
        .where(_THIS, _one_of(before))
        .values(
            previous_status=tasks.c.status,
            status=_constant(status),
            last_updated_at=_NOW,
            version=tasks.c.version + 1,
            **values,
        )
    )


def _finish(status: TaskStatus, **values: object) -> Update:
    retained = _NOW - tasks.c.created_at + _number("min_retention")
    # CASE, not MAX: the scalar maximum has another name in each dialect. A null ttl stays null: unlimited.
    ttl_ms = case((tasks.c.ttl_ms < retained, retained), else_=tasks.c.ttl_ms)
    return _become(
        status,
        finished_at=_NOW,
        ttl_ms=ttl_ms,
        expires_at=tasks.c.created_at + ttl_ms,
        # Kept for another run, of which there will be none.
        caller=null(),
        parked=null(),
        **values,
    )


def _said() -> dict[str, object]:
    """Set what a handle says about its progress, which never goes down; nulls leave the columns alone."""
    progress = bindparam("progress", type_=Double)
    advanced = or_(tasks.c.progress.is_(None), progress > tasks.c.progress)
    return {
        "progress": case((advanced, progress), else_=tasks.c.progress),
        "progress_total": func.coalesce(bindparam("progress_total", type_=Double), tasks.c.progress_total),
        "status_message": func.coalesce(bindparam("status_message", type_=LargeBinary), tasks.c.status_message),
    }


_DIGEST = _text("outcome_digest")
_ERROR = bindparam("error", type_=LargeBinary)
_MESSAGE = bindparam("status_message", type_=LargeBinary)

CREATE = _change(
    EventKind.CREATED,
    insert(tasks).values({column.name: bindparam(column.name, type_=column.type) for column in tasks.c}),
)
IMPORT = _change(EventKind.IMPORTED, CREATE.bare)
IMPORT_ORPHAN = _change(EventKind.IMPORTED, CREATE.bare, ReasonCode.CRASH_RECOVERY)
COMPLETE = _change(
    EventKind.COMPLETED,
    _finish(
        TaskStatus.COMPLETED,
        result=bindparam("result", type_=LargeBinary),
        is_error=bindparam("is_error", type_=Boolean),
        outcome_digest=_DIGEST,
        **_said(),
    ).where(_FENCE, _NOT_DUE),
)
FAIL = _change(
    EventKind.FAILED,
    _finish(TaskStatus.FAILED, error=_ERROR, outcome_digest=_DIGEST, **_said()).where(_FENCE, _NOT_DUE),
)
CANCEL = _change(
    EventKind.CANCELLED,
    _finish(TaskStatus.CANCELLED, cancel_requested_at=_NOW, status_message=_MESSAGE).where(_OWN, _NOT_DUE),
)
OPERATOR_CANCEL = _change(
    EventKind.CANCELLED,
    _finish(TaskStatus.CANCELLED, cancel_requested_at=_NOW, status_message=_MESSAGE).where(_NOT_DUE),
)
# What the store itself ends. Raising attempt fences the former holder out.
_ENDED = _finish(
    TaskStatus.FAILED,
    error=_ERROR,
    status_message=_MESSAGE,
    outcome_digest=_DIGEST,
    attempt=tasks.c.attempt + 1,
    crashes=tasks.c.crashes + bindparam("crashed", type_=Integer),
)
_IS_QUEUED = tasks.c.owner_kind == _constant(OwnerKind.QUEUED)
END_DUE = _change(EventKind.EXPIRED, _ENDED.where(~_NOT_DUE, ~_IS_QUEUED), ReasonCode.TTL_EXPIRED)
END_UNCLAIMED = _change(EventKind.EXPIRED, _ENDED.where(~_NOT_DUE, _IS_QUEUED), ReasonCode.NO_RUNNER)
# The holder and attempt in the WHERE fence a verdict out if somebody else decided over the task first.
ABANDON = _change(EventKind.RECOVERED, _ENDED.where(_FENCE), ReasonCode.ABANDONED)
DECLINE = _change(EventKind.RECOVERED, _ENDED.where(_OWN), ReasonCode.CRASH_RECOVERY)
# What becomes of a task whose process is gone, by what became of the process.
_LET_GO: dict[str, object] = {
    "instance_id": null(),
    "attempt": tasks.c.attempt + 1,
    "crashes": tasks.c.crashes + bindparam("crashed", type_=Integer),
    "status_message": _MESSAGE,
}
_REQUEUED = _change_status(LIVE, TaskStatus.WORKING, owner_kind=_constant(OwnerKind.QUEUED), **_LET_GO).where(_FENCE)
_ASKED = _change_status(LIVE, TaskStatus.INPUT_REQUIRED, owner_kind=_constant(OwnerKind.PARKED), **_LET_GO).where(
    _FENCE
)
FOR_ORPHANS = {
    (reason, owner): _change(kind, write, reason)
    for reason in (ReasonCode.CRASH_RECOVERY, ReasonCode.SERVER_STOPPED)
    for owner, kind, write in (
        (OwnerKind.INSTANCE, EventKind.RECOVERED, _ENDED.where(_FENCE)),
        (OwnerKind.QUEUED, EventKind.QUEUED, _REQUEUED),
        (OwnerKind.PARKED, EventKind.INPUT_REQUIRED, _ASKED),
    )
}
# Also from input_required: a tool may ask one thing while it waits for the answer to another.
ASK = _change(EventKind.INPUT_REQUIRED, _change_status(LIVE, TaskStatus.INPUT_REQUIRED).where(_FENCE, _NOT_DUE))
PARK = _change(
    EventKind.INPUT_REQUIRED,
    _change_status(
        LIVE,
        TaskStatus.INPUT_REQUIRED,
        owner_kind=_constant(OwnerKind.PARKED),
        instance_id=null(),
        parked=bindparam("parked", type_=LargeBinary),
        **_said(),
    ).where(_FENCE, _NOT_DUE),
)
_OPEN = and_(inputs.c.answered_at.is_(None), inputs.c.closed_at.is_(None))
_ALL_ANSWERED = ~select(inputs.c.key).where(inputs.c.task_id == tasks.c.task_id, _OPEN).exists()
# A parked task has no process that waits for the answers: a runner takes it from here.
_NOBODYS_NOW = tasks.c.owner_kind == _constant(OwnerKind.PARKED)
RESUME = _change(
    EventKind.RESUMED,
    _become(
        TaskStatus.WORKING,
        owner_kind=case((_NOBODYS_NOW, _constant(OwnerKind.QUEUED)), else_=tasks.c.owner_kind),
    ).where(_OWN, _ALL_ANSWERED),
)
# Progress never goes down within an attempt; this begins one.
CLAIM = _change(
    EventKind.CLAIMED,
    _change_status(
        (TaskStatus.WORKING,),
        TaskStatus.WORKING,
        owner_kind=_constant(OwnerKind.INSTANCE),
        instance_id=_text("instance_id"),
        attempt=tasks.c.attempt + 1,
        progress=null(),
        progress_total=null(),
    ).where(_IS_QUEUED, _NOT_DUE),
)

WITHDRAW = _change(EventKind.RESUMED, _become(TaskStatus.WORKING).where(_FENCE, _NOT_DUE, _ALL_ANSWERED))
CLOSE_INPUTS = update(inputs).where(inputs.c.task_id == _text("task_id"), _OPEN).values(closed_at=_NOW)
CLOSE_INPUT = CLOSE_INPUTS.where(inputs.c.key == _text("key"))
# What is new to a reader and no change of status: the version alone tells waiters of it.
TOUCH = update(tasks).where(_THIS).values(last_updated_at=_NOW, version=tasks.c.version + 1)

# Progress is no state change: it writes no event, but raises the version so that waiters see it.
PROGRESS = (
    update(tasks)
    .where(_THIS, _FENCE, _NOT_DUE, _one_of(LIVE))
    .values(last_updated_at=_NOW, version=tasks.c.version + 1, **_said())
)

# --- reads of tasks

GET = select(*TASK_COLUMNS).where(_THIS, _OWN, _NOT_EXPIRED)
GET_WITH_OUTCOME = select(*TASK_COLUMNS, tasks.c.result, tasks.c.error).where(_THIS, _OWN, _NOT_EXPIRED)
OPERATOR_GET = select(*TASK_COLUMNS).where(_THIS, _NOT_EXPIRED)
OPERATOR_GET_WITH_OUTCOME = select(*TASK_COLUMNS, tasks.c.result, tasks.c.error).where(_THIS, _NOT_EXPIRED)
ANYBODYS = select(*TASK_COLUMNS, tasks.c.result, tasks.c.error).where(_THIS)
IDEMPOTENT = select(*TASK_COLUMNS).where(_OWN, _KEYED, _NOT_EXPIRED)
FREE_KEY = update(tasks).where(_OWN, _KEYED, ~_NOT_EXPIRED).values(idempotency_digest=null())
# Under an earlier binding secret the same auth context has another key.
_FORMERLY_OWN = tasks.c.auth_key == _text("former_auth_key")
IS_BOUND_FORMERLY = select(tasks.c.task_id).where(_FORMERLY_OWN).limit(1)
REBIND = update(tasks).where(_FORMERLY_OWN).values(auth_key=_text("auth_key"))
REBIND_KEY = (
    update(tasks)
    .where(_OWN, tasks.c.idempotency_digest == _text("former_idempotency_digest"))
    .values(
        idempotency_digest=_text("idempotency_digest"),
        # Another request stays another one: its digest equals none that is made under the new secret.
        request_digest=case(
            (tasks.c.request_digest == _text("former_request_digest"), _text("request_digest")),
            else_=tasks.c.request_digest,
        ),
    )
)
COUNT_LIVE = select(func.count().label("count")).select_from(tasks).where(_OWN, _IS_LIVE, _NOT_DUE)
COUNT_STORED = select(func.count().label("count")).select_from(tasks).where(_OWN, _NOT_EXPIRED)
LOCK_OWN = select(*TASK_COLUMNS).where(_THIS, _OWN, _NOT_EXPIRED).with_for_update()
LOCK_HELD = select(*TASK_COLUMNS).where(_THIS, _FENCE, _IS_LIVE, _NOT_DUE).with_for_update()
DELETE = delete(tasks).where(_THIS, _OWN, _NOT_EXPIRED, ~_IS_LIVE).returning(tasks.c.task_id)


def _filtered(column: ColumnElement[Any], name: str) -> ColumnElement[bool]:
    return or_(_text(name).is_(None), column == _text(name))


# A task that is due is about to fail, whatever its status is now: whoever lists it ends it first.
_WITH_STATUS = or_(_filtered(tasks.c.status, "status"), and_(_IS_LIVE, ~_NOT_DUE))
LIST = (
    select(*TASK_COLUMNS)
    .where(
        _OWN,
        _NOT_EXPIRED,
        # Not a row comparison: PostgreSQL uses the index for one, SQLite only for the first column's bound.
        tasks.c.created_at <= _number("before_at"),
        or_(tasks.c.created_at < _number("before_at"), tasks.c.task_id < _text("before_id")),
        _WITH_STATUS,
        _filtered(tasks.c.session_digest, "session_digest"),
    )
    .order_by(tasks.c.created_at.desc(), tasks.c.task_id.desc())
    .limit(_number("limit"))
)
# Ids begin with the creation time, so the primary key alone lists the whole store newest first.
OPERATOR_LIST = (
    select(*TASK_COLUMNS)
    .where(
        tasks.c.task_id < _text("before_id"),
        _NOT_EXPIRED,
        _WITH_STATUS,
        _filtered(tasks.c.auth_key, "owner"),
        _filtered(tasks.c.name, "name"),
        _filtered(tasks.c.server, "server"),
        _filtered(tasks.c.session_digest, "session_digest"),
    )
    .order_by(tasks.c.task_id.desc())
    .limit(_number("limit"))
)

# What the shared poll of all waiters asks, however many they are.
WATCH = select(tasks.c.task_id, tasks.c.version).where(tasks.c.task_id.in_(keys_of("waited_for")))

# --- events and inputs

EVENTS = (
    select(events)
    .where(events.c.task_id == _text("task_id"), events.c.version > _number("after"))
    .order_by(events.c.version)
)
HAS_EVENT = select(events.c.version).where(
    events.c.task_id == _text("task_id"),
    events.c.version == _number("version"),
    events.c.at == _number("at"),
    events.c.kind == _text("kind"),
    events.c.instance_id == _text("instance_id"),
)
# PostgreSQL only: what became of a transaction.
IS_COMMITTED: Select[Any] = select(literal_column("true").label("committed")).where(
    func.txid_status(_number("transaction_id"), type_=Text) == _constant("committed")
)
ADD_INPUT = insert(inputs).values(
    {
        column.name: bindparam(column.name, type_=column.type)
        for column in inputs.c
        if column.name not in ("response", "answered_at", "closed_at")
    }
)
OPEN_INPUTS = (
    select(inputs.c.key, inputs.c.request)
    .where(inputs.c.task_id == _text("task_id"), _OPEN)
    .order_by(inputs.c.asked_at, inputs.c.key)
)
ANSWER = (
    update(inputs)
    .where(inputs.c.task_id == _text("task_id"), inputs.c.key == _text("key"), _OPEN)
    .values(response=bindparam("response", type_=LargeBinary), answered_at=_NOW)
    .returning(inputs.c.name)
)
ANSWERS = select(inputs.c.key, inputs.c.name, inputs.c.response).where(
    inputs.c.task_id == _text("task_id"), inputs.c.answered_at.is_not(None)
)

# --- sealing again, under another key; no state changes, so neither version nor event

SEALED_COLUMNS = (*PAYLOADS, "status_message")
SEALED_TASKS = (
    select(tasks.c.task_id, *(tasks.c[name] for name in SEALED_COLUMNS))
    .where(tasks.c.task_id > _text("after"))
    .order_by(tasks.c.task_id)
    .limit(_number("limit"))
    .with_for_update()
)
RESEAL_TASK = update(tasks).where(_THIS).values({name: bindparam(name, type_=LargeBinary) for name in SEALED_COLUMNS})
SEALED_INPUTS = select(inputs).where(inputs.c.task_id == _text("task_id"))
RESEAL_INPUT = (
    update(inputs)
    .where(inputs.c.task_id == _text("task_id"), inputs.c.key == _text("key"))
    .values({name: bindparam(name, type_=LargeBinary) for name in ("request", "response")})
)

# --- instances, recovery, sweep

REGISTER = insert(instances).values({column.name: bindparam(column.name, type_=column.type) for column in instances.c})
_THIS_INSTANCE = instances.c.instance_id == _text("instance_id")
BEAT = update(instances).where(_THIS_INSTANCE).values(beat=instances.c.beat + 1).returning(instances.c.beat)
INSTANCES = select(instances)
_HOLDS_LIVE = select(tasks.c.task_id).where(_IS_LIVE, tasks.c.instance_id == instances.c.instance_id).exists()
_IS_STILL = instances.c.beat == _number("last_beat")
_IS_STILL_IF_ASKED = or_(_number("last_beat").is_(None), _IS_STILL)
RELEASE = delete(instances).where(_THIS_INSTANCE, _IS_STILL_IF_ASKED, ~_HOLDS_LIVE).returning(instances.c.instance_id)
# Until COMMIT, the beat waits: it cannot come between this look and the verdict that rests on it.
STILL_AT_BEAT = select(instances.c.beat).where(_THIS_INSTANCE, _IS_STILL).with_for_update()

_HELD_LIVE = and_(_IS_LIVE, tasks.c.owner_kind == _constant(OwnerKind.INSTANCE))
_REGISTERED = select(instances.c.instance_id).where(instances.c.instance_id == tasks.c.instance_id).exists()
_ORPHAN_COLUMNS = [
    tasks.c[name]
    for name in (
        *("task_id", "auth_key", "method", "name", "status", "progress", "progress_total", "expires_at"),
        *("instance_id", "attempt", "crashes", "max_attempts", "on_crash", "version"),
    )
]
ORPHANS_OF = (
    select(*_ORPHAN_COLUMNS)
    .where(_HELD_LIVE, tasks.c.instance_id == _text("instance_id"))
    .limit(_number("limit"))
    .with_for_update(skip_locked=True)
)
HELD_LIVE = select(tasks.c.task_id, tasks.c.attempt).where(_HELD_LIVE, tasks.c.instance_id == _text("instance_id"))
# Rows whose instance has no row; they start from the index of live rows, so finished ones cost nothing.
ORPHANS_OF_NOBODY = (
    select(*_ORPHAN_COLUMNS).where(_HELD_LIVE, ~_REGISTERED).limit(_number("limit")).with_for_update(skip_locked=True)
)

# What waits for a runner of one server, the oldest first; from a position on, since a runner may not know them all.
QUEUED = (
    select(tasks.c.task_id, tasks.c.name, tasks.c.method, tasks.c.created_at)
    .where(
        _IS_LIVE,
        _IS_QUEUED,
        _NOT_DUE,
        tasks.c.server == _text("server"),
        tasks.c.created_at >= _number("after_at"),
        or_(tasks.c.created_at > _number("after_at"), tasks.c.task_id > _text("after_id")),
    )
    .order_by(tasks.c.created_at, tasks.c.task_id)
    .limit(_number("limit"))
)
FOR_ANOTHER_RUN = select(tasks.c.request, tasks.c.caller, tasks.c.parked).where(_THIS)

DUE = select(tasks.c.task_id).where(_IS_LIVE, ~_NOT_DUE).limit(_number("limit")).with_for_update(skip_locked=True)
_EXPIRED = (
    select(tasks.c.task_id)
    .where(~_IS_LIVE, tasks.c.expires_at <= _NOW)
    .order_by(tasks.c.expires_at)
    .limit(_number("limit"))
    .with_for_update(skip_locked=True)
)
SWEEP = (
    delete(tasks)
    .where(tasks.c.task_id.in_(_EXPIRED))
    .returning(
        tasks.c.task_id,
        tasks.c.auth_key,
        tasks.c.expires_at.label("expired_at"),
        (func.coalesce(func.length(tasks.c.request), 0) + func.coalesce(func.length(tasks.c.result), 0)).label("bytes"),
    )
)

BURY = insert(tombstones).values({column.name: bindparam(column.name, type_=column.type) for column in tombstones.c})
# Whether an id was a task of this auth context that has expired, whether it was swept yet or not.
EXPIRED = (
    select(tasks.c.task_id)
    .where(_THIS, _OWN, ~_NOT_EXPIRED)
    .union_all(
        select(tombstones.c.task_id).where(
            tombstones.c.task_id == _text("task_id"), tombstones.c.auth_key == _text("auth_key")
        )
    )
)
# Not NOT IN (the ones to keep): PostgreSQL cannot hash 100,000 ids in its work_mem, and compares each with each.
_OLDEST_KEPT = (
    select(tombstones.c.expired_at)
    .order_by(tombstones.c.expired_at.desc())
    .limit(1)
    .offset(_number("keep") - 1)
    .scalar_subquery()
)
PRUNE_TOMBSTONES = delete(tombstones).where(
    or_(tombstones.c.expired_at < _number("before"), tombstones.c.expired_at < _OLDEST_KEPT)
)

COUNTS = select(
    func.count().filter(_IS_LIVE).label("live"),
    func.count().filter(and_(~_IS_LIVE, _NOT_EXPIRED)).label("finished"),
    func.count().filter(~_NOT_EXPIRED).label("expired"),
).select_from(tasks)
HELD_BY = select(tasks.c.instance_id, func.count().label("held")).where(_HELD_LIVE).group_by(tasks.c.instance_id)

# --- the store itself

_META = meta.c.name == _text("name")
META = select(meta.c.value).where(_META)
_META_IS_STILL = meta.c.value == bindparam("known", type_=LargeBinary)
CHANGE_META = update(meta).where(_META, _META_IS_STILL).values(value=bindparam("value", type_=LargeBinary))
DELETE_META = delete(meta).where(_META, _META_IS_STILL)
# Of two processes that open a new database at once, the first one's value stands.
SET_META_ONCE = text(
    f"INSERT INTO {meta.name} (name, value) VALUES (:name, :value) ON CONFLICT (name) DO NOTHING"
).bindparams(bindparam("name", type_=Text), bindparam("value", type_=LargeBinary))
