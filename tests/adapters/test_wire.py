"""The JSON of both generations for the store's records: 2026-07-28's extension for tasks, then 2025-11-25."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pydantic import JsonValue

from taskstore.adapters.wire import (
    acknowledgement,
    create_task_result,
    detailed_task,
    legacy_create_task_result,
    legacy_list_result,
    legacy_related,
    legacy_task,
)
from taskstore.task import Outcome, OwnerKind, Task, TaskDetails, TaskPage, TaskStatus

CREATED_AT = datetime(2026, 7, 28, 10, 30, 0, 123_000, tzinfo=UTC)


def a_task(**changes: Any) -> Task:
    fields: dict[str, Any] = {
        "task_id": "tsk_1",
        "status": TaskStatus.WORKING,
        "status_message": None,
        "progress": None,
        "progress_total": None,
        "is_error": False,
        "created_at": CREATED_AT,
        "last_updated_at": CREATED_AT + timedelta(seconds=1),
        "finished_at": None,
        "ttl": timedelta(minutes=1),
        "expires_at": None,
        "poll_interval": timedelta(seconds=5),
        "method": "tools/call",
        "name": "generate_report",
        "server": "",
        "attempt": 1,
        "crashes": 0,
        "version": 1,
        "owner_kind": OwnerKind.INSTANCE,
        "cancel_requested": False,
    }
    return Task(**(fields | changes))


def details(outcome: Outcome | None = None, inputs: dict[str, JsonValue] | None = None, **changes: Any) -> TaskDetails:
    return TaskDetails(task=a_task(**changes), outcome=outcome, input_requests=inputs or {})


def test_a_create_result_is_flat_and_tagged_task() -> None:
    """Clients tell a task from an ordinary result by the tag, and read the fields beside it."""
    assert create_task_result(a_task()) == {
        "resultType": "task",
        "taskId": "tsk_1",
        "status": "working",
        "createdAt": "2026-07-28T10:30:00.123Z",
        "lastUpdatedAt": "2026-07-28T10:30:01.123Z",
        "ttlMs": 60_000,
        "pollIntervalMs": 5_000,
    }


def test_an_unlimited_ttl_is_null_and_not_left_out() -> None:
    """The specification requires the key; its absence would be a malformed task."""
    wire = create_task_result(a_task(ttl=None))

    assert "ttlMs" in wire
    assert wire["ttlMs"] is None


def test_a_task_without_poll_interval_suggests_none() -> None:
    """The key is optional, and null is no integer."""
    assert "pollIntervalMs" not in create_task_result(a_task(poll_interval=None))


def test_durations_are_whole_milliseconds() -> None:
    """The specification allows integers only."""
    wire = create_task_result(a_task(ttl=timedelta(microseconds=1_999), poll_interval=timedelta(microseconds=2_500)))

    assert (wire["ttlMs"], wire["pollIntervalMs"]) == (1, 2)
    assert type(wire["ttlMs"]) is int


def test_timestamps_are_utc_whatever_zone_the_record_has() -> None:
    """Readers compare them as text."""
    east = datetime.fromisoformat("2026-07-28T12:30:00+02:00")

    assert create_task_result(a_task(created_at=east))["createdAt"] == "2026-07-28T10:30:00.000Z"


@pytest.mark.parametrize(
    ("message", "progress", "total", "shown"),
    [
        ("rendering", 3.0, 10.0, "rendering (3/10)"),
        ("rendering", 3.0, None, "rendering (3)"),
        ("rendering", None, None, "rendering"),
        (None, 3.0, 10.0, "3/10"),
        ("copying", 0.1 + 0.2, 1.0, "copying (0.3/1)"),
        ("copying", 1234567.0, 9876543.0, "copying (1234567/9876543)"),
        ("", 1.0, 2.0, "1/2"),
    ],
)
def test_the_status_message_shows_progress(message: str | None, progress: float, total: float, shown: str) -> None:
    """The extension has no progress field and no progress notifications for tasks; the message is all there is."""
    wire = detailed_task(details(status_message=message, progress=progress, progress_total=total))

    assert wire["statusMessage"] == shown


def test_a_finished_task_shows_why_it_ended_and_no_progress() -> None:
    """Half-way progress beside an outcome would read as if something still ran."""
    wire = detailed_task(
        details(Outcome(), status=TaskStatus.CANCELLED, status_message="Cancelled.", progress=3.0, progress_total=10.0)
    )

    assert wire["statusMessage"] == "Cancelled."


def test_a_task_that_said_nothing_has_no_status_message() -> None:
    """The key is optional, and null is no string."""
    assert "statusMessage" not in detailed_task(details())


def test_a_completed_task_inlines_its_result_as_it_is() -> None:
    """The client must get what the call would have returned, nothing added and nothing taken."""
    result: JsonValue = {"content": [{"type": "text", "text": "10 pages"}], "isError": False, "_meta": {"k": None}}

    wire = detailed_task(details(Outcome(result=result), status=TaskStatus.COMPLETED))

    assert wire["resultType"] == "complete"
    assert wire["status"] == "completed"
    assert wire["result"] == result
    assert "error" not in wire


def test_a_tool_error_is_a_completed_task() -> None:
    """In this generation ``failed`` means a JSON-RPC error and nothing else."""
    result: JsonValue = {"content": [], "isError": True}

    wire = detailed_task(details(Outcome(result=result, is_error=True), status=TaskStatus.COMPLETED, is_error=True))

    assert (wire["status"], wire["result"]) == ("completed", result)


def test_a_failed_task_carries_error_and_message() -> None:
    """The error is required; the message should be there for people."""
    error: JsonValue = {"code": -32000, "message": "Quota exceeded", "data": {"limit": 3}}

    wire = detailed_task(details(Outcome(error=error), status=TaskStatus.FAILED))

    assert wire["error"] == error
    assert wire["statusMessage"] == "Quota exceeded"
    assert "result" not in wire


def test_a_waiting_task_lists_every_open_request() -> None:
    """Each poll repeats them, since the client may have lost the first answer."""
    requests: dict[str, JsonValue] = {
        "a": {"method": "elicitation/create", "params": {"message": "a?"}},
        "b": {"method": "elicitation/create", "params": {"message": "b?"}},
    }

    wire = detailed_task(details(inputs=requests, status=TaskStatus.INPUT_REQUIRED))

    assert wire["inputRequests"] == requests


@pytest.mark.parametrize("status", [TaskStatus.WORKING, TaskStatus.CANCELLED])
def test_a_working_or_cancelled_task_adds_nothing(status: TaskStatus) -> None:
    """Result, error and input requests belong to other statuses."""
    outcome = Outcome() if status is TaskStatus.CANCELLED else None

    assert not {"result", "error", "inputRequests"} & detailed_task(details(outcome, status=status)).keys()


def test_an_acknowledgement_is_empty() -> None:
    """Anything in it would be taken for the task's state, which it does not reflect."""
    assert acknowledgement() == {"resultType": "complete"}


# --- MCP 2025-11-25


def test_a_legacy_create_result_nests_the_task() -> None:
    """Clients of that generation tell a task from an ordinary result by the field that holds it."""
    assert legacy_create_task_result(a_task()) == {
        "task": {
            "taskId": "tsk_1",
            "status": "working",
            "createdAt": "2026-07-28T10:30:00.123Z",
            "lastUpdatedAt": "2026-07-28T10:30:01.123Z",
            "ttl": 60_000,
            "pollInterval": 5_000,
        }
    }


def test_an_unlimited_legacy_ttl_is_null_and_not_left_out() -> None:
    """The specification requires the key, and the SDK's own client refuses a task without it."""
    wire = legacy_task(a_task(ttl=None, poll_interval=None))

    assert wire["ttl"] is None
    assert "pollInterval" not in wire


@pytest.mark.parametrize(
    ("status", "is_error", "shown"),
    [
        (TaskStatus.WORKING, False, "working"),
        (TaskStatus.INPUT_REQUIRED, False, "input_required"),
        (TaskStatus.COMPLETED, False, "completed"),
        (TaskStatus.COMPLETED, True, "failed"),
        (TaskStatus.FAILED, False, "failed"),
        (TaskStatus.CANCELLED, False, "cancelled"),
    ],
)
def test_a_tool_error_is_a_failed_legacy_task(status: TaskStatus, is_error: bool, shown: str) -> None:
    """The opposite of the later generation, so the row must keep both facts apart."""
    assert legacy_task(a_task(status=status, is_error=is_error))["status"] == shown


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": [{"type": "image", "data": ""}, {"type": "text", "text": "Disk full."}]}, "Disk full."),
        ({"content": []}, "copying"),
        ({"content": "odd"}, "copying"),
        (["odd"], "copying"),
        (None, "copying"),
    ],
)
def test_a_failed_tool_says_why_in_the_status_message(result: JsonValue, shown: str) -> None:
    """A client polls, and asks for the result only later; people should read the reason before (T25-15)."""
    task = a_task(status=TaskStatus.COMPLETED, is_error=True, status_message="copying")

    assert legacy_task(task, Outcome(result=result, is_error=True))["statusMessage"] == shown


def test_a_legacy_list_names_the_next_cursor_only_when_there_is_more() -> None:
    """A client that sees the key asks again."""
    last = legacy_list_result(TaskPage(tasks=(a_task(),), next_cursor=None))
    more = legacy_list_result(TaskPage(tasks=(a_task(),), next_cursor="abc"))

    assert last == {"tasks": [legacy_task(a_task())]}
    assert more == {**last, "nextCursor": "abc"}


@pytest.mark.parametrize("meta", [{}, {"_meta": {"k": 1}}, {"_meta": None}], ids=["none", "some", "odd"])
def test_a_related_message_names_its_task_and_keeps_its_own_meta(meta: dict[str, JsonValue]) -> None:
    """The mark is how a client knows which task a message belongs to (T25-30)."""
    before: dict[str, JsonValue] = {"content": [], **meta}

    marked = legacy_related(before, "tsk_1")

    own = {"k": 1} if meta.get("_meta") else {}
    assert marked == {"content": [], "_meta": {**own, "io.modelcontextprotocol/related-task": {"taskId": "tsk_1"}}}
    assert before == {"content": [], **meta}
