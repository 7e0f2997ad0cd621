"""Whose task it is: exact equality, and nothing that tells a foreign task from no task."""

import inspect
import itertools

from taskstore import AuthContext, TaskStore
from taskstore.testing.contract.binding import CALLS


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
