"""TaskRunner: work that outlives its caller, and every way it can end."""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from pydantic import JsonValue

from taskstore import (
    AuthContext,
    Claim,
    DatabaseUnavailableError,
    OnCrash,
    Outcome,
    OwnerKind,
    Task,
    TaskHandle,
    TaskStatus,
    TaskStore,
)
from taskstore import runner as runner_module
from taskstore.database import Database
from taskstore.lanes import Unit
from taskstore.runner import TaskRunner, Work, WorkError, WorkParked, WorkResult

T = TypeVar("T")

ALICE = AuthContext(subject="alice")
AT_ONCE = timedelta(0)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[TaskStore]:
    async with TaskStore.open(database_url) as opened:
        yield opened


@pytest.fixture
async def runner(store: TaskStore) -> AsyncIterator[TaskRunner]:
    made = TaskRunner(store)
    yield made
    await made.close(AT_ONCE)


async def returns(handle: TaskHandle) -> WorkResult:
    return WorkResult({"pages": 10})


class Gate:
    """Work that says when it runs, and goes on when it is let."""

    def __init__(self) -> None:
        self.running, self.opened, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def __call__(self, handle: TaskHandle) -> WorkResult:
        self.running.set()
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return WorkResult("through")


class Stubborn(Gate):
    """Work that is told to stop and goes on."""

    async def __call__(self, handle: TaskHandle) -> WorkResult:
        self.running.set()
        while not self.opened.is_set():
            try:
                await self.opened.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
        return WorkResult("too late")


async def finished(store: TaskStore, task: Task) -> Task:
    return await store.wait_for_task(task.task_id, auth=ALICE)


async def error_of(store: TaskStore, task: Task) -> dict[str, Any]:
    await finished(store, task)
    outcome: Outcome = await store.get_outcome(task.task_id, auth=ALICE)
    assert isinstance(outcome.error, dict)
    return outcome.error


async def test_what_the_work_returns_completes_the_task(store: TaskStore, runner: TaskRunner) -> None:
    """The plain case."""
    task = await runner.start(returns, auth=ALICE, name="report", request={"name": "report"})

    assert (await finished(store, task)).status is TaskStatus.COMPLETED
    assert (await store.get_outcome(task.task_id, auth=ALICE)).result == {"pages": 10}


async def test_work_that_finishes_its_own_task_may_go_on(store: TaskStore, runner: TaskRunner) -> None:
    """It tells the client first and tidies up then; a cancellation would cut the tidying short."""
    gate, tidied = Gate(), asyncio.Event()

    async def work(handle: TaskHandle) -> WorkResult:
        await handle.complete({"pages": 10})
        await gate(handle)
        tidied.set()
        return WorkResult({"pages": 10})

    task = await finished(store, await runner.start(work, auth=ALICE))
    await gate.running.wait()
    gate.opened.set()
    await tidied.wait()

    assert not gate.cancelled.is_set()
    assert task.status is TaskStatus.COMPLETED


async def test_work_that_is_over_in_a_moment_costs_its_two_writes_and_no_read(
    store: TaskStore, runner: TaskRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most calls are short; looking for what other processes did to them would delay the answer to their clients."""
    reads: list[object] = []

    def read_soon(self: Database, unit: Unit[T], *, snapshot: bool = False) -> "asyncio.Future[T]":
        reads.append(unit)
        return read(self, unit, snapshot=snapshot)

    read, over = Database.read_soon, asyncio.Event()
    monkeypatch.setattr(Database, "read_soon", read_soon)

    async def work(handle: TaskHandle) -> WorkResult:
        asyncio.get_running_loop().call_soon(over.set)
        return WorkResult({"pages": 10})

    await runner.start(work, auth=ALICE)
    await over.wait()
    await runner.close()

    assert reads == []


async def test_a_reported_error_completes_the_task_too(store: TaskStore, runner: TaskRunner) -> None:
    """A tool that reports its own failure has returned a result."""

    async def work(handle: TaskHandle) -> WorkResult:
        return WorkResult({"isError": True}, is_error=True)

    task = await finished(store, await runner.start(work, auth=ALICE))

    assert (task.status, task.is_error) == (TaskStatus.COMPLETED, True)


async def test_the_work_outlives_the_call_that_started_it(store: TaskStore, runner: TaskRunner) -> None:
    """The response has gone out and the connection may be closed; the work goes on."""
    gate = Gate()
    task = await asyncio.create_task(runner.start(gate, auth=ALICE))
    await gate.running.wait()

    gate.opened.set()

    assert (await finished(store, task)).status is TaskStatus.COMPLETED


async def test_a_call_cancelled_while_creating_leaves_no_task_to_nobody(
    store: TaskStore, runner: TaskRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the row and the start of the work a client may go away; a row that nobody runs would never end."""
    create_task, created, go_on = store.create_task, asyncio.Event(), asyncio.Event()

    async def create_slowly(**keywords: Any) -> Task:
        task = await create_task(**keywords)
        created.set()
        await go_on.wait()
        return task

    monkeypatch.setattr(store, "create_task", create_slowly)
    call = asyncio.create_task(runner.start(returns, auth=ALICE))
    await created.wait()
    call.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await call

    (task,) = (await store.list_tasks(auth=ALICE)).tasks
    assert (await finished(store, task)).status is TaskStatus.COMPLETED


async def test_the_work_sees_the_callers_context(store: TaskStore, runner: TaskRunner) -> None:
    """Access token, trace and locale of the request are context variables."""
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")

    async def work(handle: TaskHandle) -> WorkResult:
        return WorkResult(who.get())

    who.set("alice")
    task = await runner.start(work, auth=ALICE)
    who.set("bob")

    await finished(store, task)
    assert (await store.get_outcome(task.task_id, auth=ALICE)).result == "alice"


async def test_an_unexpected_exception_keeps_its_text_in_the_log(
    store: TaskStore, runner: TaskRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """Exceptions quote file names, queries and secrets; clients must not read them, and operators must."""

    async def work(handle: TaskHandle) -> WorkResult:
        raise RuntimeError("password=hunter2")

    error = await error_of(store, await runner.start(work, auth=ALICE, name="report"))

    assert error == {"code": -32603, "message": "Error executing tool report"}
    assert "password=hunter2" in caplog.text
    assert "Traceback" in caplog.text


async def test_a_json_rpc_error_fails_the_task_as_it_is(store: TaskStore, runner: TaskRunner) -> None:
    """The client must see the code, message and data that the call would have answered."""

    async def work(handle: TaskHandle) -> WorkResult:
        raise WorkError(-32000, "Quota exceeded", {"limit": 3})

    error = await error_of(store, await runner.start(work, auth=ALICE))

    assert error == {"code": -32000, "message": "Quota exceeded", "data": {"limit": 3}}


async def test_a_result_that_cannot_be_stored_fails_the_task_and_names_the_place(
    store: TaskStore, runner: TaskRunner
) -> None:
    """Left alone, the task would stay working for ever, and nobody would know why."""

    async def work(handle: TaskHandle) -> WorkResult:
        return WorkResult({"rows": [1.0, float("nan")]})

    error = await error_of(store, await runner.start(work, auth=ALICE, name="report"))

    assert error["code"] == -32603
    assert "rows[1]" in error["message"]


@pytest.mark.parametrize(
    "outcome",
    [
        lambda: None,
        lambda: {"pages": 10},
        lambda: WorkResult({}, is_error="no"),  # type: ignore[arg-type]
        lambda: WorkError("-32000", "no code"),  # type: ignore[arg-type]
        lambda: WorkError(-32000, b"no text"),  # type: ignore[arg-type]
    ],
)
async def test_work_that_ends_in_something_of_a_wrong_type_fails_its_task(
    store: TaskStore, runner: TaskRunner, outcome: Any
) -> None:
    """An error in the runner's own last write would leave the task 'working', and its client waiting."""

    async def work(handle: TaskHandle) -> WorkResult:
        made: WorkResult = outcome()
        return made

    task = await runner.start(work, auth=ALICE, name="report")

    assert (await finished(store, task)).status_message == "Error executing tool report"


async def test_an_error_that_cannot_be_stored_still_fails_the_task(store: TaskStore, runner: TaskRunner) -> None:
    """The data of an error comes from the tool as well."""

    async def work(handle: TaskHandle) -> WorkResult:
        raise WorkError(-32000, "odd \x00 text", {"value": float("inf")})

    error = await error_of(store, await runner.start(work, auth=ALICE, name="report"))

    assert error["code"] == -32603
    assert "report" in error["message"]


async def test_a_cancellation_reaches_the_work(store: TaskStore, runner: TaskRunner) -> None:
    """Cancelled work must not go on spending money."""
    gate = Gate()
    task = await runner.start(gate, auth=ALICE)
    await gate.running.wait()

    await store.cancel_task(task.task_id, auth=ALICE)

    await gate.cancelled.wait()
    assert (await finished(store, task)).status is TaskStatus.CANCELLED


async def test_a_cancellation_through_another_process_reaches_the_work(
    store: TaskStore, runner: TaskRunner, database_url: str
) -> None:
    """Behind a load balancer the cancel request rarely arrives at the process that runs the work."""
    gate = Gate()
    task = await runner.start(gate, auth=ALICE)
    await gate.running.wait()

    async with TaskStore.open(database_url) as elsewhere:
        await elsewhere.cancel_task(task.task_id, auth=ALICE)

    await gate.cancelled.wait()


async def test_work_that_ignores_its_cancellation_is_logged_and_its_result_dropped(
    store: TaskStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing can force it to stop; the operator should know that it still runs."""
    runner, stubborn = TaskRunner(store, cancel_grace=AT_ONCE), Stubborn()
    task = await runner.start(stubborn, auth=ALICE, name="report")
    await stubborn.running.wait()

    await store.cancel_task(task.task_id, auth=ALICE)
    await stubborn.cancelled.wait()
    await runner.close(AT_ONCE)
    stubborn.opened.set()

    assert "did not stop" in caplog.text
    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.CANCELLED


async def test_a_stray_cancellation_inside_the_work_fails_the_task(store: TaskStore, runner: TaskRunner) -> None:
    """A library that cancels one of its own futures must not leave the task working for ever."""

    async def work(handle: TaskHandle) -> WorkResult:
        raise asyncio.CancelledError

    error = await error_of(store, await runner.start(work, auth=ALICE, name="report"))

    assert error["message"] == "Error executing tool report"


async def test_the_last_write_waits_for_the_database(
    store: TaskStore, runner: TaskRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of work must not be lost to a minute without database."""
    monkeypatch.setattr(runner_module, "_FIRST_RETRY", AT_ONCE)
    complete, outages = TaskHandle.complete, [DatabaseUnavailableError("away"), DatabaseUnavailableError("away")]

    async def complete_when_back(handle: TaskHandle, result: JsonValue, *, is_error: bool = False) -> Task:
        if outages:
            raise outages.pop()
        return await complete(handle, result, is_error=is_error)

    monkeypatch.setattr(TaskHandle, "complete", complete_when_back)

    task = await runner.start(returns, auth=ALICE)

    assert (await finished(store, task)).status is TaskStatus.COMPLETED


async def test_a_task_finished_by_somebody_else_is_logged_and_nothing_more(
    store: TaskStore, runner: TaskRunner, caplog: pytest.LogCaptureFixture
) -> None:
    """Losing the race for the last write is normal, and no error of the server."""
    caplog.set_level(logging.INFO, logger="taskstore")

    async def work(handle: TaskHandle) -> WorkResult:
        await handle.fail("decided already")
        return WorkResult("too late")

    task = await runner.start(work, auth=ALICE, name="report")
    await finished(store, task)
    await runner.close(timedelta(seconds=30))

    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "report" in caplog.text


async def test_close_waits_for_running_work(store: TaskStore) -> None:
    """A deployment should not cost the tasks that are about to finish."""
    runner, gate = TaskRunner(store), Gate()
    task = await runner.start(gate, auth=ALICE)
    await gate.running.wait()

    closing = asyncio.create_task(runner.close(timedelta(seconds=30)))
    gate.opened.set()
    await closing

    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.COMPLETED


@pytest.mark.parametrize("kind", [Gate, Stubborn])
async def test_close_fails_what_does_not_finish_in_time(store: TaskStore, kind: type[Gate]) -> None:
    """An honest answer now is better than a crash verdict after the restart."""
    runner, gate = TaskRunner(store, cancel_grace=AT_ONCE), kind()
    task = await runner.start(gate, auth=ALICE)
    await gate.running.wait()

    await runner.close(AT_ONCE)
    gate.opened.set()

    assert gate.cancelled.is_set()
    error = await error_of(store, task)
    assert error["data"]["reason"] == "SERVER_STOPPED"


async def test_work_that_finishes_when_told_to_stop_keeps_its_result(store: TaskStore) -> None:
    """A tool that catches its cancellation and returns what it has did finish."""

    class Graceful(Gate):
        async def __call__(self, handle: TaskHandle) -> WorkResult:
            try:
                return await super().__call__(handle)
            except asyncio.CancelledError:
                return WorkResult("half a report")

    runner, graceful = TaskRunner(store), Graceful()
    task = await runner.start(graceful, auth=ALICE)
    await graceful.running.wait()

    await runner.close(AT_ONCE)

    assert (await store.get_outcome(task.task_id, auth=ALICE)).result == "half a report"


async def test_a_closed_runner_takes_no_more_work(store: TaskStore) -> None:
    """Work started now would die with the process."""
    runner = TaskRunner(store)
    await runner.close()

    with pytest.raises(RuntimeError, match="stopping"):
        await runner.start(returns, auth=ALICE)

    assert (await store.list_tasks(auth=ALICE)).tasks == ()


class Again:
    """Runs tasks again as the work that a test gives it."""

    def __init__(self, work: Work, *names: str) -> None:
        self._work, self._names = work, names or ("book",)
        self.claims: list[Claim] = []

    async def names(self) -> tuple[str, ...]:
        return self._names

    def work(self, claim: Claim) -> Work:
        self.claims.append(claim)
        return self._work


QUESTION: JsonValue = {"method": "elicitation/create", "params": {"message": "Your name?"}}


async def parks(handle: TaskHandle) -> WorkParked:
    return WorkParked({"name": QUESTION}, state="asked")


async def answer(store: TaskStore, task: Task, response: JsonValue) -> None:
    await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
    details = await store.get_details(task.task_id, auth=ALICE)
    await store.answer_inputs(task.task_id, dict.fromkeys(details.input_requests, response), auth=ALICE)


async def test_work_that_parks_its_task_is_run_again_with_the_answers(store: TaskStore) -> None:
    """No process waits while a person thinks."""
    again = Again(returns)
    runner = TaskRunner(store, rerun=again)
    task = await runner.start(parks, auth=ALICE, name="book", request={"to": "Rome"}, caller={"who": "a client"})

    await answer(store, task, "Ada")

    assert (await finished(store, task)).status is TaskStatus.COMPLETED
    (claim,) = again.claims
    assert (claim.request, claim.caller, claim.state) == ({"to": "Rome"}, {"who": "a client"}, "asked")
    assert claim.answers == {"name": "Ada"}
    await runner.close(AT_ONCE)


async def test_a_task_to_be_retried_goes_on_in_the_next_server(database_url: str) -> None:
    """A server that is stopped for a new version must not fail what may simply run again."""
    async with TaskStore.open(database_url) as store:
        stopped, gate = TaskRunner(store), Gate()
        task = await stopped.start(gate, auth=ALICE, name="book", on_crash=OnCrash.RETRY)
        await gate.running.wait()
        await stopped.close(AT_ONCE)
        waiting = await store.get_task(task.task_id, auth=ALICE)

    async with TaskStore.open(database_url) as store:
        runner = TaskRunner(store, rerun=Again(returns))
        done = await finished(store, task)
        await runner.close(AT_ONCE)

    assert (waiting.status, waiting.owner_kind) == (TaskStatus.WORKING, OwnerKind.QUEUED)
    assert (done.status, done.crashes) == (TaskStatus.COMPLETED, 0)


async def test_no_more_tasks_run_again_at_once_than_allowed(store: TaskStore) -> None:
    """A crash leaves thousands of them; run all at once, they would bring the server down again."""
    gate, again = Gate(), Again(returns)
    tasks = [await store.create_task(auth=ALICE, name="book", on_crash=OnCrash.RETRY) for _ in range(4)]
    for task in tasks:
        await store.handle(task).hand_over()
    held = Again(gate)
    runner = TaskRunner(store, rerun=held, max_reruns=1)
    await gate.running.wait()

    other = TaskRunner(store, rerun=again)
    for task in tasks[1:]:
        await finished(store, task)
    gate.opened.set()
    await finished(store, tasks[0])

    assert [claim.task.task_id for claim in held.claims] == [tasks[0].task_id]
    for each in (runner, other):
        await each.close(AT_ONCE)


async def test_a_rerun_that_cannot_be_made_fails_its_task_and_no_other(store: TaskStore) -> None:
    """A tool that was registered a moment ago may be gone."""

    class Broken(Again):
        def work(self, claim: Claim) -> Work:
            raise KeyError("book")

    task = await store.create_task(auth=ALICE, name="book", on_crash=OnCrash.RETRY)
    await store.handle(task).hand_over()

    runner = TaskRunner(store, rerun=Broken(returns))

    assert (await error_of(store, task))["message"] == "Error executing tool book"
    await runner.close(AT_ONCE)


async def test_a_runner_takes_no_external_task(store: TaskStore, runner: TaskRunner) -> None:
    with pytest.raises(ValueError, match="external"):
        await runner.start(returns, auth=ALICE, on_crash=OnCrash.EXTERNAL)


async def test_questions_that_are_none_fail_the_task(store: TaskStore, runner: TaskRunner) -> None:
    """Parked without a question, it would wait for ever."""

    async def work(handle: TaskHandle) -> WorkParked:
        return WorkParked({})

    task = await runner.start(work, auth=ALICE, name="book")

    assert (await error_of(store, task))["message"] == "Error executing tool book"
