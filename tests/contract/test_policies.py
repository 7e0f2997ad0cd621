"""What becomes of a task whose process is gone: fail, retry, ask, external; parked tasks; and who runs them again."""

import asyncio
from datetime import timedelta

import pytest

from taskstore import (
    EventKind,
    LeaseLostError,
    OnCrash,
    OwnerKind,
    PayloadError,
    ReasonCode,
    TaskFinishedError,
    TaskNotFoundError,
    TaskStatus,
    statements,
)

from .conftest import ALICE, BOB

MINUTE = timedelta(minutes=1)
NAME = {"method": "elicitation/create", "params": {"message": "Your name?"}}
CAN_BE_ASKED = {"capabilities": {"elicitation": {}}}
AGREED = {"action": "accept", "content": {"again": True}}


async def kinds(store, task):
    return [event.kind for event in await store.list_events(task.task_id, auth=ALICE)]


async def answer_all(store, task, response):
    details = await store.get_details(task.task_id, auth=ALICE)
    return await store.answer_inputs(task.task_id, dict.fromkeys(details.input_requests, response), auth=ALICE)


async def error_of(store, task):
    outcome = await store.get_outcome(task.task_id, auth=ALICE)
    assert isinstance(outcome.error, dict)
    return outcome.error


async def questions_of(store, task, number):
    """Wait until a task has so many open questions; return their keys."""
    version = 0
    while len(found := (await store.get_details(task.task_id, auth=ALICE)).input_requests) < number:
        changed = await store.wait_for_task(task.task_id, auth=ALICE, since_version=version)
        version = changed.version
    return list(found)


# --- retry


async def test_a_task_to_be_retried_waits_for_a_runner_and_is_claimed_once(store, peer, crash):
    """A tool that may run twice should not fail because a server was restarted."""
    task = await store.create_task(
        auth=ALICE, name="index", request={"path": "/a"}, on_crash=OnCrash.RETRY, caller={"protocolVersion": "1"}
    )
    await store.handle(task).progress(62, total=100)
    crash(store)

    report = await peer.recover()
    queued = await peer.get_task(task.task_id, auth=ALICE)
    claim = await peer.claim_task(["index"])
    again = await peer.claim_task(["index"])

    assert (report.recovered, report.queued) == ((task.task_id,), (task.task_id,))
    assert (queued.status, queued.owner_kind, queued.crashes) == (TaskStatus.WORKING, OwnerKind.QUEUED, 1)
    assert queued.status_message == (
        "CRASH_RECOVERY: the server process that ran this task died before it finished; it waits to be run again."
    )
    assert again is None
    assert (claim.request, claim.caller, claim.state, claim.answers) == (
        {"path": "/a"},
        {"protocolVersion": "1"},
        None,
        {},
    )
    assert (claim.task.owner_kind, claim.task.attempt, claim.task.progress) == (OwnerKind.INSTANCE, 3, None)
    done = await peer.handle(claim.task).complete({"files": 3})
    assert done.status is TaskStatus.COMPLETED
    assert await kinds(peer, task) == [EventKind.CREATED, EventKind.QUEUED, EventKind.CLAIMED, EventKind.COMPLETED]


async def test_the_process_that_was_taken_for_dead_can_say_nothing_more(store, peer, crash):
    """Its coroutine may run on beside the next run of the same task."""
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    late = store.handle(task)
    crash(store)
    await peer.recover()

    with pytest.raises(LeaseLostError):
        await late.complete({"by": "the dead"})
    claim = await peer.claim_task(["index"])
    with pytest.raises(LeaseLostError):
        await late.fail("by the dead")
    await peer.handle(claim.task).complete({"by": "the living"})

    assert (await peer.get_outcome(task.task_id, auth=ALICE)).result == {"by": "the living"}


async def test_a_tool_that_kills_its_process_again_and_again_is_failed_with_its_history(open_store, crash):
    """A poison tool would take one server after the other down for ever."""
    first = await open_store()
    task = await first.create_task(auth=ALICE, name="poison", on_crash=OnCrash.RETRY)
    crash(first)
    for _ in range(2):
        runner = await open_store()
        await runner.recover()
        assert await runner.claim_task(["poison"]) is not None
        crash(runner)

    last = await open_store()
    report = await last.recover()

    assert (report.recovered, report.queued) == ((task.task_id,), ())
    error = await error_of(last, task)
    assert error["data"] == {
        "reason": "CRASH_RECOVERY",
        "progress": None,
        "total": None,
        "attempt": 5,
        "crashes": 3,
        "retrySafe": True,
    }
    assert error["message"] == (
        "CRASH_RECOVERY: the server process that ran this task died before it finished; so did 2 before it, and it is "
        "not run again."
    )
    assert await last.claim_task(["poison"]) is None


async def test_what_a_lost_attempt_asked_is_asked_no_more(store, peer, crash):
    """Nobody would hear the answer, and the next attempt asks for itself."""
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    asking = asyncio.create_task(store.handle(task).ask({"title": "Which?"}))
    await peer.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
    asked = await peer.get_details(task.task_id, auth=ALICE)
    crash(store)
    await peer.recover()

    queued = await peer.get_details(task.task_id, auth=ALICE)
    claim = await peer.claim_task(["index"])
    again = asyncio.create_task(peer.handle(claim.task).ask({"title": "Which now?"}))
    await peer.wait_for_task(task.task_id, auth=ALICE, since_version=claim.task.version)
    asked_again = await peer.get_details(task.task_id, auth=ALICE)
    asking.cancel()
    again.cancel()
    await asyncio.wait({asking, again})

    assert (queued.task.status, queued.input_requests) == (TaskStatus.WORKING, {})
    assert list(asked.input_requests.values()) == ["Which?"]
    assert list(asked_again.input_requests.values()) == ["Which now?"]


async def test_one_attempt_is_no_retry(store, peer, crash):
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.RETRY, max_attempts=1)
    crash(store)

    await peer.recover()

    error = await error_of(peer, task)
    assert error["data"]["crashes"] == 1
    assert error["message"] == "CRASH_RECOVERY: the server process that ran this task died before it finished."


async def test_a_server_that_stops_in_good_order_queues_at_once_and_counts_no_crash(open_store):
    """A deployment restarts servers every day; that must not use up a task's attempts."""
    observer = await open_store()
    store = await open_store()
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY, max_attempts=1)

    await asyncio.to_thread(store._parts.close)

    queued = await observer.get_task(task.task_id, auth=ALICE)
    assert (queued.owner_kind, queued.crashes) == (OwnerKind.QUEUED, 0)
    events = await observer.list_events(task.task_id, auth=ALICE)
    assert (events[-1].kind, events[-1].reason) == (EventKind.QUEUED, ReasonCode.SERVER_STOPPED)


async def test_a_report_that_was_held_back_goes_with_the_task_that_is_handed_over(store):
    """Whoever runs it next, and whoever asks meanwhile, should know how far it came."""
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    handle = store.handle(task)
    await handle.progress(1, total=10)
    await handle.progress(7)

    queued = await handle.hand_over()

    assert (queued.progress, queued.progress_total) == (7, 10)


async def test_a_handle_can_hand_its_task_over_by_itself(store):
    kept, lost = [
        await store.create_task(auth=ALICE, name="index", on_crash=policy) for policy in (OnCrash.RETRY, OnCrash.FAIL)
    ]

    requeued, failed = [await store.handle(task).hand_over() for task in (kept, lost)]

    assert (requeued.status, requeued.owner_kind) == (TaskStatus.WORKING, OwnerKind.QUEUED)
    assert requeued.status_message == (
        "SERVER_STOPPED: the server process that ran this task stopped before it finished; it waits to be run again."
    )
    assert failed.status is TaskStatus.FAILED
    assert (await error_of(store, lost))["data"]["reason"] == "SERVER_STOPPED"
    with pytest.raises(LeaseLostError):
        store.handle(kept)


async def test_only_a_server_of_the_same_name_that_knows_the_tool_claims_a_task(open_store, crash):
    """Two servers may share a database, and only one of them has the tool."""
    store, other, same = (
        await open_store(server="reports"),
        await open_store(server="mails"),
        await open_store(server="reports"),
    )
    await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    crash(store)
    await same.recover()

    assert await other.claim_task(["index"]) is None
    assert await same.claim_task(["render"]) is None
    assert await same.claim_task(["render", "index"]) is not None


async def test_what_a_runner_does_not_know_does_not_stand_in_its_way(store, peer, crash):
    """Tools that were removed leave tasks behind; the tasks of the others wait behind more than a page of them."""
    for _ in range(101):
        await store.create_task(auth=ALICE, name="removed", on_crash=OnCrash.RETRY)
    await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    crash(store)
    await peer.recover()

    claim = await peer.claim_task(["index"])

    assert claim is not None


async def test_twenty_claims_at_once_take_each_task_once(store, peer, open_store, crash):
    """Replicas look for work at the same moment."""
    created = {(await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)).task_id for _ in range(10)}
    crash(store)
    await peer.recover()
    third = await open_store()

    claims = await asyncio.gather(*(each.claim_task(["index"]) for each in (peer, third) * 10))

    taken = [claim.task.task_id for claim in claims if claim is not None]
    assert sorted(taken) == sorted(created)


async def test_a_task_that_no_runner_claims_ends_at_its_ttl(store, peer, crash, clock):
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY, ttl=MINUTE)
    crash(store)
    await peer.recover()

    clock.advance(MINUTE)

    assert await peer.claim_task(["index"]) is None
    assert (await peer.get_task(task.task_id, auth=ALICE)).status is TaskStatus.FAILED
    assert (await error_of(peer, task))["data"] == {"reason": "NO_RUNNER"}


async def test_a_crash_after_the_ttl_is_no_reason_to_run_again(store, peer, crash, clock):
    """A live task outlives its ttl only while a process works on it; a queued one would end at once."""
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY, ttl=MINUTE)
    clock.advance(MINUTE)
    crash(store)

    await peer.recover()

    assert (await error_of(peer, task))["data"]["reason"] == "CRASH_RECOVERY"


async def test_a_queued_task_is_cancelled_at_once(store, peer, crash):
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    crash(store)
    await peer.recover()

    cancelled = await peer.cancel_task(task.task_id, auth=ALICE)

    assert cancelled.status is TaskStatus.CANCELLED
    assert await peer.claim_task(["index"]) is None


async def test_a_claim_that_waits_is_woken_by_what_is_queued_here_or_elsewhere(store, peer, crash, open_store):
    third = await open_store()
    task = await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    here = asyncio.create_task(peer.claim_task(["index"], timeout=timedelta(seconds=30)))
    await asyncio.sleep(0)
    crash(store)

    await peer.recover()

    claim = await asyncio.wait_for(here, 10)
    assert claim.task.task_id == task.task_id
    elsewhere = asyncio.create_task(third.claim_task(["index"], timeout=timedelta(seconds=30)))
    await peer.handle(claim.task).hand_over()
    claim = await asyncio.wait_for(elsewhere, 10)
    assert claim.task.task_id == task.task_id


async def test_a_claim_whose_caller_is_cancelled_leaves_its_task_to_the_next(store, peer, crash):
    """It may have been committed already; nobody would ever run the task."""
    await store.create_task(auth=ALICE, name="index", on_crash=OnCrash.RETRY)
    crash(store)
    await peer.recover()

    for pause in range(12):
        claiming = asyncio.create_task(peer.claim_task(["index"]))
        for _ in range(pause):
            await asyncio.sleep(0.001)
        if claiming.done() and claiming.result() is not None:
            break
        claiming.cancel()
        await asyncio.wait({claiming})
    else:
        claiming = asyncio.create_task(peer.claim_task(["index"], timeout=timedelta(seconds=30)))

    claim = await asyncio.wait_for(claiming, 10)
    assert (await peer.handle(claim.task).complete({})).status is TaskStatus.COMPLETED


# --- ask


async def test_a_requestor_who_agrees_has_the_task_run_again(store, peer, crash):
    """Only the user knows whether a second run of this tool does harm."""
    task = await store.create_task(auth=ALICE, name="send", on_crash=OnCrash.ASK, caller=CAN_BE_ASKED)
    await store.handle(task).progress(62, total=100)
    crash(store)

    report = await peer.recover()
    details = await peer.get_details(task.task_id, auth=ALICE)
    answered = await answer_all(peer, task, AGREED)

    assert report.asked == (task.task_id,)
    assert (details.task.status, details.task.owner_kind) == (TaskStatus.INPUT_REQUIRED, OwnerKind.PARKED)
    assert details.task.status_message == (
        "CRASH_RECOVERY: the server process that ran this task died before it finished; it waits to hear whether to "
        "run again."
    )
    ((key, question),) = details.input_requests.items()
    assert key == "run-again-1"
    assert question == {
        "method": "elicitation/create",
        "params": {
            "mode": "form",
            "message": "The server stopped at 62% of send. Run it again?",
            "requestedSchema": {
                "type": "object",
                "properties": {"again": {"type": "boolean", "title": "Run it again", "default": True}},
                "required": ["again"],
            },
        },
    }
    assert (answered.status, answered.owner_kind) == (TaskStatus.WORKING, OwnerKind.QUEUED)
    assert (await peer.claim_task(["send"])).task.task_id == task.task_id


@pytest.mark.parametrize(
    "answer",
    [
        {"action": "decline"},
        {"action": "cancel"},
        {"action": "accept", "content": {"again": False}},
        {"action": "accept", "content": {"again": "yes"}},
        {"action": "accept"},
        "yes",
        None,
    ],
    ids=str,
)
async def test_any_other_answer_fails_the_task(store, peer, crash, answer):
    """Running a payment twice by mistake is worse than not running it."""
    task = await store.create_task(auth=ALICE, name="pay", on_crash=OnCrash.ASK, caller=CAN_BE_ASKED)
    crash(store)
    await peer.recover()

    failed = await answer_all(peer, task, answer)

    assert (failed.status, failed.crashes) == (TaskStatus.FAILED, 1)
    assert await error_of(peer, task) == {
        "code": -32603,
        "message": "CRASH_RECOVERY: the server process that ran this task is gone, and its requestor did not want it "
        "run again.",
        "data": {
            "reason": "CRASH_RECOVERY",
            "progress": None,
            "total": None,
            "attempt": 2,
            "crashes": 1,
            "retrySafe": False,
        },
    }
    assert await peer.claim_task(["pay"]) is None


@pytest.mark.parametrize("caller", [None, {}, {"capabilities": {}}, {"capabilities": {"sampling": {}}}, "?"], ids=str)
async def test_a_client_that_cannot_ask_its_user_gets_the_verdict(store, peer, crash, caller):
    """Else the task would wait for an answer that can never come."""
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.ASK, caller=caller)
    crash(store)

    report = await peer.recover()

    assert report.asked == ()
    assert (await error_of(peer, task))["data"]["reason"] == "CRASH_RECOVERY"


async def test_a_question_whether_to_run_again_names_no_progress_that_there_was_not(store, peer, crash):
    """A task that died before its first report did not stop at 0 %, nor at none."""
    task = await store.create_task(auth=ALICE, name="send", on_crash=OnCrash.ASK, caller=CAN_BE_ASKED)
    await store.handle(task).progress(62)  # of an unknown total
    crash(store)
    await peer.recover()

    details = await peer.get_details(task.task_id, auth=ALICE)

    (question,) = details.input_requests.values()
    assert question["params"]["message"] == "The server stopped during send. Run it again?"


async def test_a_stranger_cannot_answer_whether_to_run_again(store, peer, crash):
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.ASK, caller=CAN_BE_ASKED)
    crash(store)
    await peer.recover()
    (key,) = (await peer.get_details(task.task_id, auth=ALICE)).input_requests

    with pytest.raises(TaskNotFoundError):
        await peer.answer_inputs(task.task_id, {key: AGREED}, auth=BOB)

    assert (await peer.get_task(task.task_id, auth=ALICE)).status is TaskStatus.INPUT_REQUIRED


# --- external


async def test_an_external_task_is_failed_by_no_crash_of_ours(store, peer, crash):
    """The work is in a CI system; the process that started it has done its part."""
    task = await store.create_task(auth=ALICE, name="build", on_crash=OnCrash.EXTERNAL)
    crash(store)

    report = await peer.recover()
    handle = await peer.operator.handle(task.task_id)
    await handle.progress(1, total=2, message="tests")
    done = await handle.complete({"green": True})

    assert (report.recovered, task.owner_kind) == ((), OwnerKind.EXTERNAL)
    assert (done.status, done.progress, done.status_message) == (TaskStatus.COMPLETED, 1.0, "tests")
    assert await kinds(peer, task) == [EventKind.CREATED, EventKind.COMPLETED]


async def test_an_external_task_can_ask_its_requestor_but_not_be_parked(store, peer):
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.EXTERNAL)
    handle = await peer.operator.handle(task.task_id)

    asking = asyncio.create_task(handle.ask({"name": NAME}))
    await questions_of(store, task, 1)
    await answer_all(store, task, "Ada")

    assert await asyncio.wait_for(asking, 10) == {"name": "Ada"}
    assert (await store.get_task(task.task_id, auth=ALICE)).owner_kind is OwnerKind.EXTERNAL
    with pytest.raises(ValueError, match="external"):
        await handle.park({"name": NAME})


async def test_an_external_task_ends_at_its_ttl(store, clock):
    """Nobody may ever report its outcome."""
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.EXTERNAL, ttl=MINUTE)
    handle = await store.operator.handle(task.task_id)
    clock.advance(MINUTE)

    with pytest.raises(TaskFinishedError):
        await handle.complete({})

    assert (await error_of(store, task))["data"] == {"reason": "TTL_EXPIRED"}


async def test_a_cancelled_external_task_refuses_its_outcome(store, peer):
    task = await store.create_task(auth=ALICE, on_crash=OnCrash.EXTERNAL)
    handle = await peer.operator.handle(task.task_id)
    await store.cancel_task(task.task_id, auth=ALICE)

    with pytest.raises(TaskFinishedError) as refusal:
        await handle.complete({})

    assert refusal.value.task.status is TaskStatus.CANCELLED


async def test_each_kind_of_task_has_one_way_to_be_taken_in_hand(store):
    external = await store.create_task(auth=ALICE, on_crash=OnCrash.EXTERNAL)
    held = await store.create_task(auth=ALICE)

    with pytest.raises(ValueError, match=r"operator\.handle"):
        store.handle(external)
    with pytest.raises(ValueError, match="not external"):
        await store.operator.handle(held.task_id)


# --- park


async def test_a_parked_task_survives_its_process_and_goes_on_where_the_answer_arrives(store, peer, crash, open_store):
    """A question may stand overnight, and the server be restarted meanwhile."""
    task = await store.create_task(auth=ALICE, name="book", request={"to": "Rome"})
    parked = await store.handle(task).park({"name": NAME, "seat": NAME}, state={"step": 2})
    crash(store)
    report = await peer.recover()
    details = await peer.get_details(task.task_id, auth=ALICE)
    first, second = sorted(details.input_requests)

    partly = await peer.answer_inputs(task.task_id, {first: "Ada"}, auth=ALICE)
    early = await peer.claim_task(["book"])
    fully = await peer.answer_inputs(task.task_id, {second: "12A"}, auth=ALICE)
    claim = await (await open_store()).claim_task(["book"])

    assert (parked.status, parked.owner_kind) == (TaskStatus.INPUT_REQUIRED, OwnerKind.PARKED)
    assert (report.recovered, early) == ((), None)
    assert (partly.status, fully.status, fully.owner_kind) == (
        TaskStatus.INPUT_REQUIRED,
        TaskStatus.WORKING,
        OwnerKind.QUEUED,
    )
    assert (claim.request, claim.state) == ({"to": "Rome"}, {"step": 2})
    assert claim.answers == {"name": "Ada", "seat": "12A"}
    assert claim.task.crashes == 0


async def test_a_parked_task_without_a_ttl_waits_for_ever(open_store, clock):
    """Nothing is counted down for it, by no read and by no sweep."""
    store = await open_store(max_ttl=None)
    task = await store.create_task(auth=ALICE, name="book", ttl=None)
    await store.handle(task).park({"title": "Which?"})
    clock.advance(timedelta(days=1000))

    waited = await store.wait_for_task(task.task_id, auth=ALICE, timeout=timedelta(0))
    swept = await store.sweep()

    assert (waited.status, waited.ttl) == (TaskStatus.INPUT_REQUIRED, None)
    assert (swept.ended, swept.deleted) == (0, 0)


async def test_whoever_parked_a_task_can_say_nothing_more(store):
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    await handle.park({"name": NAME})

    for late in (handle.complete({}), handle.fail("late"), handle.progress(1), handle.park({"name": NAME})):
        with pytest.raises(LeaseLostError):
            await late
    with pytest.raises(LeaseLostError):
        store.handle(task)

    assert (await store.get_task(task.task_id, auth=ALICE)).status is TaskStatus.INPUT_REQUIRED


async def test_what_a_parked_tool_said_before_is_kept(store):
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    await handle.progress(1, total=3, message="first")
    await handle.progress(2, total=3, message="second")

    parked = await handle.park({"name": NAME})

    assert (parked.progress, parked.status_message) == (2.0, "second")


async def test_a_task_parked_twice_hears_the_answers_of_the_second_time(store):
    """Each round of questions has its own state and answers."""
    task = await store.create_task(auth=ALICE, name="book")
    await store.handle(task).park({"name": NAME}, state=1)
    await answer_all(store, task, "Ada")
    first = await store.claim_task(["book"])
    await store.handle(first.task).park({"name": NAME}, state=2)
    await answer_all(store, task, "Bob")

    second = await store.claim_task(["book"])

    assert (first.state, first.answers) == (1, {"name": "Ada"})
    assert (second.state, second.answers) == (2, {"name": "Bob"})


async def test_a_run_that_dies_after_its_answers_gets_them_again_if_it_may_run_again(store, peer, crash):
    task = await store.create_task(auth=ALICE, name="book", on_crash=OnCrash.RETRY)
    await store.handle(task).park({"name": NAME}, state="s")
    await answer_all(store, task, "Ada")
    assert await store.claim_task(["book"]) is not None
    crash(store)
    await peer.recover()

    claim = await peer.claim_task(["book"])

    assert (claim.state, claim.answers, claim.task.crashes) == ("s", {"name": "Ada"}, 1)


async def test_a_parked_task_is_cancelled_at_once_and_shows_no_questions(store):
    task = await store.create_task(auth=ALICE, name="book")
    await store.handle(task).park({"name": NAME})

    await store.cancel_task(task.task_id, auth=ALICE)

    details = await store.get_details(task.task_id, auth=ALICE)
    assert (details.task.status, details.input_requests) == (TaskStatus.CANCELLED, {})
    assert await store.claim_task(["book"]) is None


async def test_a_question_that_cannot_be_stored_leaves_the_task_held(store):
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)

    for questions, state in (({"name": float("nan")}, None), ({"name": NAME}, float("nan"))):
        with pytest.raises(PayloadError):
            await handle.park(questions, state=state)
    with pytest.raises(ValueError, match="at least one"):
        await handle.park({})

    assert (await handle.complete({})).status is TaskStatus.COMPLETED


async def test_two_answers_from_two_connections_queue_a_parked_task_once(store, peer):
    """Each may see the other's question as open; then nobody would go on."""
    for _ in range(20):
        task = await store.create_task(auth=ALICE, name="book")
        await store.handle(task).park({"a": NAME, "b": NAME})
        keys = sorted((await store.get_details(task.task_id, auth=ALICE)).input_requests)

        await asyncio.gather(
            *(
                each.answer_inputs(task.task_id, {key: key}, auth=ALICE)
                for each, key in zip((store, peer), keys, strict=True)
            )
        )

        assert await kinds(store, task) == [EventKind.CREATED, EventKind.INPUT_REQUIRED, EventKind.RESUMED]
        claim = await store.claim_task(["book"])
        assert claim.task.task_id == task.task_id


async def test_what_is_kept_for_another_run_goes_with_the_finish(store):
    """A token may be in it; nothing needs it any more."""
    task = await store.create_task(auth=ALICE, name="book", caller={"token": "secret-token"})
    await store.handle(task).park({"name": NAME}, state="secret-state")
    await answer_all(store, task, "Ada")
    claim = await store.claim_task(["book"])
    await store.handle(claim.task).complete({})

    row = await store._parts.read_unit(lambda t: t.row(statements.FOR_ANOTHER_RUN, {"task_id": task.task_id}))
    assert (row["caller"], row["parked"]) == (None, None)


# --- asking while another question is open


async def test_a_tool_may_ask_one_thing_while_it_waits_for_another(store):
    """Two coroutines of one tool ask their own questions; each goes on with its own answer."""
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    first = asyncio.create_task(handle.ask({"first": NAME}))
    second = asyncio.create_task(handle.ask({"second": NAME}))
    keys = {key.rpartition("-")[0]: key for key in await questions_of(store, task, 2)}

    partly = await store.answer_inputs(task.task_id, {keys["second"]: "two"}, auth=ALICE)
    heard = await asyncio.wait_for(second, 10)
    fully = await store.answer_inputs(task.task_id, {keys["first"]: "one"}, auth=ALICE)

    assert (heard, partly.status) == ({"second": "two"}, TaskStatus.INPUT_REQUIRED)
    assert (await asyncio.wait_for(first, 10), fully.status) == ({"first": "one"}, TaskStatus.WORKING)


async def test_a_question_that_is_given_up_leaves_the_others_open(store):
    task = await store.create_task(auth=ALICE)
    handle = store.handle(task)
    kept = asyncio.create_task(handle.ask({"kept": NAME}))
    given_up = asyncio.create_task(handle.ask({"given up": NAME}))
    await questions_of(store, task, 2)

    given_up.cancel()
    await asyncio.wait({given_up})
    details = await store.get_details(task.task_id, auth=ALICE)
    await answer_all(store, task, "Ada")

    assert details.task.status is TaskStatus.INPUT_REQUIRED
    assert [key.rpartition("-")[0] for key in details.input_requests] == ["kept"]
    assert await asyncio.wait_for(kept, 10) == {"kept": "Ada"}


async def test_a_partial_answer_is_a_change_that_waiters_see(store, peer):
    """Who shows the open questions must learn that one of them is gone."""
    task = await store.create_task(auth=ALICE)
    parked = await store.handle(task).park({"a": NAME, "b": NAME})
    key = min((await store.get_details(task.task_id, auth=ALICE)).input_requests)
    waiting = asyncio.create_task(
        peer.wait_for_task(task.task_id, auth=ALICE, since_version=parked.version, timeout=timedelta(seconds=30))
    )

    await store.answer_inputs(task.task_id, {key: 1}, auth=ALICE)

    seen = await asyncio.wait_for(waiting, 10)
    assert (seen.status, seen.version) == (TaskStatus.INPUT_REQUIRED, parked.version + 1)


# --- arguments and hooks


@pytest.mark.parametrize("attempts", [0, -1, 2**63])
async def test_a_senseless_number_of_attempts_is_refused(store, attempts):
    with pytest.raises(ValueError, match="max_attempts"):
        await store.create_task(auth=ALICE, on_crash=OnCrash.RETRY, max_attempts=attempts)


async def test_an_unknown_policy_is_refused(store):
    with pytest.raises(ValueError, match="OnCrash"):
        await store.create_task(auth=ALICE, on_crash="shrug")


async def test_the_hook_gets_what_recovery_decided_over(open_store, crash, caplog):
    """Who pages somebody, or counts crashes, needs the tasks; what the hook raises must not stop recovery."""
    seen = []

    def hook(tasks):
        seen.extend((task.task_id, task.status) for task in tasks)
        raise RuntimeError("the pager is broken")

    store = await open_store()
    tasks = [await store.create_task(auth=ALICE) for _ in range(3)]
    crash(store)
    peer = await open_store(on_recovered=hook)

    report = await peer.recover()

    assert sorted(report.recovered) == sorted(task.task_id for task in tasks)
    assert sorted(seen) == sorted((task.task_id, TaskStatus.FAILED) for task in tasks)
    assert "the pager is broken" in caplog.text
