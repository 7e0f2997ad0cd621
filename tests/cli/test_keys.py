"""Keys on the command line: made, and rotated beside a server that works on."""

import re

import pytest

from taskstore import AuthContext, CipherError, StoreOptions, TaskStore

ALICE = AuthContext(subject="alice")


def test_a_new_key_is_one_that_the_store_takes(run):
    made = [run("keys", "new") for _ in range(2)]

    assert all(re.fullmatch(r"[0-9a-f]{64}\n", each.out) for each in made)
    assert made[0].out != made[1].out
    StoreOptions(keys=[bytes.fromhex(each.out) for each in made])


async def test_a_rotation_seals_again_beside_a_running_server(run_beside, database_url):
    """A key that may have leaked must go without a stop of the servers."""
    old, new = [(await run_beside("keys", "new")).out.strip() for _ in range(2)]
    async with TaskStore.open(database_url, options=StoreOptions(keys=[bytes.fromhex(old)])) as server:
        task = await server.create_task(auth=ALICE)
        await server.handle(task).complete({"pages": 10})

        rotated = await run_beside("keys", "rotate", database_url, "--json", TASKSTORE_KEYS=f"{new},{old}")
        again = await run_beside("keys", "rotate", database_url, TASKSTORE_KEYS=new)

        with pytest.raises(CipherError):
            await server.get_outcome(task.task_id, auth=ALICE)
    async with TaskStore.open(database_url, options=StoreOptions(keys=[bytes.fromhex(new)])) as server:
        assert (await server.get_outcome(task.task_id, auth=ALICE)).result == {"pages": 10}
    assert (rotated.code, rotated.json) == (0, {"resealed": 1})
    assert (again.code, again.out) == (0, "0 tasks sealed again.\n")


async def test_a_rotation_without_the_old_key_says_which_is_missing(run_beside, database_url):
    old, new = [(await run_beside("keys", "new")).out.strip() for _ in range(2)]
    async with TaskStore.open(database_url, options=StoreOptions(keys=[bytes.fromhex(old)])) as server:
        task = await server.create_task(auth=ALICE)
        await server.handle(task).complete({"pages": 10})

        refused = await run_beside("keys", "rotate", database_url, TASKSTORE_KEYS=new)

        assert (await server.get_outcome(task.task_id, auth=ALICE)).result == {"pages": 10}
    assert refused.code == 2
    assert "no key of the ring sealed it" in refused.words
    assert "TASKSTORE_KEYS" in refused.words


@pytest.mark.parametrize("keys", ["", "zz", "00" * 32, "ab"], ids=["none", "no hex", "zeros", "short"])
def test_a_rotation_needs_real_keys(run, tmp_path, keys):
    refused = run("keys", "rotate", f"sqlite:///{tmp_path / 'tasks.db'}", TASKSTORE_KEYS=keys)

    assert refused.code == 2
    assert not (tmp_path / "tasks.db").exists()
