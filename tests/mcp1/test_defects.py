"""What is wrong with the SDK's own task store and with what stands around it, and right with ours.

Each defect is a scenario that holds what a user expects. One test sees it fail on the SDK's own store, so that nobody
keeps a scenario that proves nothing; the other sees it hold on ours, on each database.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import anyio
import pytest
from mcp import types
from mcp.server.experimental.task_context import ServerTaskContext
from mcp.server.experimental.task_support import TaskSupport
from mcp.shared.exceptions import McpError
from mcp.shared.experimental.tasks import helpers, in_memory_task_store
from pydantic import ValidationError
from sqlalchemy import text

from taskstore import StoreOptions
from taskstore.adapters.mcp_v1 import enable_durable_tasks
from taskstore.operations import Limits
from taskstore.testing import ManualClock

AT_ONCE = timedelta(0)


@dataclass
class Subject:
    """A server whose tasks are the SDK's or ours, and what a scenario may do with it.

    Attributes:
        patience: How long a scenario waits for what has to come: for the SDK, where it does not, not long.
        leftovers: Counts what is still held in memory for tasks.
        disable: Makes every access to the stored tasks fail.
    """

    reports: Any
    connect: Callable[..., AbstractAsyncContextManager[Any]]
    support: TaskSupport
    clock: ManualClock
    patience: float
    leftovers: Callable[[], int]
    disable: Callable[[], None]

    def connected(self, **callbacks: Any) -> AbstractAsyncContextManager[Any]:
        return self.connect(self.reports.server, **callbacks)

    async def status(self, task_id: str) -> str | None:
        task = await self.support.store.get_task(task_id)
        return None if task is None else task.status

    async def until_status(self, task_id: str, *wanted: str) -> None:
        with anyio.fail_after(self.patience):
            while await self.status(task_id) not in wanted:  # noqa: ASYNC110  the SDK's store has no better wait
                await anyio.sleep(0.01)


Scenario = Callable[[Subject], Awaitable[None]]


@dataclass(frozen=True)
class Defect:
    """A scenario, and how it fails on the SDK's own store."""

    name: str
    scenario: Scenario
    fails: type[BaseException] | tuple[type[BaseException], ...]
    match: str


DEFECTS: list[Defect] = []


def defect(
    name: str, fails: type[BaseException] | tuple[type[BaseException], ...] = AssertionError, match: str = ""
) -> Callable[[Scenario], Scenario]:
    def add(scenario: Scenario) -> Scenario:
        DEFECTS.append(Defect(name, scenario, fails, match))
        return scenario

    return add


each_defect = pytest.mark.parametrize("each", DEFECTS, ids=lambda each: each.name)


# --- the scenarios


@defect("D1-ttl-on-the-wire", ValidationError, "task.ttl")
async def a_task_without_requested_ttl_has_one_on_the_wire(subject: Subject) -> None:
    """The SDK leaves null out, and its own client refuses a task without ttl."""
    async with subject.connected() as peer:
        created = await peer.create("quick")
        polled = await peer.get(created.task.taskId)

    assert created.task.ttl == polled.ttl == 3_600_000


@defect("D2-all-waiters", TimeoutError)
async def two_waiters_both_get_the_result(subject: Subject) -> None:
    """With one event a task, the newest waiter takes the wake-up of all others."""
    async with subject.connected() as peer:
        task_id = await peer.start("wait", ttl=60_000)
        await subject.reports.running.wait()
        got: list[str] = []

        async def wait() -> None:
            got.append((await peer.result(task_id)).content[0].text)

        with anyio.fail_after(subject.patience):
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(wait)
                waiting.start_soon(wait)
                await anyio.wait_all_tasks_blocked()
                subject.reports.opened.set()

    assert got == ["through", "through"]


@defect("D2b-lost-wake-up", TimeoutError)
async def a_change_before_the_wait_is_not_waited_for(subject: Subject) -> None:
    """Between reading the task and waiting for it, it may finish."""
    store = subject.support.store
    task = await store.create_task(types.TaskMetadata(ttl=60_000))
    await store.store_result(task.taskId, types.CallToolResult(content=[]))
    await store.update_task(task.taskId, status="completed")

    with anyio.fail_after(subject.patience):
        await store.wait_for_update(task.taskId)


async def end_late(subject: Subject, peer: Any, task_id: str, doom: Callable[[], Awaitable[Any]]) -> None:
    """Let work end after its task did, and see that the session lives on."""
    await subject.reports.running.wait()
    await doom()
    subject.reports.opened.set()
    with anyio.fail_after(subject.patience):
        await subject.reports.stopped.wait()
        for _ in range(3):
            await anyio.wait_all_tasks_blocked()
            await peer.session.send_ping()


@defect("D3-late-write", (McpError, TimeoutError, BaseExceptionGroup))
async def work_that_ends_after_its_cancellation_harms_nobody(subject: Subject) -> None:
    """An exception of the store leaves the task group there, and takes the whole session with it."""

    async def ignore_cancellation(task: ServerTaskContext) -> types.Result:
        subject.reports.running.set()
        while not subject.reports.opened.is_set():
            try:
                await subject.reports.opened.wait()
            except asyncio.CancelledError:
                continue
        subject.reports.stopped.set()
        await task.complete(types.CallToolResult(content=[]))
        return types.CallToolResult(content=[])

    subject.reports.works["stubborn"] = ignore_cancellation
    async with subject.connected() as peer:
        task_id = await peer.start("stubborn", ttl=60_000)
        await end_late(subject, peer, task_id, lambda: peer.cancel(task_id))
        assert (await peer.get(task_id)).status == "cancelled"


@defect("D3b-ttl-of-live-work", (McpError, TimeoutError, BaseExceptionGroup))
async def work_that_outlives_its_ttl_harms_nobody(subject: Subject) -> None:
    """The task was deleted under the work there."""
    async with subject.connected() as peer:
        task_id = await peer.start("wait", ttl=200)

        async def expire() -> None:
            subject.clock.advance(timedelta(milliseconds=600))
            await peer.page()

        await end_late(subject, peer, task_id, expire)
        assert (await peer.result(task_id)).content[0].text == "through"


@defect("D4-replayed-error", ValidationError, "content")
async def the_result_of_a_failed_task_is_its_error(subject: Subject) -> None:
    """Same code, message and data as the call would have had."""

    async def fail(task: ServerTaskContext) -> types.Result:
        raise McpError(types.ErrorData(code=4711, message="no paper", data={"tray": 2}))

    subject.reports.works["fail"] = fail
    async with subject.connected() as peer:
        task_id = await peer.start("fail", ttl=60_000)
        with pytest.raises(McpError) as replayed:
            await peer.result(task_id)

    assert replayed.value.error == types.ErrorData(code=4711, message="no paper", data={"tray": 2})


@defect("D5-expiry-from-creation", AssertionError, "None")
async def a_task_is_gone_when_the_wire_said_so(subject: Subject) -> None:
    """A client reckons with createdAt + ttl; there the finish started the lifetime anew."""
    store = subject.support.store
    created = await store.create_task(types.TaskMetadata(ttl=300))
    subject.clock.advance(timedelta(milliseconds=200))
    await store.store_result(created.taskId, types.CallToolResult(content=[]))
    finished = await store.update_task(created.taskId, status="completed")
    assert finished.ttl is not None

    subject.clock.advance(finished.createdAt + timedelta(milliseconds=finished.ttl) - instant(subject.clock))

    assert await store.get_task(created.taskId) is None
    assert await store.get_result(created.taskId) is None


@defect("D5b-negative-ttl", AssertionError, "not refused")
async def a_negative_ttl_is_refused(subject: Subject) -> None:
    """It was taken there, and the task was gone before its answer arrived."""
    async with subject.connected() as peer:
        code = await code_of(peer.create("quick", ttl=-1))

    assert code == -32602


@defect("D6-cursor-with-an-id", AssertionError, "cursor")
async def a_cursor_tells_no_id_and_outlives_the_row_it_points_at(subject: Subject) -> None:
    """An id opens an unbound task, and the row may go between two pages."""
    store = subject.support.store
    created = [(await store.create_task(types.TaskMetadata(ttl=60_000))).taskId for _ in range(25)]
    page, cursor = await store.list_tasks()
    assert cursor not in created, "the cursor is an id"
    await store.store_result(page[-1].taskId, types.CallToolResult(content=[]))
    await store.delete_task(page[-1].taskId)

    seen = [task.taskId for task in page]
    while cursor is not None:
        page, cursor = await store.list_tasks(cursor)
        seen += [task.taskId for task in page]

    assert sorted(seen) == sorted(created)


@defect("D6b-bad-cursor", AssertionError, "not refused")
async def a_bad_cursor_is_refused(subject: Subject) -> None:
    """It was ignored there without a word, and the client got the first page again and again."""
    async with subject.connected() as peer:
        code = await code_of(peer.page("nonsense"))

    assert code == -32602


@defect("D6c-pages", AssertionError, "whole list")
async def a_list_has_pages(subject: Subject) -> None:
    """One answer with everything grows without bound."""
    async with subject.connected() as peer:
        created = [await peer.start("quick", ttl=60_000) for _ in range(12)]
        pages = [await peer.page()]
        assert pages[0].nextCursor is not None, "the whole list came at once"
        while pages[-1].nextCursor is not None:
            pages.append(await peer.page(pages[-1].nextCursor))

    assert sorted(task.taskId for page in pages for task in page.tasks) == sorted(created)


@defect("D7-left-in-memory", AssertionError, "left")
async def nothing_is_kept_in_memory_for_finished_tasks(subject: Subject) -> None:
    """A server runs for months."""
    async with subject.connected() as peer:
        for _ in range(5):
            await peer.result(await peer.start("quick", ttl=60_000))
    with anyio.move_on_after(subject.patience):
        while subject.leftovers():  # noqa: ASYNC110  memory tells nobody
            await anyio.sleep(0.01)

    assert subject.leftovers() == 0, "left in memory"


@defect("D8-principal-not-session", McpError, "not found")
async def a_task_is_found_after_a_reconnect(subject: Subject) -> None:
    """Connections break in the minutes that a task takes."""
    async with subject.connected() as peer:
        task_id = await peer.start("quick", ttl=60_000)
        before = await peer.result(task_id)
    async with subject.connected() as later:
        after = await later.result(task_id)
        listed = (await later.page()).tasks

    assert after == before
    assert [task.taskId for task in listed] == [task_id]


@defect("D9-other-sessions", ValidationError, "task")
async def the_end_of_one_session_leaves_the_others_able_to_work(subject: Subject) -> None:
    """There the newest session owned what all of them ran in."""
    async with subject.connected() as staying:
        async with subject.connected() as leaving:
            await leaving.session.send_ping()
        task_id = await staying.start("quick", ttl=60_000)
        assert (await staying.result(task_id)).content[0].text == "done"


@defect("D10-work-outlives-the-session", TimeoutError)
async def the_work_goes_on_when_its_session_closes(subject: Subject) -> None:
    """It was stopped there, and the task stayed working for ever."""
    async with subject.connected() as peer:
        task_id = await peer.start("wait", ttl=60_000)
        await subject.reports.running.wait()
    subject.reports.opened.set()

    await subject.until_status(task_id, "completed")


@defect("D11-cancel-reaches-the-work", TimeoutError)
async def the_work_hears_of_its_cancellation(subject: Subject) -> None:
    """The record said cancelled there, and the work went on to its end."""
    told = asyncio.Event()

    async def listen(task: ServerTaskContext) -> types.Result:
        subject.reports.running.set()
        try:
            while not task.is_cancelled:  # noqa: ASYNC110  what the SDK offers is a flag
                await anyio.sleep(0.01)
        finally:
            if task.is_cancelled:
                told.set()
        return types.CallToolResult(content=[])

    subject.reports.works["listen"] = listen
    async with subject.connected() as peer:
        task_id = await peer.start("listen", ttl=60_000)
        await subject.reports.running.wait()
        await peer.cancel(task_id)
        with anyio.fail_after(subject.patience):
            await told.wait()


@defect("D12-mode-mismatch", AssertionError, "not refused")
async def a_required_tool_called_plainly_is_a_protocol_error(subject: Subject) -> None:
    """The decorator made a text of it there, which a model takes for the tool's answer."""
    async with subject.connected() as peer:
        code = await code_of(peer.session.call_tool("required", {}))

    assert code == -32601


@defect("D13-progress-of-a-task", AssertionError, "failed")
async def progress_carries_the_token_and_the_mark_of_the_task(subject: Subject) -> None:
    """Whoever reported progress there had to do it past the task, without its mark."""

    async def report(task: Any) -> types.Result:
        await task.report_progress(3, 10, "rendering")
        return types.CallToolResult(content=[])

    subject.reports.works["report"] = report
    async with subject.connected() as peer:
        task_id = await peer.start("report", token="token-7", ttl=60_000)
        await subject.until_status(task_id, "completed", "failed")
        assert await subject.status(task_id) == "completed"

        def progress() -> list[types.ProgressNotification]:
            return [note.root for note in peer.notified if isinstance(note.root, types.ProgressNotification)]

        await peer.until(lambda _: bool(progress()), subject.patience)

    (said,) = (each.params.model_dump(by_alias=True, exclude_none=True) for each in progress())
    assert said == {
        "progressToken": "token-7",
        "progress": 3,
        "total": 10,
        "message": "rendering",
        "_meta": {"io.modelcontextprotocol/related-task": {"taskId": task_id}},
    }


@defect("D14-error-code", AssertionError, "== 0")
async def a_failure_of_the_store_has_a_code_of_the_protocol(subject: Subject) -> None:
    """A code 0 is none of JSON-RPC, and clients cannot tell what it means."""
    async with subject.connected() as peer:
        task_id = await peer.start("quick", ttl=60_000)
        await subject.until_status(task_id, "completed")
        subject.disable()
        code = await code_of(peer.get(task_id))

    assert code != 0, f"code == {code}"
    assert code == -32603


@defect("D15-tool-error-is-failed", AssertionError, "failed")
async def a_tool_error_is_a_failed_task(subject: Subject) -> None:
    """MCP 2025-11-25: a result with isError belongs to a failed task, and is its result all the same."""

    async def report_error(task: ServerTaskContext) -> types.Result:
        return types.CallToolResult(content=[types.TextContent(type="text", text="no paper")], isError=True)

    subject.reports.works["report_error"] = report_error
    async with subject.connected() as peer:
        task_id = await peer.start("report_error", ttl=60_000)
        result = await peer.result(task_id)
        status = (await peer.get(task_id)).status

    assert result.isError
    assert result.content[0].text == "no paper"
    assert status == "failed"


# --- the two runs of each


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> ManualClock:
    """Also the time of the SDK's own store, which asks the system for it."""
    clock = ManualClock()

    class Now(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return instant(clock)

    monkeypatch.setattr(in_memory_task_store, "datetime", Now)
    monkeypatch.setattr(helpers, "datetime", Now)
    return clock


@pytest.fixture
def sdk(reports: Any, connect: Any, clock: ManualClock) -> Subject:
    """The SDK as it comes."""
    support = reports.server.experimental.enable_tasks()
    store, queue = support.store, support.queue

    def disable() -> None:
        store._tasks = None

    return Subject(
        reports,
        connect,
        support,
        clock,
        patience=1,
        leftovers=lambda: len(store._update_events) + len(queue._queues) + len(queue._events),
        disable=disable,
    )


@pytest.fixture
async def ours(reports: Any, connect: Any, clock: ManualClock, database_url: str) -> AsyncIterator[Subject]:
    """The same server, its tasks made durable."""
    options = StoreOptions(clock=clock, limits=Limits(page_size=5), upkeep=False)
    async with enable_durable_tasks(reports.server, database_url, options=options, drain=AT_ONCE) as tasks:
        parts, table, elsewhere = tasks.store._parts, "taskstore_tasks", "taskstore_lost"
        renamed: list[str] = []

        def rename(old: str, new: str) -> None:
            statement = text(f"ALTER TABLE {old} RENAME TO {new}")
            parts.database.write(lambda transaction: transaction.execute(statement, {})).result()
            renamed.append(new)

        yield Subject(
            reports,
            connect,
            reports.server.experimental.task_support,
            clock,
            patience=30,
            leftovers=lambda: len(parts.held) + len(parts.handles) + len(parts.waiting._waiters),
            disable=lambda: rename(table, elsewhere),
        )
        if renamed:
            rename(elsewhere, table)


@each_defect
async def test_the_sdks_own_store_has_the_defect(each: Defect, sdk: Subject) -> None:
    """A scenario that held there as well would prove nothing here."""
    with pytest.raises(BaseException) as failure:  # noqa: PT011  what it is comes wrapped in the groups of task groups
        await each.scenario(sdk)

    cause = failure.value
    while isinstance(cause, BaseExceptionGroup) and not isinstance(cause, each.fails):
        (cause,) = cause.exceptions
    assert isinstance(cause, each.fails)
    assert each.match in str(cause)


@each_defect
async def test_ours_has_not(each: Defect, ours: Subject) -> None:
    """What users expect, on each database."""
    await each.scenario(ours)


def instant(clock: ManualClock) -> datetime:
    return datetime.fromtimestamp(clock.now() / 1000, UTC)


async def code_of(request: Awaitable[Any]) -> int:
    """Return the code of the JSON-RPC error that a request is answered with."""
    try:
        answer = await request
    except McpError as error:
        return error.error.code
    raise AssertionError(f"not refused: {answer!r}")
