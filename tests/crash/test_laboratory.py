"""The crash laboratory: short runs of it, and that it would see what it looks for."""

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from taskstore import TaskStore
from taskstore.database import Database
from taskstore.lanes import Lane
from taskstore.migrate import upgrade
from tests.unit.outside import PATIENCE_SECONDS, query

from . import points
from .invariants import Checker, Life
from .laboratory import Laboratory, Plan
from .machine import Machine
from .outages import Ground, postgres_ground, sqlite_ground
from .workload import ALICE, ONCE, Character, Log, options

SEED = 20251124  # even, so payloads are plain; one more, and they are sealed


@pytest.mark.parametrize(
    ("open_ground", "outage", "seed"),
    [
        (sqlite_ground, "lock-held", SEED),
        (sqlite_ground, "file-deleted", SEED + 1),
        (sqlite_ground, "file-replaced", SEED),
        (postgres_ground, "server-killed", SEED + 1),
        (postgres_ground, "connections-cut", SEED),
    ],
    ids=lambda value: value.__name__.removesuffix("_ground") if callable(value) else str(value),
)
async def test_whatever_dies_nothing_acknowledged_is_lost(
    open_ground: Callable[[Path], AbstractContextManager[Ground]], outage: str, seed: int, tmp_path: Path
) -> None:
    """Processes are killed, suspended and ended while they work, and their database goes away under them."""
    plan = Plan(seed=seed, processes=3, seconds=5, kill_every_seconds=0.3, round_seconds=5, outages=[outage])

    with open_ground(tmp_path) as ground:
        report = await Laboratory(ground, plan, tmp_path).run()

    assert report.violations == []
    assert report.counts["created"] > 0
    assert report.kills > 0
    assert report.counts[f"outage: {outage}"] == 1


@pytest.mark.parametrize("point", points.NAMES)
async def test_a_worker_dies_at_its_fail_point(point: str, tmp_path: Path) -> None:
    """A point that is never reached would look like one that is survived."""
    log, ended = tmp_path / "life.jsonl", asyncio.Event()
    codes: list[int] = []
    pids: list[int] = []

    def hear(_machine: Machine, message: dict[str, int]) -> None:
        if "started" in message:
            pids.append(message["pid"])
        else:
            codes.append(message["code"])
            ended.set()

    machine = Machine(own_namespace=False, errors=tmp_path / "errors", heard=hear)
    await machine.start()
    try:
        machine.fork(
            {
                "url": f"sqlite:///{tmp_path / 'tasks.db'}",
                "seed": SEED,
                "life": 0,
                "log": str(log),
                "point": point,
                "after": 1,
                "act": "kill",
                "again": [],
            }
        )
        async with asyncio.timeout(PATIENCE_SECONDS):
            if point == "before-release":  # which comes with a close, as nobody else died
                while not (log.exists() and b"opened" in log.read_bytes()):  # noqa: ASYNC110  another process writes it
                    await asyncio.sleep(0.01)
                machine.signal(pids[0], signal.SIGTERM)
            await ended.wait()
    finally:
        await machine.stop()

    assert codes == [-signal.SIGKILL]
    assert f'"did": "struck", "point": "{point}"' in log.read_text()


def test_a_fail_point_costs_nothing_where_nobody_armed_one() -> None:
    """Servers import the package as it is: there the points are comments."""
    names = {name for function in (Database._transact, Lane._run) for name in function.__code__.co_names}

    assert {"transaction-begun", "before-callers-hear"} <= set(points.NAMES)
    assert "_reach_fail_point" not in names
    assert not any("_reach_fail_point" in vars(module) for module in sys.modules.values() if module is not points)


# --- that the checker sees what it looks for

TAMPERING = {
    "is not there": ["DELETE FROM taskstore_tasks"],
    "another result": ["UPDATE taskstore_tasks SET result = CAST('{}' AS BLOB)"],
    "after its end at": ["UPDATE taskstore_tasks SET version = version + 1"],
    "not exactly one end": ["DELETE FROM taskstore_events WHERE kind = 'completed'"],
    "does not begin with its creation": ["DELETE FROM taskstore_events WHERE kind = 'created'"],
    "does not join": ["UPDATE taskstore_events SET from_status = 'input_required' WHERE kind = 'completed'"],
    "history ends with": ["UPDATE taskstore_events SET kind = 'cancelled' WHERE kind = 'completed'"],
    "from a process that lived": [
        "UPDATE taskstore_tasks SET status = 'failed', result = NULL, error = CAST("
        """'{"code": -32603, "message": "", "data": {"reason": "CRASH_RECOVERY"}}' AS BLOB)""",
        "UPDATE taskstore_events SET kind = 'recovered', to_status = 'failed', reason = 'CRASH_RECOVERY', attempt = 2"
        " WHERE kind = 'completed'",
    ],
    "its outcome was acknowledged, and it is working": [
        "UPDATE taskstore_tasks SET status = 'working', finished_at = NULL, result = NULL, outcome_digest = NULL, "
        "owner_kind = 'instance'"
    ],
}


@pytest.mark.parametrize("violation", [None, *TAMPERING])
async def test_the_checker_sees_what_is_wrong(violation: str | None, tmp_path: Path) -> None:
    """A laboratory that can find nothing would report zero violations, too."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    upgrade(url)
    life = Life(0, 0, elsewhere=False, log=tmp_path / "life.jsonl")
    log, name = Log(str(life.log)), next(filter(_is_plain, (f"0-{number}" for number in range(100))))
    async with TaskStore.open(url, options=options(SEED)) as store:
        log.note("creating", name=name)
        task = await store.create_task(auth=ALICE, method=name, name=ONCE)
        log.note("created", name=name, task=task.task_id, existing=False)
        done = await store.handle(task).complete(Character(name).result)
        log.note("finished", name=name, task=done.task_id, status=done.status, version=done.version)
        for statement in TAMPERING.get(violation or "", ()):
            query(url, statement)

        checker = Checker()
        checker.read_logs([life])
        await checker.check(store, {0: life})

    if violation is None:
        assert checker.violations == []
    else:
        assert any(violation in each for each in checker.violations), checker.violations


async def test_the_checker_sees_a_task_that_changes_after_it_was_checked(tmp_path: Path) -> None:
    """What one check found finished must be the same in the next."""
    url = f"sqlite:///{tmp_path / 'tasks.db'}"
    life = Life(0, 0, elsewhere=False, log=tmp_path / "life.jsonl")
    log = Log(str(life.log))
    async with TaskStore.open(url, options=options(SEED)) as store:
        log.note("creating", name="0-1")
        task = await store.create_task(auth=ALICE, method="0-1", name=ONCE)
        await store.cancel_task(task.task_id, auth=ALICE)
        checker = Checker()
        checker.read_logs([life])
        await checker.check(store, {0: life})
        before = list(checker.violations)

        query(url, "UPDATE taskstore_tasks SET version = version + 1")
        await checker.check(store, {0: life})

    assert before == []
    assert ["changed after its end" in each for each in checker.violations] == [True]


@pytest.mark.parametrize(
    ("suspensions", "late_ms"), [([], 4000), ([(900, 4900)], 100), ([(100, 200)], 4000), ([(4000, 4900)], 4000)]
)
def test_what_was_heard_before_a_suspension_was_not_heard_after_the_loss(
    suspensions: list[tuple[int, int | None]], late_ms: int, tmp_path: Path
) -> None:
    """A process that is stopped between hearing and writing down is not one whose store goes on without its file."""
    life = Life(0, 0, elsewhere=False, log=tmp_path / "life.jsonl", suspensions=suspensions)
    life.robbed_at, life.acknowledged_at = 1000, 5000

    assert life.late_ms == late_ms


def _is_plain(name: str) -> bool:
    character = Character(name)
    plain = not (character.is_error or character.is_brief or character.is_deleted or character.steps)
    return character.ends == "complete" and plain
