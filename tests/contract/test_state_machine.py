"""The store beside a model of it: whatever is called in whatever order, the two agree after each step."""

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sqlalchemy import text

from taskstore import (
    AuthContext,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    LeaseLostError,
    NotFinishedError,
    OnCrash,
    OwnerKind,
    ReasonCode,
    StoreOptions,
    SyncTaskHandle,
    SyncTaskStore,
    Task,
    TaskExpiredError,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStatus,
    binding,
    handle,
)
from taskstore.errors import TaskStoreError
from taskstore.testing import ManualClock
from taskstore.testing.crashing import crash

from .conftest import ALICE, BOB, drawn
from .model import Expected, Model, Question

AUTHS = (ALICE, BOB, None)
TTLS = (timedelta(minutes=1), timedelta(minutes=1), timedelta(hours=1), None)
SPANS = (
    timedelta(minutes=1),
    timedelta(minutes=1),
    timedelta(seconds=59),
    timedelta(milliseconds=1),
    timedelta(minutes=16),
    timedelta(hours=2),
)
REQUESTS: tuple[Any, ...] = ({"topic": "tides"}, {"topic": "tides"}, None)
ASKS = {"method": "elicitation/create", "params": {"message": "Sure?"}}
RUN_AGAIN = {"action": "accept", "content": {"again": True}}
LIMIT = timedelta(seconds=60)  # to wait for what must come; nothing depends on how soon it does

CREATES = st.fixed_dictionaries(
    {
        "who": st.integers(0, 1),
        "auth": st.sampled_from([ALICE, ALICE, *AUTHS]),
        "key": st.sampled_from([None, "k1", "k1", "k2"]),
        "request": st.sampled_from(REQUESTS),
        "ttl": st.sampled_from(TTLS),
        "on_crash": st.sampled_from([OnCrash.RETRY, OnCrash.FAIL, OnCrash.RETRY, OnCrash.ASK, OnCrash.EXTERNAL]),
        "can_be_asked": st.sampled_from([True, True, False]),
        "max_attempts": st.integers(1, 3),
    }
)

MOST_THREADS = 12  # of tools that wait for answers, and of requestors that wait for tasks

TABLES = ("tasks", "events", "inputs")
READ_ROWS = {table: text(f"SELECT * FROM taskstore_{table}") for table in TABLES}
CLEAR = [text(f"DELETE FROM taskstore_{table}") for table in ("tasks", "tombstones", "instances")]


@dataclass(eq=False)
class Process:
    """A store that counts as a process of its own, and whether all others take it for dead."""

    store: SyncTaskStore
    opened: ExitStack
    is_dead: bool = False
    is_recovered: bool = False


@dataclass(eq=False)
class Held:
    """A handle as its tool holds it, with the fence it was given; an external task has no process."""

    task: Expected
    handle: SyncTaskHandle
    process: Process | None
    attempt: int
    asking: list[tuple[Future[Any], dict[str, str]]] = field(default_factory=list)


@dataclass(eq=False)
class Listing:
    """A listing that is under way: where it is, and which tasks it has shown."""

    auth: AuthContext
    status: TaskStatus | None
    size: int
    cursor: str
    after: tuple[int, str]


class Repeatable(random.Random):
    """In place of the module ``secrets``: ids that are the same whenever an example is run again."""

    def token_bytes(self, size: int) -> bytes:
        return self.randbytes(size)

    def token_hex(self, size: int) -> str:
        return self.randbytes(size).hex()


class StoreMachine(RuleBasedStateMachine):
    """Two processes on one database, three requestors, and the tools that hold their tasks."""

    url: str  # set by the test, like the source of ids
    ids: Repeatable

    @initialize(strict=st.booleans(), tombstones=st.booleans(), creates=st.lists(CREATES, min_size=2, max_size=4))
    def open(self, strict: bool, tombstones: bool, creates: list[dict[str, Any]]) -> None:
        self.ids.seed(0)
        self.clock = ManualClock()
        self.options = StoreOptions(
            clock=self.clock,
            upkeep=False,
            ttl_policy="strict" if strict else "keep",
            tombstones=timedelta(days=10_000) if tombstones else None,
            heartbeat=timedelta(hours=1),
            lease=timedelta(hours=3),
        )
        self.model = Model(self.clock, strict=strict)
        self.tombstones = tombstones
        self.pool = ThreadPoolExecutor(MOST_THREADS)
        self.held: list[Held] = []
        self.listings: list[Listing] = []
        self.waiting: list[tuple[Expected, Process, Future[Task]]] = []
        self.dead: list[Process] = []
        self.losses = 0
        self.seen: dict[str, int] = {}
        self.processes = [self._open(), self._open()]
        database = self.processes[0].store._store._parts.database
        for statement in CLEAR[:2]:
            database.write(lambda transaction, each=statement: transaction.execute(each, {})).result()
        for values in creates:
            self._create(**values)

    def _open(self) -> Process:
        opened = ExitStack()
        return Process(opened.enter_context(SyncTaskStore.open(self.url, options=self.options)), opened)

    # --- requestors

    @rule(values=CREATES)
    def create(self, values):
        """Create a task, or repeat a create under its key."""
        self._create(**values)

    @precondition(lambda self: any(task.key for task in self.model.tasks.values()))
    @rule(values=CREATES, data=st.data())
    def create_again(self, values, data):
        """Repeat a create, as a client does that got no answer, perhaps long ago."""
        task = data.draw(st.sampled_from([task for task in self.model.tasks.values() if task.key]))
        self._create(**{**values, "auth": task.auth, "key": task.key, "request": task.request})

    def _create(self, who, auth, key, request, ttl, on_crash, can_be_asked, max_attempts):
        process = self.processes[who]
        caller = {"capabilities": {"elicitation": {}} if can_be_asked else {}}
        create: Callable[[], Task] = lambda: process.store.create_task(  # noqa: E731
            auth=auth,
            name="report",
            request=request,
            ttl=ttl,
            idempotency_key=key,
            on_crash=on_crash,
            max_attempts=max_attempts,
            caller=caller,
        )
        if key is not None and auth is None:
            with pytest.raises(ValueError, match="auth context"):
                create()
            return
        known = None if key is None else self.model.keyed(auth, key)
        if known is not None:
            self.model.touch(known)
            if known.request != request:
                with pytest.raises(IdempotencyConflictError) as conflict:
                    create()
                assert conflict.value.task_id == known.task_id
                return
        task = create()
        if known is not None:
            assert task.existing
            self._check_task(known, task.model_copy(update={"existing": False}))
            return
        assert not task.existing
        expected = self.model.create(
            task.task_id,
            auth=auth,
            key=key,
            request=request,
            ttl=ttl,
            on_crash=on_crash,
            can_be_asked=on_crash is OnCrash.ASK and can_be_asked,
            max_attempts=max_attempts,
            holder=process,
        )
        self._check_task(expected, task)
        if on_crash is OnCrash.EXTERNAL:
            self.held.append(Held(expected, process.store.operator.handle(task.task_id), None, 1))
        else:
            self.held.append(Held(expected, process.store.handle(task), process, 1))

    @precondition(lambda self: self.model.tasks)
    @rule(who=st.integers(0, 1), data=st.data())
    def look(self, who, data):
        """Read everything there is about a task, which ends it if it is due."""
        self._look(self.processes[who].store, self._any_task(data))

    @precondition(lambda self: self.model.tasks)
    @rule(who=st.integers(0, 1), data=st.data(), by_operator=st.booleans(), auth=st.sampled_from(AUTHS))
    def cancel(self, who, data, by_operator, auth):
        task, store = self._any_task(data), self.processes[who].store
        if by_operator:
            cancelling = self._call(store.operator.cancel_task, task.task_id)
        else:
            cancelling = self._call(store.cancel_task, task.task_id, auth=auth)
        if self._unseen(task, cancelling, None if by_operator else auth, by_operator=by_operator):
            return
        self.model.touch(task)
        if task.is_live:
            self.model.cancel(task)
            self._check_task(task, cancelling)
        else:
            assert type(cancelling) is TaskFinishedError
            self._check_task(task, cancelling.task)

    @precondition(lambda self: self.model.tasks)
    @rule(who=st.integers(0, 1), data=st.data(), auth=st.sampled_from(AUTHS))
    def delete(self, who, data, auth):
        task, store = self._any_task(data), self.processes[who].store
        deleting = self._call(store.delete_task, task.task_id, auth=auth)
        if self._unseen(task, deleting, auth):
            return
        self.model.touch(task)
        if task.is_live:
            assert type(deleting) is NotFinishedError
        else:
            assert deleting is None
            task.deleted = True

    @precondition(lambda self: any(task.questions for task in self.model.tasks.values()))
    @rule(who=st.integers(0, 1), data=st.data(), auth=st.sampled_from(AUTHS), agrees=st.booleans(), own=st.booleans())
    def answer(self, who, data, auth, agrees, own):
        """Answer some of a task's questions, perhaps some that were answered, and one that was never asked."""
        asked = [task for task in self.model.tasks.values() if task.questions]
        task = data.draw(st.sampled_from(asked))
        keys = data.draw(st.lists(st.sampled_from([*task.questions, "never asked"]), unique=True, min_size=1))
        auth = task.auth if own else auth
        responses = {
            key: (RUN_AGAIN if agrees else {"action": "decline"})
            if key in task.questions and task.questions[key].asks_to_run_again
            else f"answer to {key}"
            for key in keys
        }
        answering = self._call(self.processes[who].store.answer_inputs, task.task_id, responses, auth=auth)
        if self._unseen(task, answering, auth):
            return
        self.model.answer(task, responses)
        self._check_task(task, answering)

    @rule(
        who=st.integers(0, 1),
        auth=st.sampled_from([ALICE, ALICE, *AUTHS]),
        status=st.sampled_from([None, None, None, *TaskStatus]),
        size=st.sampled_from([1, 1, 2, 100]),
        pages=st.integers(1, 5),
    )
    def list_tasks(self, who, auth, status, size, pages):
        """List what an auth context has; without one there is nothing to list."""
        listing = self._list_page(who, auth, status, size, None, None)
        for _ in range(pages - 1):
            if listing is not None:
                listing = self._list_page(who, auth, status, size, listing.cursor, listing.after)

    @precondition(lambda self: self.listings)
    @rule(who=st.integers(0, 1), data=st.data())
    def list_next_page(self, who, data):
        """Go on with a listing, whatever has changed since its page before."""
        listing = data.draw(st.sampled_from(self.listings))
        self._list_page(who, listing.auth, listing.status, listing.size, listing.cursor, listing.after)

    def _list_page(self, who, auth, status, size, cursor, after):
        page = self.processes[who].store.list_tasks(auth=auth, status=status, limit=size, cursor=cursor)
        expected, has_more = self.model.list_page(auth, status, size, after)
        assert [task.task_id for task in page.tasks] == [task.task_id for task in expected]
        for task, record in zip(expected, page.tasks, strict=True):
            self._check_task(task, record)
        assert (page.next_cursor is not None) == has_more
        if page.next_cursor is None:
            return None
        last = expected[-1]
        listing = Listing(auth, status, size, page.next_cursor, (last.created_at, last.task_id))
        self.listings = [*self.listings[-3:], listing]
        return listing

    @precondition(lambda self: self.model.tasks)
    @rule(who=st.integers(0, 1), data=st.data())
    def wait_at_once(self, who, data):
        """Come late: what was waited for has happened, or the time is up."""
        task, store = self._any_task(data), self.processes[who].store
        before = data.draw(st.sampled_from([None, 0, task.version]))
        waited = self._call(
            store.wait_for_task, task.task_id, auth=task.auth, since_version=before, timeout=timedelta(0)
        )
        if not self._unseen(task, waited, task.auth):
            self.model.touch(task)
            self._check_task(task, waited)

    @precondition(lambda self: self.model.tasks and len(self.waiting) < MOST_THREADS // 2)
    @rule(who=st.integers(0, 1), data=st.data())
    def wait_for_the_finish(self, who, data):
        task = self._any_task(data)
        process = self.processes[who]
        waiting = self.pool.submit(process.store.wait_for_task, task.task_id, auth=task.auth)
        if task.is_live and not self.model.is_due(task):
            self.waiting.append((task, process, waiting))
            return
        waited = self._call(waiting.result, LIMIT.total_seconds())
        if not self._unseen(task, waited, task.auth):
            self.model.touch(task)
            self._check_task(task, waited)

    # --- tools

    @precondition(lambda self: self.held)
    @rule(
        data=st.data(),
        value=st.integers(0, 5),
        total=st.sampled_from([None, 10]),
        message=st.sampled_from([None, "rendering", "uploading"]),
    )
    def progress(self, data, value, total, message):
        self._advance(timedelta(seconds=1))  # reports in quick succession are held back
        held = self._any_held(data)
        reporting = self._call(held.handle.progress, value, total, message)
        if not self._refused(held, reporting):
            self.model.progress(held.task, value, total, message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(0, 1))
    def complete(self, data, n):
        held = self._any_held(data)
        task, outcome = held.task, ("result", {"n": n})
        completing = self._call(held.handle.complete, {"n": n})
        self._finish(held, completing, TaskStatus.COMPLETED, outcome, task.message)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(0, 1))
    def fail(self, data, n):
        held = self._any_held(data)
        error = {"code": -32603, "message": f"broken {n}"}
        failing = self._call(held.handle.fail, f"broken {n}")
        self._finish(held, failing, TaskStatus.FAILED, ("error", error), f"broken {n}")

    def _finish(self, held, finishing, status, outcome, message):
        task = held.task
        self.model.touch(task)
        lost = self.model.is_lost(task, held.process, held.attempt)
        again = self.model.is_there(task) and not lost and task.outcome == outcome
        if not again:
            if self._refused(held, finishing):
                return
            kind = next(kind for kind in type(task.events[0][0]) if kind.value == status.value)
            self.model.finish(task, kind, status, message=message, outcome=outcome)
        self._check_task(task, finishing)

    @precondition(lambda self: self.held and sum(len(held.asking) for held in self.held) < MOST_THREADS // 2)
    @rule(data=st.data(), names=st.sets(st.sampled_from(["name", "sure"]), min_size=1))
    def ask(self, data, names):
        held = self._any_held(data)
        task = held.task
        self.model.touch(task)
        if self._why_refused(held) is not None:
            self._refused(held, self._call(held.handle.ask, dict.fromkeys(names, ASKS)))
            return
        asking = self.pool.submit(held.handle.ask, dict.fromkeys(names, ASKS))
        self.processes[0].store.wait_for_task(task.task_id, auth=task.auth, since_version=task.version, timeout=LIMIT)
        keys = self._new_keys(task)
        assert sorted(keys.values()) == sorted(names)
        self.model.ask(task, {key: Question(name) for key, name in keys.items()})
        held.asking.append((asking, keys))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), names=st.sets(st.sampled_from(["name", "sure"]), min_size=1))
    def park(self, data, names):
        held = self._any_held(data)
        parking = self._call(held.handle.park, dict.fromkeys(names, ASKS), state=sorted(names))
        if held.process is None:
            assert type(parking) is ValueError
        elif not self._refused(held, parking):
            keys = self._new_keys(held.task)
            self.model.park(held.task, {key: Question(name) for key, name in keys.items()})
            self._check_task(held.task, parking)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hand_over(self, data):
        held = self._any_held(data)
        handing = self._call(held.handle.hand_over)
        if held.process is None:
            assert type(handing) is ValueError
        elif not self._refused(held, handing):
            self.model.decide(held.task, ReasonCode.SERVER_STOPPED)
            self._check_task(held.task, handing)

    @precondition(lambda self: any(task.owner_kind is OwnerKind.QUEUED for task in self.model.tasks.values()))
    @rule(who=st.integers(0, 1))
    def claim(self, who):
        """Take the oldest queued task; only one that is not due may be run again."""
        process = self.processes[who]
        claim, expected = process.store.claim_task(["report"]), self.model.next_queued()
        assert (claim is None) == (expected is None)
        if claim is not None and expected is not None:
            self.model.claim(expected, process)
            self._check_task(expected, claim.task)
            assert claim.request == expected.request
            asked = {key for key, question in expected.questions.items() if question.answer is not None}
            assert set(claim.answers.values()) <= {expected.questions[key].answer for key in asked}
            self.held.append(Held(expected, process.store.handle(claim.task), process, expected.attempt))

    # --- time and upkeep

    @precondition(lambda self: self._kept())
    @rule(span=st.sampled_from(SPANS))
    def let_time_pass(self, span):
        self._advance(span)

    @precondition(lambda self: any(self.model.is_due(task) or self.model.is_expired(task) for task in self._kept()))
    @rule(who=st.integers(0, 1))
    def sweep(self, who):
        ended, deleted = self.model.sweep()
        report = self.processes[who].store.sweep()
        assert (report.ended, report.deleted) == (ended, deleted)

    @precondition(lambda self: self.losses < 3 and any(map(self.model.held_by, self.processes)))
    @rule(data=st.data(), dies=st.booleans())
    def lose_a_process(self, data, dies):
        """Stop a server in good order, or kill it: then its tools' words count until somebody recovers its tasks."""
        who = data.draw(st.sampled_from([n for n, each in enumerate(self.processes) if self.model.held_by(each)]))
        process = self.processes[who]
        self.losses += 1
        if dies:
            crash(process.store)
            process.is_dead = True
            self.dead.append(process)
        else:
            process.opened.close()
            for task in self.model.held_by(process):
                self.model.decide(task, ReasonCode.SERVER_STOPPED)
            self.held = [held for held in self.held if held.process is not process and self._hears(held, process)]
            self.waiting = [each for each in self.waiting if each[1] is not process]
        self.processes[who] = self._open()

    @precondition(lambda self: any(not process.is_recovered for process in self.dead))
    @rule(who=st.integers(0, 1))
    def recover(self, who):
        dead = [process for process in self.dead if not process.is_recovered]
        report = self.processes[who].store.recover()
        orphans = [task for process in dead for task in self.model.held_by(process)]
        for task in orphans:
            self.model.decide(task, ReasonCode.CRASH_RECOVERY)
        for process in dead:
            process.is_recovered = True
        assert sorted(report.recovered) == sorted(task.task_id for task in orphans)
        queued = {task.task_id for task in orphans if task.owner_kind is OwnerKind.QUEUED}
        assert set(report.queued) == queued
        assert report.dead_instances == len(dead)

    def _hears(self, held, process):
        """Drop the handles of a store that is closed: external tasks are taken in hand through any."""
        return held.process is not None or held.handle._loop is not process.store._loop

    # --- what is expected of a call

    def _any_task(self, data):
        return data.draw(st.sampled_from(list(self.model.tasks.values())[-6:]))

    def _kept(self):
        return [task for task in self.model.tasks.values() if not (task.deleted or task.swept)]

    def _any_held(self, data):
        return data.draw(st.sampled_from(self.held[-8:]))

    def _call(self, method, *args, **kwargs):
        try:
            return method(*args, **kwargs)
        except (TaskStoreError, ValueError) as error:
            return error

    def _unseen(self, task, answer, auth, *, by_operator=False):
        """Tell whether somebody must not find a task, and check that the answer says just that."""
        if self.model.is_there(task) and (by_operator or auth == task.auth):
            return False
        may_know = self.tombstones and not by_operator and auth is not None and auth == task.auth and not task.deleted
        assert type(answer) is (TaskExpiredError if may_know else TaskNotFoundError), answer
        return True

    def _why_refused(self, held):
        task = held.task
        if not self.model.is_there(task):
            return TaskNotFoundError
        if self.model.is_lost(task, held.process, held.attempt):
            return LeaseLostError
        return None if task.is_live else TaskFinishedError

    def _refused(self, held, answer):
        """Tell whether a handle's write must be refused, and check that it was, for the right reason."""
        self.model.touch(held.task)
        expected = self._why_refused(held)
        if expected is None:
            assert not isinstance(answer, Exception), answer
            return False
        assert type(answer) is expected, (answer, expected)
        if isinstance(answer, TaskFinishedError):
            self._check_task(held.task, answer.task)
        return True

    def _check_task(self, task, record):
        """Check a record that was read now; of a live one the ttl that is shown depends on the policy."""
        assert not isinstance(record, Exception), record
        assert (record.task_id, record.status, record.version) == (task.task_id, task.status, task.version)
        assert (record.attempt, record.crashes, record.owner_kind) == (task.attempt, task.crashes, task.owner_kind)
        assert (record.progress, record.progress_total) == (task.progress, task.total)
        assert record.cancel_requested == task.was_cancelled
        if task.reason is None and not (task.message or "").endswith(": "):
            assert record.status_message == task.message
        else:
            assert record.status_message.startswith(task.message)
        shown_ms = task.ttl_ms
        passed = self.clock.now() - task.created_at
        kept = task.is_live and not self.model.strict and task.owner_kind is OwnerKind.INSTANCE
        if kept and passed >= task.ttl_ms:
            shown_ms = passed + self.options.lease // timedelta(milliseconds=1)
        assert record.ttl == timedelta(milliseconds=shown_ms)
        assert record.expires_at == record.created_at + record.ttl
        assert (record.finished_at is None) == (task.finished_at is None)

    def _look(self, store, task):
        details = self._call(store.get_details, task.task_id, auth=task.auth)
        for auth in AUTHS:
            if auth != task.auth:
                self._unseen(task, self._call(store.get_details, task.task_id, auth=auth), auth)
        if self._unseen(task, details, task.auth):
            self._unseen(task, self._call(store.operator.get_task, task.task_id), None, by_operator=True)
            return
        self.model.touch(task)
        self._check_task(task, details.task)
        self._check_task(task, store.operator.get_task(task.task_id))
        asked = task.open_keys if task.status is TaskStatus.INPUT_REQUIRED else set()
        assert set(details.input_requests) == asked
        assert (details.outcome is None) == task.is_live
        if details.outcome is not None and task.reason is None:
            kind, value = task.outcome or ("result", None)
            assert getattr(details.outcome, kind) == value
        elif details.outcome is not None:
            assert details.outcome.error["data"]["reason"] == task.reason
        events = store.list_events(task.task_id, auth=task.auth)
        assert [(e.kind, e.from_status, e.to_status, e.attempt, e.reason) for e in events] == task.events

    # --- after each step

    def _advance(self, span):
        """Let time pass; a task that is due then and is waited for, a tool or a requestor may end at any moment."""
        self.clock.advance(span)
        waited_for = [*(held.task for held in self.held if held.asking), *(task for task, _, _ in self.waiting)]
        for task in waited_for:
            if self.model.is_due(task):
                self._look(self.processes[0].store, task)

    def _rows(self):
        def read(transaction):
            return {table: transaction.rows(statement, {}) for table, statement in READ_ROWS.items()}

        return self.processes[0].store._store._parts.database.read(read, snapshot=True).result()

    def _new_keys(self, task):
        rows = [row for row in self._rows()["inputs"] if row["task_id"] == task.task_id]
        rows.sort(key=lambda row: row["name"])
        return {row["key"]: row["name"] for row in rows if row["key"] not in task.questions}

    @invariant()
    def the_store_and_the_model_agree(self):
        """Compare every row with the model, and look once at each task that has changed, as its requestor would."""
        self._check_rows()
        changed = [task for task in self.model.tasks.values() if self.seen.get(task.task_id) != task.version]
        for task in changed:
            if not self.model.is_due(task):  # what is due is left for the rules to come across
                self.seen[task.task_id] = task.version
                self._look(self.processes[1].store, task)

    def _check_rows(self):
        rows = self._rows()
        stored = {row["task_id"]: row for row in rows["tasks"]}
        kept = {task.task_id: task for task in self._kept()}
        assert stored.keys() == kept.keys()
        for task_id, task in kept.items():
            row = stored[task_id]
            assert row["status"] == task.status
            assert row["version"] == task.version
            assert task.is_live or (row["caller"], row["parked"]) == (None, None)
            assert (row["owner_kind"], row["attempt"], row["crashes"]) == (task.owner_kind, task.attempt, task.crashes)
            assert (row["ttl_ms"], row["expires_at"]) == (task.ttl_ms, task.expires_at)
            assert (row["created_at"], row["finished_at"]) == (task.created_at, task.finished_at)
            events = sorted(
                (row for row in rows["events"] if row["task_id"] == task_id), key=lambda row: row["version"]
            )
            told = [(e["kind"], e["from_status"], e["to_status"], e["attempt"], e["reason"]) for e in events]
            assert told == task.events
            assert [event["from_status"] for event in events[1:]] == [event["to_status"] for event in events[:-1]]
            ends = [event for event in events if event["to_status"] not in ("working", "input_required")]
            assert len(ends) == (0 if task.is_live else 1)
            assert events[-1]["version"] <= row["version"]
            open_keys = {
                each["key"]
                for each in rows["inputs"]
                if each["task_id"] == task_id and each["answered_at"] is None and each["closed_at"] is None
            }
            assert open_keys == task.open_keys
        assert {row["task_id"] for row in (*rows["events"], *rows["inputs"])} <= kept.keys()

    def teardown(self):
        if not hasattr(self, "processes"):
            return
        try:
            for held in self.held:
                self._check_hearing(held)
            for task, _, waited in self.waiting:
                if not task.is_live and self.model.is_there(task):
                    assert waited.result(LIMIT.total_seconds()).status is task.status
        finally:
            for process in (*self.dead, *self.processes):
                process.opened.close()
            self.pool.shutdown()

    def _check_hearing(self, held):
        """A tool that asked hears the answers once all are there, or that there will be none."""
        for asking, keys in held.asking:
            questions = {key: held.task.questions[key] for key in keys}
            over = not held.task.is_live or self.model.is_lost(held.task, held.process, held.attempt)
            if not over and any(question.is_open for question in questions.values()):
                assert not asking.done()
                continue
            try:
                heard = asking.result(LIMIT.total_seconds())
            except (TaskFinishedError, LeaseLostError, TaskNotFoundError):
                assert over
            except DatabaseUnavailableError:
                assert held.process is None or held.process.is_dead
            else:
                assert heard == {question.name: question.answer for question in questions.values()}


def test_the_store_and_its_model_agree_whatever_is_called(database_url, monkeypatch):
    """Cases that nobody thought of: each rule of the store meets each other one, in any order."""
    StoreMachine.url, StoreMachine.ids = database_url, Repeatable()
    for module in (binding, handle):  # whose ids decide over the order of tasks of one instant
        monkeypatch.setattr(module, "secrets", StoreMachine.ids)
    machine = settings(drawn(40), stateful_step_count=50)
    run_state_machine_as_test(StoreMachine, settings=machine)
