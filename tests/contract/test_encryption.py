"""Payloads at rest: sealed where they lie, opened by the key that sealed them, and bound to their place."""

import asyncio
import secrets
import subprocess
from datetime import timedelta

import pytest
from sqlalchemy import text

from taskstore import CipherError, OnCrash, StoreOptions, TaskStatus, TaskStore, statements

from .conftest import ALICE

OLD, NEW = secrets.token_bytes(32), secrets.token_bytes(32)
MARKER = "hunter2-the-marker"


def everything(store) -> str:
    """Dump all that the database holds, as it lies there."""
    database = store._parts.database
    dump = []
    for table in ("tasks", "events", "inputs", "instances", "meta"):
        statement = text(f"SELECT * FROM taskstore_{table}")
        for row in database.read(lambda transaction, s=statement: transaction.rows(s, {})).result():
            dump += [value.decode("latin-1") if isinstance(value, bytes) else str(value) for value in row.values()]
    return "\n".join(dump)


async def fill(store) -> dict[str, str]:
    """Store the marker in every payload there is; return the ids of the tasks by their ends."""
    done = await store.create_task(auth=ALICE, request={"argument": MARKER})
    handle = store.handle(done)
    await handle.progress(1, message=MARKER)
    await handle.complete({"result": MARKER})
    failed = await store.create_task(auth=ALICE, request=MARKER)
    await store.handle(failed).fail(MARKER, data=MARKER)
    asked = await store.create_task(auth=ALICE)
    asking = asyncio.create_task(store.handle(asked).ask({"a": {"method": MARKER}, "b": {"method": MARKER}}))
    await store.wait_for_task(asked.task_id, auth=ALICE, since_version=asked.version)
    keys = sorted((await store.get_details(asked.task_id, auth=ALICE)).input_requests)
    await store.answer_inputs(asked.task_id, {keys[0]: MARKER}, auth=ALICE)
    parked = await store.create_task(auth=ALICE, name="book", caller={"token": MARKER})
    await store.handle(parked).park({"a": {"method": MARKER}}, state={"step": MARKER})
    # The question stays open; when the store closes, nobody is left to hear the answer.
    asking.add_done_callback(lambda done: done.cancelled() or done.exception())
    return {"done": done.task_id, "failed": failed.task_id, "asked": asked.task_id, "parked": parked.task_id}


async def check_all_open(store, ids):
    done = await store.get_details(ids["done"], auth=ALICE)
    failed = await store.get_details(ids["failed"], auth=ALICE)
    asked = await store.get_details(ids["asked"], auth=ALICE)
    assert (done.task.status_message, done.outcome.result) == (MARKER, {"result": MARKER})
    assert failed.outcome.error == {"code": -32603, "message": MARKER, "data": MARKER}
    assert list(asked.input_requests.values()) == [{"method": MARKER}]


async def test_no_payload_lies_in_the_database_in_plain(open_store, tmp_path):
    """Arguments, results, errors, messages, questions and answers may hold credentials.

    Case 63, PrefectHQ/fastmcp#4747, PR#4772: credentials lay in plain, and a weak or an empty key was accepted.
    """
    plain = await open_store()
    sealed = await open_store(keys=[OLD])

    ids = await fill(sealed)

    assert MARKER not in everything(sealed)
    await check_all_open(sealed, ids)
    await fill(plain)
    assert MARKER in everything(plain)  # so the search would have found it


async def test_the_files_of_sqlite_hold_no_payload_in_plain_either(tmp_path):
    """The write-ahead log keeps what the tables no longer show.

    Case 63, PrefectHQ/fastmcp#4747, PR#4772: credentials lay in plain, and a weak or an empty key was accepted.
    """
    path = tmp_path / "tasks.db"
    async with TaskStore.open(f"sqlite:///{path}", options=StoreOptions(keys=[OLD])) as store:
        await fill(store)
        # Another process reads the files: inside this one that would drop SQLite's locks.
        search = await asyncio.create_subprocess_exec("grep", "-lr", MARKER, str(tmp_path), stdout=subprocess.PIPE)
        found, _ = await search.communicate()
        names = {each.name for each in tmp_path.iterdir()}

    assert found == b""
    assert search.returncode == 1  # grep: nothing was selected, and nothing went wrong
    assert "tasks.db-wal" in names


async def test_a_wrong_or_missing_key_is_an_error_that_leaves_the_row_intact(open_store):
    """A wrong deployment must be repairable by the right one.

    Case 63, PrefectHQ/fastmcp#4747, PR#4772: credentials lay in plain, and a weak or an empty key was accepted.
    """
    right = await open_store(keys=[OLD])
    ids = await fill(right)
    other = await right.create_task(auth=ALICE)  # has nothing sealed

    for keys in ([], [NEW]):
        wrong = await open_store(keys=keys)
        for task_id in (ids["done"], ids["failed"], ids["asked"]):
            with pytest.raises(CipherError, match="every key that was in use"):
                await wrong.get_details(task_id, auth=ALICE)
        assert (await wrong.get_task(other.task_id, auth=ALICE)).task_id == other.task_id
        cancelled = await wrong.cancel_task((await right.create_task(auth=ALICE)).task_id, auth=ALICE)
        assert cancelled.status is TaskStatus.CANCELLED

    await check_all_open(right, ids)


async def test_recovery_needs_no_key_of_what_it_recovers(open_store, crash):
    """A server with a new key must still be able to tell clients what became of the old one's tasks."""
    dying, judge = await open_store(keys=[OLD]), await open_store(keys=[NEW])
    task = await dying.create_task(auth=ALICE, request=MARKER)
    await dying.handle(task).progress(1, message=MARKER)
    crash(dying)

    await judge.recover()

    details = await judge.get_details(task.task_id, auth=ALICE)
    assert details.task.status is TaskStatus.FAILED
    assert details.task.status_message.startswith("CRASH_RECOVERY")


async def test_keys_are_rotated_while_servers_work(open_store):
    """First every server gets the new key, old ones behind it; then all is sealed again; then the old key goes."""
    old = await open_store(keys=[OLD])
    ids = await fill(old)
    both = await open_store(keys=[NEW, OLD])
    await check_all_open(both, ids)

    first = await both.operator.rotate_keys()
    second = await both.operator.rotate_keys()

    new = await open_store(keys=[NEW])
    await check_all_open(new, ids)
    assert (first.resealed, second.resealed) == (4, 0)
    with pytest.raises(CipherError):
        await old.get_details(ids["done"], auth=ALICE)


async def test_what_was_plain_is_readable_with_keys_and_sealed_by_a_rotation(open_store):
    plain = await open_store()
    ids = await fill(plain)
    sealed = await open_store(keys=[NEW])
    await check_all_open(sealed, ids)

    await sealed.operator.rotate_keys()

    assert MARKER not in everything(sealed)
    await check_all_open(sealed, ids)


async def test_a_rotation_changes_no_task_and_no_history(open_store):
    store = await open_store(keys=[OLD])
    ids = await fill(store)
    before = [
        (await store.get_task(each, auth=ALICE), await store.list_events(each, auth=ALICE)) for each in ids.values()
    ]
    both = await open_store(keys=[NEW, OLD])

    await both.operator.rotate_keys()

    after = [(await both.get_task(each, auth=ALICE), await both.list_events(each, auth=ALICE)) for each in ids.values()]
    assert after == before


@pytest.mark.parametrize(("target", "source"), [("done", "failed"), ("failed", "done")])
async def test_a_sealed_value_that_was_moved_does_not_open(open_store, target, source):
    """Whoever can write to the database must not pass one task's payload off as another's."""
    store = await open_store(keys=[OLD])
    ids = await fill(store)
    moved = text(
        "UPDATE taskstore_tasks SET status_message ="
        " (SELECT status_message FROM taskstore_tasks WHERE task_id = :source) WHERE task_id = :target"
    )

    store._parts.database.write(
        lambda transaction: transaction.execute(moved, {"target": ids[target], "source": ids[source]})
    ).result()

    with pytest.raises(CipherError, match="altered, or belongs elsewhere"):
        await store.get_task(ids[target], auth=ALICE)


async def test_a_value_whose_bits_were_flipped_does_not_open(open_store):
    store = await open_store(keys=[OLD])
    ids = await fill(store)
    database = store._parts.database
    row = database.read(
        lambda t: t.row(statements.OPERATOR_GET_WITH_OUTCOME, {"task_id": ids["done"], "now": 0})
    ).result()
    stored = bytes(row["result"])
    write = text("UPDATE taskstore_tasks SET result = :result WHERE task_id = :id")

    for position in (5, 20, len(stored) - 1):
        altered = bytearray(stored)
        altered[position] ^= 1
        database.write(lambda t, v=bytes(altered): t.execute(write, {"result": v, "id": ids["done"]})).result()
        with pytest.raises(CipherError):
            await store.get_outcome(ids["done"], auth=ALICE)


@pytest.mark.parametrize(
    ("key", "problem"),
    [
        (b"", "0 bytes"),
        (b"short", "5 bytes"),
        (bytes(range(200, 231)), "31 bytes"),
        ("text" * 8, "str"),
        (bytes(32), "not made at random"),
        (b"ab" * 16, "not made at random"),
        (b"correct horse battery staple 123", "not made at random"),
    ],
    ids=str,
)
def test_an_empty_or_weak_key_is_refused(key, problem):
    """An empty key is what a missing setting looks like.

    Case 63, PrefectHQ/fastmcp#4747, PR#4772: credentials lay in plain, and a weak or an empty key was accepted.
    """
    with pytest.raises(ValueError, match=rf"keys\[1\].*{problem}"):
        StoreOptions(keys=[OLD, key])


def test_keys_do_not_show_in_the_representation():
    assert repr(OLD) not in repr(StoreOptions(keys=[OLD]))


async def test_a_waiting_question_survives_a_rotation_and_its_answer_is_read(open_store):
    store, both = await open_store(keys=[OLD, NEW]), await open_store(keys=[NEW, OLD])
    task = await store.create_task(auth=ALICE)
    asking = asyncio.create_task(store.handle(task).ask({"name": {"method": MARKER}}))
    await store.wait_for_task(task.task_id, auth=ALICE, since_version=1, timeout=timedelta(seconds=30))

    await both.operator.rotate_keys()
    key = next(iter((await both.get_details(task.task_id, auth=ALICE)).input_requests))
    await both.answer_inputs(task.task_id, {key: "Ann"}, auth=ALICE)

    assert await asyncio.wait_for(asking, 10) == {"name": "Ann"}


async def test_what_is_kept_for_another_run_survives_a_rotation(open_store):
    """A question may stand open for longer than a key is in use."""
    old = await open_store(keys=[OLD])
    ids = await fill(old)
    await (await open_store(keys=[NEW, OLD])).operator.rotate_keys()
    new = await open_store(keys=[NEW])

    details = await new.get_details(ids["parked"], auth=ALICE)
    await new.answer_inputs(ids["parked"], dict.fromkeys(details.input_requests, MARKER), auth=ALICE)
    claim = await new.claim_task(["book"])

    assert (claim.caller, claim.state, claim.answers) == ({"token": MARKER}, {"step": MARKER}, {"a": MARKER})


async def test_the_question_whether_to_run_again_is_sealed_and_asked_under_the_key_of_its_task(open_store, crash):
    """Only who has a task's key can know whether its client can be asked; for anybody else it fails."""
    lost, caller = [], {"capabilities": {"elicitation": {}}}
    for _ in range(2):
        store = await open_store(keys=[OLD])
        lost.append(await store.create_task(auth=ALICE, name="send", on_crash=OnCrash.ASK, caller=caller))
        crash(store)
        judge = await open_store(keys=[NEW] if len(lost) == 1 else [OLD])
        await judge.recover()
    reader = await open_store(keys=[NEW, OLD])

    failed, asked = [await reader.get_details(task.task_id, auth=ALICE) for task in lost]

    assert failed.outcome.error["data"]["reason"] == "CRASH_RECOVERY"
    ((key, question),) = asked.input_requests.items()
    assert question["method"] == "elicitation/create"
    answer = {"action": "accept", "content": {"again": True}}
    await reader.answer_inputs(lost[1].task_id, {key: answer}, auth=ALICE)
    assert (await reader.claim_task(["send"])).task.task_id == lost[1].task_id
