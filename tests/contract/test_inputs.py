"""Input requests, where a test must come in between a call's look and its write."""

import asyncio
from functools import partial

import pytest

from taskstore import TaskFinishedError, operations, payload

from .conftest import ALICE


async def test_an_answer_that_meets_the_end_changes_nothing(store):
    """Seen in the crash laboratory: the task was cancelled between an answer's look and its write, which went in."""
    task = await store.create_task(auth=ALICE)
    asking = asyncio.create_task(store.handle(task).ask({"name": {"method": "elicitation/create"}}))
    await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
    (key,) = (await store.get_details(task.task_id, auth=ALICE)).input_requests
    ended = await store.cancel_task(task.task_id, auth=ALICE)

    parts, responses = store._parts, {key: payload.encode("Ann")}
    answer = partial(operations.answer_inputs, task_id=task.task_id, responses=responses, call=parts.call(ALICE))
    answered = await parts.write_unit(answer)

    assert answered == ended
    assert await store.get_task(task.task_id, auth=ALICE) == ended
    with pytest.raises(TaskFinishedError):
        await asking


async def test_a_cancel_during_a_look_for_answers_is_heard_as_one(store, monkeypatch):
    """The look showed the task as it was before; its holder was told that it had lost the task."""
    task = await store.create_task(auth=ALICE)
    asking = asyncio.create_task(store.handle(task).ask({"name": {"method": "elicitation/create"}}))
    await store.wait_for_task(task.task_id, auth=ALICE, since_version=task.version)
    parts, read_unit = store._parts, store._parts.read_unit

    async def cancelled_meanwhile(*arguments, **keywords):
        seen = await read_unit(*arguments, **keywords)
        monkeypatch.setattr(parts, "read_unit", read_unit)
        await store.cancel_task(task.task_id, auth=ALICE)
        return seen

    monkeypatch.setattr(parts, "read_unit", cancelled_meanwhile)
    parts.waiting.notify(task.task_id)

    with pytest.raises(TaskFinishedError):
        await asyncio.wait_for(asking, 10)
