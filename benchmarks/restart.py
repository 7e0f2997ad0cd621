"""A server that is started again after a crash, for the scenario ``recover``.

``python -m benchmarks.restart PLACE DURABILITY`` opens the store, and writes one line of JSON: the instants
(perf_counter) before that and when every orphan has its verdict, and figures of this process beside them.
"""

import asyncio
import json
import sys
from time import perf_counter, process_time

from benchmarks.drivers.ours import options_of, url_of
from benchmarks.machine import resident_mib
from taskstore import TaskStatus, TaskStore


async def restart(place: str, durability: str) -> dict[str, object]:
    """Open the store and read the newest task's verdict, then make sure that every task has one."""
    before, cpu, start = resident_mib(), process_time(), perf_counter()
    async with TaskStore.open(url_of(place), options=options_of(durability)) as store:
        (newest,) = (await store.operator.list_tasks(limit=1)).tasks
        verdict, cpu, after = perf_counter(), process_time() - cpu, resident_mib()
        health = await store.operator.health()
    if newest.status is not TaskStatus.FAILED or health.live:
        raise LookupError(f"{health.live} orphans have no verdict.")
    figures = {"CPU, ms": cpu * 1000}
    if before is not None and after is not None:
        figures |= {"resident before, MiB": before, "resident after, MiB": after}
    return {"instants": [start, verdict], "figures": figures}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(restart(*sys.argv[1:]))) + "\n")
