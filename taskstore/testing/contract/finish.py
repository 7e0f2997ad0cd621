"""Progress and outcomes: what a handle may write, and what no handle can undo."""

import asyncio
import itertools
from datetime import timedelta

import pytest
from pydantic import JsonValue

from taskstore import (
    EventKind,
    LeaseLostError,
    NotFinishedError,
    PayloadError,
    Task,
    TaskFinishedError,
    TaskHandle,
    TaskNotFoundError,
    TaskStatus,
    TaskStore,
)
from taskstore.testing.clock import ManualClock
from taskstore.testing.protocols import ALICE, Finish, OpenStore

FINISHES = ("complete", "fail", "cancel")


async def finish_by(store: TaskStore, handle: TaskHandle, how: str) -> Task:
    """End a task in one of the three ways; distinct outcomes, so that none repeats another."""
    if how == "complete":
        return await handle.complete({"how": how})
    if how == "fail":
        return await handle.fail("it broke")
    return await store.cancel_task(handle.task_id, auth=ALICE)


class FinishContract:
    """Progress and outcomes: what a handle may write, and what no handle can undo."""

    async def test_result_and_status_are_one_write(self, store: TaskStore, peer: TaskStore, clock: ManualClock) -> None:
        """Between the two a crash would leave a result without a status, or a status without a result."""
        task = await store.create_task(auth=ALICE)
        clock.advance(timedelta(seconds=5))

        done = await store.handle(task).complete({"pages": 10})

        details = await peer.get_details(task.task_id, auth=ALICE)
        assert details.task == done
        assert (done.status, done.is_error) == (TaskStatus.COMPLETED, False)
        assert done.finished_at == done.last_updated_at == task.created_at + timedelta(seconds=5)
        assert details.outcome is not None
        assert details.outcome.result == {"pages": 10}
        assert await peer.get_outcome(task.task_id, auth=ALICE) == details.outcome

    async def test_a_tool_that_reports_an_error_of_its_own_is_completed_with_it(self, store: TaskStore) -> None:
        """The protocol's generations name it differently, so the row holds the neutral fact."""
        task = await store.create_task(auth=ALICE)

        done = await store.handle(task).complete({"content": []}, is_error=True)

        assert (done.status, done.is_error) == (TaskStatus.COMPLETED, True)
        assert (await store.get_outcome(task.task_id, auth=ALICE)).is_error

    async def test_a_failure_keeps_code_message_and_data(self, store: TaskStore) -> None:
        """tasks/result must replay the same JSON-RPC error."""
        task = await store.create_task(auth=ALICE)

        failed = await store.handle(task).fail("no such city", code=-32602, data={"city": "Atlantis"})

        outcome = await store.get_outcome(task.task_id, auth=ALICE)
        assert (failed.status, failed.status_message) == (TaskStatus.FAILED, "no such city")
        assert outcome.error == {"code": -32602, "message": "no such city", "data": {"city": "Atlantis"}}
        assert outcome.result is None

    @pytest.mark.parametrize(("first", "second"), list(itertools.product(FINISHES, repeat=2)))
    async def test_a_finished_task_stays_as_it_is(
        self, store: TaskStore, clock: ManualClock, first: str, second: str
    ) -> None:
        """The first terminal write wins; a later one is refused and shown the record that stands.

        Case 1, modelcontextprotocol/python-sdk PR#3003: a cancel rewrote a task that was already finished.
        """
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await finish_by(store, handle, first)
        before = await store.get_details(task.task_id, auth=ALICE)
        clock.advance(timedelta(seconds=1))

        if first == second != "cancel":
            assert await finish_by(store, handle, second) == before.task
        else:
            with pytest.raises(TaskFinishedError) as refused:
                await finish_by(store, handle, second)
            assert refused.value.task == before.task

        assert await store.get_details(task.task_id, auth=ALICE) == before

    async def test_the_same_outcome_again_is_no_conflict_but_another_one_is(self, store: TaskStore) -> None:
        """A caller whose answer got lost says it again; that must not look like a fault."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        done = await handle.complete({"n": 1})

        again = await handle.complete({"n": 1})

        assert again == done
        for other in ({"n": 2}, {"n": 1.0}, {}):
            with pytest.raises(TaskFinishedError):
                await handle.complete(other)
        with pytest.raises(TaskFinishedError):
            await handle.complete({"n": 1}, is_error=True)
        assert len(await store.list_events(task.task_id, auth=ALICE)) == 2

    @pytest.mark.parametrize("how", FINISHES)
    async def test_progress_after_the_end_is_refused(self, store: TaskStore, how: str) -> None:
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await finish_by(store, handle, how)
        before = await store.get_task(task.task_id, auth=ALICE)

        with pytest.raises(TaskFinishedError):
            await handle.progress(1)

        assert await store.get_task(task.task_id, auth=ALICE) == before

    @pytest.mark.parametrize("how", FINISHES)
    async def test_progress_after_the_end_is_refused_though_a_report_was_held_back(
        self, store: TaskStore, how: str
    ) -> None:
        """A report that only waits for its turn would leave a tool running that nobody wants any more."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(1)
        await handle.progress(2)
        done = await finish_by(store, handle, how)

        with pytest.raises(TaskFinishedError) as refused:
            await handle.progress(3)

        assert refused.value.task == done

    async def test_progress_is_stored_and_never_goes_down(self, store: TaskStore, clock: ManualClock) -> None:
        """MCP: the progress value must increase."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(5, total=10, message="rendering")
        clock.advance(timedelta(seconds=1))

        await handle.progress(3, message="still rendering")

        seen = await store.get_task(task.task_id, auth=ALICE)
        assert (seen.progress, seen.progress_total, seen.status_message) == (5, 10, "still rendering")
        assert seen.status is TaskStatus.WORKING
        assert seen.last_updated_at == task.created_at + timedelta(seconds=1)

    async def test_a_message_alone_says_nothing_of_a_number(self, store: TaskStore) -> None:
        """Some work knows what it does, but not how far it is; a made-up 0 would be shown to people."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(None, message="looking")
        first = await store.get_task(task.task_id, auth=ALICE)
        await handle.progress(4, message="found")
        await handle.progress(None, message="packing")

        done = await handle.complete(None)

        assert (first.progress, first.status_message) == (None, "looking")
        assert (done.progress, done.status_message) == (4, "packing")

    async def test_of_many_reports_few_are_written_and_the_last_is_never_lost(self, store: TaskStore) -> None:
        """A tool that reports ten thousand times a second must not write ten thousand times."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)

        for step in range(1, 1001):
            await handle.progress(step, total=1000, message=f"step {step}")
        done = await handle.complete({})

        assert (done.progress, done.progress_total, done.status_message) == (1000, 1000, "step 1000")
        assert done.version <= 10

    async def test_progress_that_was_held_back_is_stored_soon_without_another_report(self, store: TaskStore) -> None:
        """A tool that falls silent after a burst must not leave an old value standing."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(1)
        first = await store.get_task(task.task_id, auth=ALICE)

        await handle.progress(2)

        later = await store.wait_for_task(
            task.task_id, auth=ALICE, since_version=first.version, timeout=timedelta(seconds=10)
        )
        assert later.progress == 2

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    async def test_progress_that_is_no_number_is_refused(self, store: TaskStore, value: float) -> None:
        task = await store.create_task(auth=ALICE)

        with pytest.raises(PayloadError, match=r"\$\.progress"):
            await store.handle(task).progress(value)

        assert (await store.get_task(task.task_id, auth=ALICE)).progress is None

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
    async def test_a_result_that_cannot_be_stored_leaves_the_task_live(self, store: TaskStore, value: float) -> None:
        """One NaN must not take the whole outcome with it; the tool can still say what went wrong.

        Case 21, ZJU-REAL/Polaris#287, langflow-ai/langflow#11905: one NaN destroyed the whole write.
        """
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)

        with pytest.raises(PayloadError, match=r"\$\.result\.rows\[1\]\.price"):
            await handle.complete({"rows": [{}, {"price": value}]})

        assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.WORKING
        assert (await handle.fail("the result holds a NaN")).status is TaskStatus.FAILED

    async def test_what_json_lacks_is_repaired_where_the_store_is_told_to(
        self, open_store: OpenStore, peer: TaskStore
    ) -> None:
        """Reading is valid JSON for everybody, whoever stored it; and repeating the write is no other outcome.

        Case 21, ZJU-REAL/Polaris#287, langflow-ai/langflow#11905: one NaN destroyed the whole write.
        """
        store = await open_store(payload_policy="repair")
        task, other = (
            await store.create_task(auth=ALICE, request={"at": float("inf")}),
            await store.create_task(auth=ALICE),
        )
        handle = store.handle(task)
        await handle.progress(1, message="half\ud800way")

        done = await handle.complete({"rows": [{"price": float("nan")}, {"b\udfff": "\ud800"}]})
        again = await handle.complete({"rows": [{"price": float("nan")}, {"b\udfff": "\ud800"}]})
        failed = await store.handle(other).fail("broke\ud800n", data=[float("-inf")])

        assert (await peer.get_outcome(task.task_id, auth=ALICE)).result == {
            "rows": [{"price": None}, {"b\ufffd": "\ufffd"}]
        }
        assert (await peer.get_outcome(other.task_id, auth=ALICE)).error == {
            "code": -32603,
            "message": "broke\ufffdn",
            "data": [None],
        }
        assert again == done
        assert (done.status_message, failed.status_message) == ("half\ufffdway", "broke\ufffdn")

    @pytest.mark.parametrize(
        "value",
        [
            None,
            {},
            [],
            "",
            0,
            False,
            {"text": "\\u0000", "nul": "a\x00b", "quotes": "\"'", "emoji": "👩‍🚀", "rtl": "שלום", "key\x00": 1},
            {"z": 1, "a": 2, "m": {"b": 1, "a": 2}},
            {"big": 2**53 + 1, "bigger": 2**70, "negative": -(2**63), "float": 0.1, "huge": 1e308, "text": "1e400"},
            {"long": "x" * 1_000_000},
        ],
        ids=["null", "object", "array", "text", "zero", "false", "characters", "order", "numbers", "megabyte"],
    )
    async def test_a_result_comes_back_as_it_was_stored(
        self, store: TaskStore, finish: Finish, value: JsonValue
    ) -> None:
        """The bytes on either database are the same JSON.

        Case 51, certtools/intelmq#2652: removing NULs corrupted a text that spelled one as backslash u0000.
        """
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete({"value": value})

        result = (await store.get_outcome(task.task_id, auth=ALICE)).result

        assert result == {"value": value}
        assert isinstance(result, dict)
        if isinstance(value, dict):
            assert isinstance(result["value"], dict)
            assert list(result["value"]) == list(value)  # the order of the keys is kept

    async def test_nul_in_any_text_a_tool_says_round_trips(self, store: TaskStore) -> None:
        """PostgreSQL's text holds no NUL; an outcome must not be lost for one.

        Case 17, LuthienResearch/luthien-proxy PR#816: a NUL inside a result made the write fail, and the result was
        lost.
        """
        task, other = await store.create_task(auth=ALICE), await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(1, message="a\x00b")

        completed = await handle.complete({"a\x00": "\x00"})
        failed = await store.handle(other).fail("broke\x00n", data="\x00")

        assert completed.status_message == "a\x00b"
        assert failed.status_message == "broke\x00n"
        assert (await store.get_outcome(other.task_id, auth=ALICE)).error == {
            "code": -32603,
            "message": "broke\x00n",
            "data": "\x00",
        }

    async def test_a_block_that_raises_fails_its_task_and_keeps_the_reason_to_the_log(
        self, store: TaskStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The text of an exception may hold anything; the client learns which tool it was."""
        task = await store.create_task(auth=ALICE, name="report")

        with pytest.raises(RuntimeError):
            async with store.handle(task):
                raise RuntimeError("password=hunter2")

        failed = await store.get_task(task.task_id, auth=ALICE)
        assert (failed.status, failed.status_message) == (TaskStatus.FAILED, "Error executing tool report")
        assert "hunter2" not in str(await store.get_outcome(task.task_id, auth=ALICE))
        assert "hunter2" in caplog.text

    async def test_a_block_that_ends_without_an_outcome_fails_its_task(self, store: TaskStore) -> None:
        """Otherwise a client polls for ever."""
        task = await store.create_task(auth=ALICE)

        async with store.handle(task):
            pass

        assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED

    async def test_a_block_that_is_cancelled_fails_its_task(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)
        inside = asyncio.Event()

        async def work() -> None:
            async with store.handle(task):
                inside.set()
                await asyncio.Event().wait()

        running = asyncio.create_task(work())
        await inside.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED

    async def test_only_the_process_that_created_a_task_gets_its_handle(
        self, store: TaskStore, peer: TaskStore, finish: Finish
    ) -> None:
        task = await store.create_task(auth=ALICE)
        done = await finish(store)

        for other, wrong in ((peer, task), (store, done)):
            with pytest.raises(LeaseLostError):
                other.handle(wrong)
        with pytest.raises(ValueError, match="existed before"):
            store.handle(task.model_copy(update={"existing": True}))

        assert store.handle(task) is store.handle(task)

    async def test_what_is_not_finished_has_no_outcome_and_cannot_be_deleted(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)

        with pytest.raises(NotFinishedError) as refused:
            await store.get_outcome(task.task_id, auth=ALICE)
        with pytest.raises(NotFinishedError):
            await store.delete_task(task.task_id, auth=ALICE)

        assert refused.value.task == task
        assert (await store.get_details(task.task_id, auth=ALICE)).outcome is None

    async def test_a_deleted_task_is_gone_with_its_history(
        self, store: TaskStore, peer: TaskStore, finish: Finish
    ) -> None:
        task = await finish(store)

        await peer.delete_task(task.task_id, auth=ALICE)

        with pytest.raises(TaskNotFoundError):
            await store.list_events(task.task_id, auth=ALICE)
        with pytest.raises(TaskNotFoundError):
            await store.delete_task(task.task_id, auth=ALICE)

    @pytest.mark.parametrize("how", FINISHES)
    async def test_every_state_change_is_an_event(self, store: TaskStore, clock: ManualClock, how: str) -> None:
        """The history is the audit: it must tell what happened, by rows written with the changes."""
        task = await store.create_task(auth=ALICE)
        handle = store.handle(task)
        await handle.progress(1)
        clock.advance(timedelta(seconds=2))
        finished = await finish_by(store, handle, how)

        events = await store.list_events(task.task_id, auth=ALICE)

        kind = {"complete": EventKind.COMPLETED, "fail": EventKind.FAILED, "cancel": EventKind.CANCELLED}[how]
        assert [(event.kind, event.from_status, event.to_status) for event in events] == [
            (EventKind.CREATED, None, TaskStatus.WORKING),
            (kind, TaskStatus.WORKING, finished.status),
        ]
        assert [event.version for event in events] == [1, finished.version]
        assert [event.at for event in events] == [task.created_at, finished.finished_at]
        assert await store.list_events(task.task_id, auth=ALICE, after=1) == events[1:]

    async def test_cancel_reaches_the_work_in_its_own_process(self, store: TaskStore) -> None:
        task = await store.create_task(auth=ALICE)

        async with store.handle(task) as handle:
            assert not handle.cancel_requested
            await store.cancel_task(task.task_id, auth=ALICE)

            await asyncio.wait_for(handle.wait_cancelled(), 10)
            assert handle.cancel_requested

    async def test_cancel_reaches_the_work_in_another_process(self, store: TaskStore, peer: TaskStore) -> None:
        """The record says cancelled at once; work that goes on for a minute after it is a broken promise.

        Case 53, PrefectHQ/fastmcp#2679: the record said cancelled, and the work went on for a minute.
        """
        task = await store.create_task(auth=ALICE)

        async with store.handle(task) as handle:
            await peer.cancel_task(task.task_id, auth=ALICE)

            await asyncio.wait_for(handle.wait_cancelled(), 10)
            assert handle.cancel_requested
            with pytest.raises(TaskFinishedError) as refused:
                await handle.complete({})
            assert refused.value.task.status is TaskStatus.CANCELLED

    async def test_overlapping_writes_leave_one_terminal_state(self, store: TaskStore, peer: TaskStore) -> None:
        """Cancel, progress and complete at once: whoever is first wins, the history tells it, the rest is refused."""
        for _ in range(25):
            task = await store.create_task(auth=ALICE)
            handle = store.handle(task)

            answers = await asyncio.gather(
                handle.progress(1),
                peer.cancel_task(task.task_id, auth=ALICE),
                handle.complete({"ok": True}),
                store.cancel_task(task.task_id, auth=ALICE),
                return_exceptions=True,
            )

            won = [answer for answer in answers[1:] if not isinstance(answer, BaseException)]
            stands = await store.get_task(task.task_id, auth=ALICE)
            events = await store.list_events(task.task_id, auth=ALICE)
            assert [answer.status for answer in won] == [stands.status]
            assert all(isinstance(answer, TaskFinishedError) for answer in answers[1:] if answer not in won)
            assert [event.to_status for event in events] == [TaskStatus.WORKING, stands.status]

    async def test_progress_that_overlaps_a_cancel_never_undoes_it(self, store: TaskStore, peer: TaskStore) -> None:
        """Whichever of the two is first, cancelled stays, and what the tool says after it is not stored.

        Case 23, elizaOS/eliza#23801: progress written from an old copy of the task turned a cancelled one back to
        working.
        """
        for _ in range(10):
            tasks = await asyncio.gather(*(store.create_task(auth=ALICE) for _ in range(100)))
            handles = [store.handle(task) for task in tasks]

            answers = await asyncio.gather(
                *(handle.progress(1) for handle in handles),
                *(peer.cancel_task(task.task_id, auth=ALICE) for task in tasks),
                return_exceptions=True,
            )

            said, cancelled = answers[:100], answers[100:]
            for handle, heard, stands in zip(handles, said, cancelled, strict=True):
                assert isinstance(stands, Task)
                assert stands.status is TaskStatus.CANCELLED
                assert stands.progress == (1 if heard is None else None)
                assert heard is None or isinstance(heard, TaskFinishedError)
                with pytest.raises(TaskFinishedError):
                    await handle.complete({"late": True})
            seen = [await store.get_task(task.task_id, auth=ALICE) for task in tasks]
            assert seen == cancelled

    async def test_two_deletes_at_once_both_see_it_gone(
        self, store: TaskStore, peer: TaskStore, finish: Finish
    ) -> None:
        for _ in range(10):
            task = await finish(store)

            answers = await asyncio.gather(
                *(each.delete_task(task.task_id, auth=ALICE) for each in (store, peer) * 2), return_exceptions=True
            )

            assert answers.count(None) == 1
            assert all(isinstance(answer, TaskNotFoundError) for answer in answers if answer is not None)
