"""``taskstore ls`` and ``taskstore show``, beside a running store."""

from datetime import timedelta
from typing import Any

import anyio
import pytest

from taskstore import AuthContext, StoreOptions, TaskStore
from taskstore.binding import shorten
from taskstore.testing import ManualClock

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")


async def test_ls_shows_everybodys_tasks_newest_first(database_url: str, run_beside: Any) -> None:
    """An operator sees all tasks at a glance, with ids that are too short to fetch a result with."""
    clock = ManualClock()
    async with TaskStore.open(database_url, options=StoreOptions(clock=clock)) as store:
        older = await store.create_task(auth=ALICE, name="generate_report")
        clock.advance(timedelta(milliseconds=1))
        newer = await store.create_task(auth=BOB, name="count_bees")
        await store.handle(older).progress(3, total=10, message="rendering")

        listed = await run_beside("ls", database_url)

    heading, first, second = listed.out.splitlines()
    assert heading.split() == ["TASK", "STATUS", "TOOL", "PROGRESS", "AGE", "MESSAGE"]
    assert first.split()[:3] == [shorten(newer.task_id), "working", "count_bees"]
    assert second.split()[:4] == [shorten(older.task_id), "working", "generate_report", "3/10"]
    assert second.rstrip().endswith("rendering")
    assert older.task_id not in listed.out
    assert listed.code == 0


async def test_ls_as_json_has_whole_ids_and_durations_in_milliseconds(database_url: str, run_beside: Any) -> None:
    """A program goes on with what it gets: fetches, compares, adds up."""
    async with TaskStore.open(database_url, options=StoreOptions(server="reports")) as store:
        task = await store.create_task(
            auth=ALICE, name="generate_report", ttl=timedelta(minutes=15), poll_interval=timedelta(seconds=2)
        )

        listed = await run_beside("ls", database_url, "--json")

    [only] = listed.json["tasks"]
    assert only["task_id"] == task.task_id
    assert (only["status"], only["name"], only["server"]) == ("working", "generate_report", "reports")
    assert (only["ttl_ms"], only["poll_interval_ms"]) == (900_000, 2_000)
    assert only["created_at"].endswith("Z")
    assert listed.json["more"] is False
    assert listed.err == ""


async def test_ls_filters_by_status_tool_server_and_session(database_url: str, run_beside: Any) -> None:
    """Of thousands of tasks one looks for a few."""
    async with (
        TaskStore.open(database_url, options=StoreOptions(server="reports")) as reports,
        TaskStore.open(database_url, options=StoreOptions(server="bees")) as bees,
    ):
        failed = await reports.create_task(auth=ALICE, name="generate_report", session_id="s1")
        await reports.handle(failed).fail("disk full")
        counted = await bees.create_task(auth=ALICE, name="count_bees", session_id="s2")

        for option, value, expected in (
            ("--status", "failed", failed),
            ("--tool", "count_bees", counted),
            ("--server", "reports", failed),
            ("--session", "s2", counted),
        ):
            listed = await run_beside("ls", database_url, option, value, "--json")
            assert [task["task_id"] for task in listed.json["tasks"]] == [expected.task_id], option
        nothing = await run_beside("ls", database_url, "--status", "cancelled")

    assert (nothing.code, nothing.out, nothing.words) == (0, "", "No tasks.")


async def test_ls_stops_at_the_limit_and_says_so(database_url: str, run_beside: Any) -> None:
    """A listing that is silently cut would be taken for the whole."""
    async with TaskStore.open(database_url) as store:
        ids = [(await store.create_task(auth=ALICE)).task_id for _ in range(3)]

        limited = await run_beside("ls", database_url, "--limit", "2", "--json")
        table = await run_beside("ls", database_url, "--limit", "2")
        whole = await run_beside("ls", database_url, "--limit", "2", "--all", "--json")

    newest_first = sorted(ids, reverse=True)  # ids begin with the instant, and two tasks can be of one millisecond
    assert [task["task_id"] for task in limited.json["tasks"]] == newest_first[:2]
    assert limited.json["more"] is True
    assert "more than 2" in table.words
    assert [task["task_id"] for task in whole.json["tasks"]] == newest_first
    assert whole.json["more"] is False


async def test_a_tools_message_cannot_steer_the_terminal(database_url: str, run_beside: Any) -> None:
    """Messages come from tools and, through them, from strangers; an operator's terminal must only show them."""
    evil = "\x1b[2Jgone \u202e\nsecond [bold]line"
    async with TaskStore.open(database_url) as store:
        task = await store.create_task(auth=ALICE, name="generate_report")
        await store.handle(task).progress(1, message=evil)

        listed = await run_beside("ls", database_url)
        shown = await run_beside("show", database_url, task.task_id)

    for output in (listed.out, shown.out):
        assert r"\x1b[2Jgone \u202e\nsecond [bold]line" in output
        assert "\x1b" not in output


async def test_show_takes_an_id_as_ls_prints_it(database_url: str, run_beside: Any) -> None:
    """What stands in the table can be copied, the ellipsis included."""
    async with TaskStore.open(database_url) as store:
        task = await store.create_task(auth=ALICE, name="generate_report")
        await store.create_task(auth=ALICE)
        await store.handle(task).complete({"pages": [1, 2]})

        shown = await run_beside("show", database_url, shorten(task.task_id))

    lines = [line.split() for line in shown.out.splitlines()]
    assert ["task", task.task_id] in lines
    assert ["status", "completed"] in lines
    assert [line[4:6] for line in lines if line[1:2] and line[0].isdecimal()] == [
        ["created", "working"],
        ["completed", "completed"],
    ]
    assert '"pages"' in shown.out
    assert shown.code == 0


async def test_show_as_json_has_task_history_and_outcome(database_url: str, run_beside: Any) -> None:
    """Everything that is known of a task, for a bug report."""
    async with TaskStore.open(database_url) as store:
        task = await store.create_task(auth=ALICE, name="generate_report")
        await store.handle(task).fail("disk full", data={"free": 0})

        shown = await run_beside("show", database_url, task.task_id, "--json")

    assert shown.json["task"]["task_id"] == task.task_id
    assert [event["kind"] for event in shown.json["events"]] == ["created", "failed"]
    assert shown.json["outcome"]["error"] == {"code": -32603, "message": "disk full", "data": {"free": 0}}
    assert shown.json["input_requests"] == {}


async def test_show_has_the_open_questions(database_url: str, run_beside: Any) -> None:
    """A task that waits for an answer says for which."""
    request = {"method": "elicitation/create", "params": {"message": "Which year?"}}
    async with TaskStore.open(database_url) as store, anyio.create_task_group() as asking:
        task = await store.create_task(auth=ALICE)
        asking.start_soon(store.handle(task).ask, {"year": request})
        await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)

        for_people = await run_beside("show", database_url, task.task_id)
        for_programs = await run_beside("show", database_url, task.task_id, "--json")
        [key] = for_programs.json["input_requests"]
        await store.answer_inputs(task.task_id, {key: {"action": "accept"}}, auth=ALICE)

    assert "Which year?" in for_people.out
    assert for_programs.json["input_requests"][key] == request
    assert for_programs.json["outcome"] is None


async def test_show_cuts_a_long_result_for_people_only(database_url: str, run_beside: Any) -> None:
    """A terminal has a few lines; a program wants every byte."""
    result = {"rows": list(range(1000)), "text": "x" * 10_000}
    async with TaskStore.open(database_url) as store:
        task = await store.create_task(auth=ALICE)
        await store.handle(task).complete(result)

        for_people = await run_beside("show", database_url, task.task_id)
        for_programs = await run_beside("show", database_url, task.task_id, "--json")

    assert len(for_people.out) < 5_000
    assert "more lines; --json prints them all" in for_people.out
    assert for_programs.json["outcome"]["result"] == result


@pytest.mark.parametrize("beginning", ["tsk_nothing", "x'; DROP TABLE", "", "é"])
async def test_show_without_such_a_task_exits_1(database_url: str, run_beside: Any, beginning: str) -> None:
    """A script can tell a task that is gone from a database that is."""
    async with TaskStore.open(database_url):
        shown = await run_beside("show", database_url, beginning)

    assert (shown.code, shown.out) == (1, "")
    assert "not found" in shown.err


async def test_show_refuses_to_choose_between_tasks(database_url: str, run_beside: Any) -> None:
    """The wrong task's result would be taken for the right one's."""
    async with TaskStore.open(database_url) as store:
        ids = [(await store.create_task(auth=ALICE)).task_id for _ in range(3)]

        shown = await run_beside("show", database_url, "tsk_")

    assert (shown.code, shown.out) == (1, "")
    assert "Several tasks begin with tsk_" in shown.err
    assert ids[-1] in shown.err
