"""Whose task it is: exact equality, and nothing that tells a foreign task from no task."""

import inspect
import itertools

import pytest

from taskstore import (
    AuthContext,
    BindingError,
    IdempotencyConflictError,
    TaskNotFoundError,
    TaskStatus,
    TaskStore,
)
from taskstore.testing.contract.binding import CALLS

from .conftest import ALICE, BOB


def test_every_call_that_names_a_task_is_among_those_tested_here():
    takes_auth = {
        name
        for name, method in inspect.getmembers(TaskStore, inspect.isfunction)
        if not name.startswith("_") and {"task_id", "auth"} <= set(inspect.signature(method).parameters)
    }

    assert takes_auth == set(CALLS)


async def test_every_component_of_an_auth_context_counts(store):
    """The same subject of another issuer, or of another tenant, is somebody else."""
    values = (None, "a", "b", "ab")
    contexts = [
        AuthContext(issuer=issuer, subject=subject, client_id=client_id, tenant=tenant)
        for issuer, subject, client_id, tenant in itertools.product(values, repeat=4)
        if (issuer, subject, client_id, tenant) != (None,) * 4
    ]

    keys = {store._parts.binding.auth_key(context) for context in contexts}

    assert len(keys) == len(contexts)
    assert "" not in keys


OLD, NEW = b"the old secret, long enough", b"the new secret, long enough"


@pytest.mark.parametrize("former", [OLD, None])
async def test_a_new_binding_secret_takes_over_what_the_old_one_bound(open_store, finish, former):
    """A secret must be replaceable, also where there was none at first, and nobody may lose a task by it."""
    old = await open_store(binding_secret=former)
    done = await finish(old, {"pages": 10})
    live = await old.create_task(auth=ALICE, idempotency_key="once", request={"a": 1})
    bobs = await finish(old, auth=BOB)
    new = await open_store(binding_secret=NEW, old_binding_secrets=[former])

    outcome = await new.get_outcome(done.task_id, auth=ALICE)
    listed = await new.list_tasks(auth=ALICE)
    again = await new.create_task(auth=ALICE, idempotency_key="once", request={"a": 1})
    cancelled = await new.cancel_task(live.task_id, auth=ALICE)

    assert outcome.result == {"pages": 10}
    assert {task.task_id for task in listed.tasks} == {done.task_id, live.task_id}
    assert (again.task_id, again.existing) == (live.task_id, True)
    assert cancelled.status is TaskStatus.CANCELLED
    with pytest.raises(TaskNotFoundError):
        await new.get_task(bobs.task_id, auth=ALICE)
    assert (await new.list_tasks(auth=BOB)).tasks[0].task_id == bobs.task_id


async def test_an_idempotency_key_of_the_old_secret_still_refuses_another_request(open_store):
    old = await open_store(binding_secret=OLD)
    await old.create_task(auth=ALICE, idempotency_key="once", request={"a": 1})
    new = await open_store(binding_secret=NEW, old_binding_secrets=[OLD])

    with pytest.raises(IdempotencyConflictError):
        await new.create_task(auth=ALICE, idempotency_key="once", request={"a": 2})

    other = await new.create_task(auth=ALICE, idempotency_key="twice", request={"a": 2})
    assert not other.existing


async def test_what_a_server_binds_under_the_old_secret_meanwhile_is_found_too(open_store):
    """Servers get the new secret one after the other."""
    old = await open_store(binding_secret=OLD)
    new = await open_store(binding_secret=NEW, old_binding_secrets=[OLD])
    assert (await new.list_tasks(auth=ALICE)).tasks == ()

    task = await old.create_task(auth=ALICE)

    assert (await new.get_task(task.task_id, auth=ALICE)).task_id == task.task_id


async def test_once_replaced_the_old_secret_alone_opens_nothing(open_store):
    await open_store(binding_secret=OLD)
    await open_store(binding_secret=NEW, old_binding_secrets=[OLD])

    with pytest.raises(BindingError, match="old_binding_secrets"):
        await open_store(binding_secret=OLD)
    with pytest.raises(BindingError):
        await open_store(binding_secret=b"a third secret, long enough", old_binding_secrets=[OLD])
    await open_store(binding_secret=NEW)
