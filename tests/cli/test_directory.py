"""``taskstore import-dir`` and ``export-dir``: one JSON file a task, as a course on SEP-1686 teaches to keep them."""

import json
import secrets
import stat
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from taskstore import AuthContext, OnCrash, StoreOptions, TaskDetails, TaskNotFoundError, TaskStore

ALICE, BOB = AuthContext(subject="alice"), AuthContext(subject="bob")
RESULT = {"content": [{"type": "text", "text": "Report size=large with 30 sections"}], "isError": False}


def written(directory: Path, task_id: str, **changes: Any) -> Path:
    """Write a file as the program of the lesson does."""
    task = {
        "id": task_id,
        "state": "working",
        "progress": 0.3,
        "total_ms": 3000,
        "result": None,
        "error": None,
        "ttl_ms": 900_000,
        "created_at": time.time(),
        "cancel_requested": False,
    }
    directory.mkdir(exist_ok=True)
    path = directory / f"{task_id}.json"
    path.write_text(json.dumps({**task, **changes}, indent=2))
    return path


@pytest.fixture
def lesson(tmp_path: Path) -> Path:
    """A directory that the program of the lesson left behind, with a task in each state."""
    directory = tmp_path / "lesson-13-tasks"
    written(directory, "tsk_000000000001", state="completed", progress=1.0, result=RESULT)
    written(directory, "tsk_000000000002", state="failed", error="disk full")
    written(directory, "tsk_000000000003", state="failed", error="CRASH_RECOVERY")
    written(directory, "tsk_000000000004", state="cancelled", cancel_requested=True)
    written(directory, "tsk_000000000005")
    return directory


async def test_the_tasks_of_a_directory_are_taken_over(database_url: str, run_beside: Any, lesson: Path) -> None:
    """Whoever learnt with files goes on with a database, and no client's task is lost on the way."""
    created_at = json.loads((lesson / "tsk_000000000001.json").read_text())["created_at"]

    imported = await run_beside("import-dir", database_url, str(lesson), "--subject", "alice", "--json")

    async with TaskStore.open(database_url) as store:
        completed, failed, crashed, cancelled, live = [
            await store.get_details(f"tsk_00000000000{number}", auth=ALICE) for number in range(1, 6)
        ]
        listed = await store.list_tasks(auth=ALICE)
        [event] = await store.list_events(live.task.task_id, auth=ALICE)
    assert imported.code == 0
    assert imported.json == {"imported": 5, "recovered": 1, "known": 0, "expired": [], "refused": []}
    assert len(listed.tasks) == 5
    assert completed.outcome is not None
    assert (completed.task.status, completed.outcome.result, completed.task.progress) == ("completed", RESULT, 1.0)
    assert completed.task.ttl == timedelta(minutes=15)
    assert completed.task.created_at == datetime.fromtimestamp(int(created_at * 1000) / 1000, UTC)
    assert failed.outcome is not None
    assert failed.outcome.error == {"code": -32603, "message": "disk full"}
    assert (failed.task.status, failed.task.status_message) == ("failed", "disk full")
    assert crashed.outcome is not None
    reason = {"reason": "CRASH_RECOVERY"}
    assert crashed.outcome.error == {"code": -32603, "message": "CRASH_RECOVERY", "data": reason}
    assert (cancelled.task.status, cancelled.task.cancel_requested) == ("cancelled", True)
    assert live.outcome is not None
    assert isinstance(live.outcome.error, dict)
    assert (live.task.status, live.task.progress) == ("failed", 0.3)
    assert str(live.outcome.error["message"]).startswith("CRASH_RECOVERY: ")
    assert (event.kind, event.from_status, event.to_status) == ("imported", "working", "failed")
    assert event.reason == "CRASH_RECOVERY"


async def test_an_import_may_be_repeated(database_url: str, run_beside: Any, lesson: Path) -> None:
    """It was cut off, or nobody knows whether it ran: the second time nothing changes."""
    await run_beside("import-dir", database_url, str(lesson), "--subject", "alice")
    async with TaskStore.open(database_url) as store:
        before = (await store.list_tasks(auth=ALICE)).tasks

        again = await run_beside("import-dir", database_url, str(lesson), "--subject", "alice")

        after = (await store.list_tasks(auth=ALICE)).tasks
    assert (again.code, again.err) == (0, "")
    assert again.out == "0 tasks imported, 0 of them failed with CRASH_RECOVERY; 5 were there already.\n"
    assert after == before


async def test_an_export_that_is_imported_gives_equal_tasks(
    database_url: str, empty_database_url: str, run_beside: Any, tmp_path: Path
) -> None:
    """A store moves from one database to another, and its clients see no difference."""
    directory = tmp_path / "backup"
    options = StoreOptions(server="reports")
    async with TaskStore.open(database_url, options=options) as store:
        for outcome in (None, {"pages": [1, 2.5, "\u2028é"]}, {**RESULT, "isError": True}):
            task = await store.create_task(auth=ALICE, name="render", ttl=timedelta(hours=2), on_crash=OnCrash.RETRY)
            handle = store.handle(task)
            await handle.progress(3, total=10, message="rendering \x1b")
            await handle.complete(outcome, is_error=outcome is not None and "isError" in outcome)
        await store.handle(await store.create_task(auth=ALICE, poll_interval=timedelta(seconds=2))).fail(
            "no paper", code=-31999, data={"tray": 2}
        )
        await store.cancel_task((await store.create_task(auth=ALICE)).task_id, auth=ALICE)
        await store.handle(await store.create_task(auth=BOB)).complete("for Bob alone")
        await store.handle(await store.create_task(auth=None)).complete("for whoever knows the id")
        before = await details(store)

    exported = await run_beside("export-dir", database_url, str(directory), "--subject", "alice", "--json")
    await run_beside("migrate", empty_database_url)
    imported = await run_beside("import-dir", empty_database_url, str(directory), "--subject", "alice", "--json")

    async with TaskStore.open(empty_database_url, options=options) as store:
        after = await details(store)
    assert (exported.code, exported.json) == (0, {"exported": 5, "directory": str(directory)})
    assert imported.json == {"imported": 5, "recovered": 0, "known": 0, "expired": [], "refused": []}
    assert after == before
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert {path.name for path in directory.iterdir()} == {f"{task_id}.json" for task_id in before}


async def details(store: TaskStore) -> dict[str, TaskDetails]:
    page = await store.list_tasks(auth=ALICE)
    return {task.task_id: await store.get_details(task.task_id, auth=ALICE) for task in page.tasks}


async def test_an_export_may_be_repeated_and_imported_where_it_came_from(
    database_url: str, run_beside: Any, tmp_path: Path
) -> None:
    """A backup that is played back over its own origin changes nothing, even where work goes on."""
    directory = tmp_path / "backup"
    async with TaskStore.open(database_url) as store:
        live = await store.create_task(auth=None)
        await store.handle(await store.create_task(auth=None)).complete("done")
        for _ in range(2):
            exported = await run_beside("export-dir", database_url, str(directory), "--unbound")
            assert exported.out == f"2 tasks exported to {directory}.\n"

        imported = await run_beside("import-dir", database_url, str(directory), "--unbound", "--json")

        finished = await store.handle(live).complete("done too")
    assert imported.json == {"imported": 0, "recovered": 0, "known": 2, "expired": [], "refused": []}
    assert finished.status == "completed"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"state": "done"}, "state: Input should be"),
        ({"id": "tsk_other"}, "id: It is not the name of the file"),
        ({"owner": "alice"}, "owner: Extra inputs are not permitted"),
        ({"ttl_ms": -1}, "greater than or equal to 0"),
        ({"ttl_ms": 10**15}, "less than or equal to"),
        ({"progress": float("nan")}, "progress: Input should be a finite number"),
        ({"created_at": "2025-11-25T10:30:00"}, "created_at: Input should have timezone info"),
        ({"created_at": "9999-11-25T10:30:00Z", "ttl_ms": 10**13}, "out of range"),
        ({"state": "failed"}, "A failed task, and only it, has an error"),
        ({"state": "failed", "error": {"text": "no"}}, "an object with code and message"),
        ({"state": "completed", "error": "no"}, "A failed task, and only it, has an error"),
        ({"state": "cancelled", "result": {}}, "A task that is cancelled has no result"),
        ({"result": {}}, "A task that is working has no outcome"),
        ({"state": "completed", "result": {"rows": [float("inf")]}}, "$.result.rows[0]"),
    ],
)
def test_a_file_that_holds_no_task_is_refused_by_name(
    database_url: str, run: Any, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    """Nothing is left out in silence; what can be imported is, and the rest can be mended and tried again."""
    written(tmp_path / "tasks", "tsk_1", **changes)
    written(tmp_path / "tasks", "tsk_2", state="completed", result=RESULT)

    imported = run("import-dir", database_url, str(tmp_path / "tasks"), "--unbound", "--json")

    assert imported.code == 1
    assert imported.json["imported"] == 1
    [refused] = imported.json["refused"]
    assert refused["file"] == "tsk_1.json"
    assert problem in refused["problem"]
    assert "tsk_1.json: " in imported.err
    assert "Traceback" not in imported.err


@pytest.mark.parametrize("name", ["white space", "é", "a~", "x" * 201])
def test_an_id_that_is_none_is_refused(database_url: str, run: Any, tmp_path: Path, name: str) -> None:
    """Ids travel in headers, file names and cursors; what comes from a directory may hold anything."""
    written(tmp_path / "tasks", name)

    imported = run("import-dir", database_url, str(tmp_path / "tasks"), "--unbound", "--json")

    [refused] = imported.json["refused"]
    assert refused["file"] == f"{name}.json"
    assert "A task id has" in refused["problem"]


def test_files_that_cannot_be_read_are_refused_by_name(database_url: str, run: Any, tmp_path: Path) -> None:
    """A broken disk, a folder with the name of a task, half a file: each is named, and is no reason to stop."""
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    (tmp_path / "half.json").write_text('{"id": "half", ')
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe{")
    (tmp_path / "deep.json").write_text("[" * 200_000)
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / ".tsk_1.json").write_text("the rest of an export that was cut off")
    (tmp_path / "README").write_text("no task")

    imported = run("import-dir", database_url, str(tmp_path), "--unbound", "--json")

    refused = {each["file"]: each["problem"] for each in imported.json["refused"]}
    assert refused.keys() == {f"{name}.json" for name in ("folder", "gone", "half", "bytes", "deep", "list")}
    assert refused["folder.json"] == "Is a directory."
    assert refused["gone.json"] == "No such file or directory."
    assert "this is no JSON" in refused["half.json"]
    assert imported.code == 1


async def test_another_task_of_the_same_id_stays_as_it_is(database_url: str, run_beside: Any, lesson: Path) -> None:
    """Neither another owner nor another outcome can be brought in over a task that is there."""
    await run_beside("import-dir", database_url, str(lesson), "--subject", "alice")
    created_at = json.loads((lesson / "tsk_000000000001.json").read_text())["created_at"]
    written(lesson, "tsk_000000000001", state="completed", result="another", created_at=created_at)

    by_alice = await run_beside("import-dir", database_url, str(lesson), "--subject", "alice", "--json")
    by_bob = await run_beside("import-dir", database_url, str(lesson), "--subject", "bob", "--json")

    async with TaskStore.open(database_url) as store:
        outcome = await store.get_outcome("tsk_000000000001", auth=ALICE)
        with pytest.raises(TaskNotFoundError):
            await store.get_task("tsk_000000000005", auth=BOB)
    assert [each["file"] for each in by_alice.json["refused"]] == ["tsk_000000000001.json"]
    assert "another task with the id" in by_alice.json["refused"][0]["problem"]
    assert (by_bob.json["imported"], len(by_bob.json["refused"])) == (0, 5)
    assert outcome.result == RESULT


def test_what_has_expired_is_left_behind_and_named(database_url: str, run: Any, tmp_path: Path) -> None:
    """Nobody could find it; a live one, however old, still gets its verdict."""
    written(tmp_path / "tasks", "tsk_1", state="completed", result=RESULT, created_at=1_000_000_000)
    written(tmp_path / "tasks", "tsk_2", created_at="2001-09-09T01:46:40Z")

    imported = run("import-dir", database_url, str(tmp_path / "tasks"), "--unbound", "--json")

    shown = run("show", database_url, "tsk_2", "--json")
    assert imported.code == 0
    assert imported.json == {"imported": 1, "recovered": 1, "known": 0, "expired": ["tsk_1.json"], "refused": []}
    assert "expired" in imported.err
    assert shown.json["task"]["status"] == "failed"
    assert run("ls", database_url, "--json").json["tasks"] == [shown.json["task"]]


@pytest.mark.parametrize("secret", [None, bytes(range(32))], ids=["the store's own secret", "a secret of the servers"])
async def test_the_tasks_of_a_new_database_are_there_for_its_first_server(
    database_url: str, run_beside: Any, lesson: Path, secret: bytes | None
) -> None:
    """Whose a task is depends on a secret that the first who binds anything must settle for all."""
    given = {} if secret is None else {"TASKSTORE_BINDING_SECRET": secret.hex()}
    imported = await run_beside("import-dir", database_url, str(lesson), "--subject", "alice", **given)

    async with TaskStore.open(database_url, options=StoreOptions(binding_secret=secret)) as store:
        listed = await store.list_tasks(auth=ALICE)
    assert imported.code == 0
    assert len(listed.tasks) == 5


async def test_sealed_payloads_are_exported_in_the_clear_and_sealed_again(
    database_url: str, run_beside: Any, tmp_path: Path, lesson: Path
) -> None:
    """The keys stay where they are; a directory can be read without them."""
    key, directory = secrets.token_bytes(32), tmp_path / "backup"
    sealing = {"TASKSTORE_KEYS": key.hex()}

    await run_beside("import-dir", database_url, str(lesson), "--unbound", **sealing)
    refused = await run_beside("show", database_url, "tsk_000000000001")
    exported = await run_beside("export-dir", database_url, str(directory), "--unbound", **sealing)

    assert refused.code == 2
    assert exported.code == 0
    assert json.loads((directory / "tsk_000000000001.json").read_text())["result"] == RESULT


@pytest.mark.parametrize("command", ["import-dir", "export-dir"])
@pytest.mark.parametrize("owner", [[], ["--unbound", "--subject", "alice"], ["--subject", ""]])
def test_whose_the_tasks_are_must_be_said(
    database_url: str, run: Any, tmp_path: Path, command: str, owner: Any
) -> None:
    """Guessing would give tasks to somebody, or to nobody."""
    ran = run(command, database_url, str(tmp_path), *owner)

    assert (ran.code, ran.out) == (2, "")
    assert "say whose the tasks are" in ran.words


def test_a_directory_that_is_none_is_wrong_usage(database_url: str, run: Any, tmp_path: Path) -> None:
    """The message names it."""
    (tmp_path / "file").write_text("")

    imported = run("import-dir", database_url, str(tmp_path / "nowhere"), "--unbound")
    exported = run("export-dir", database_url, str(tmp_path / "file"), "--unbound")

    assert (imported.code, exported.code) == (2, 2)
    assert "nowhere" in imported.words
    assert "file" in exported.words
