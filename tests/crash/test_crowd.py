"""Many processes that come, recover and go beside a few that work."""

from taskstore import TaskStore

from .conftest import THOROUGH

SECONDS = str(5 * THOROUGH)  # 12 times as long is a minute


async def test_a_crowd_that_opens_recovers_and_closes_touches_no_live_task(start, database_url):
    """A rolling deployment of many workers: each of them judges all others, while it starts and while it stops."""
    working = [start("work_in_a_crowd", SECONDS) for _ in range(4)]
    crowd = start("crowd", "20", SECONDS)
    for worker in (*working, crowd):
        assert worker.hear() == {"ready": True}

    for worker in (*working, crowd):
        worker.go_on()
    worked = [worker.end() for worker in working]
    _, (*came, ended) = crowd.end()

    async with TaskStore.open(database_url) as store:
        health = await store.operator.health()
    finished = sum(told["finished"] for _, (told,) in worked)
    opened = [told["times"] for told in came]
    print(f"{finished} tasks finished, the store {sum(opened)} times opened, recovered and closed")
    assert [(code, told["touched"]) for code, (told,) in worked] == [(0, [])] * 4
    assert ended == {"codes": [0] * 20}
    assert [told["recovered"] for told in came] == [[]] * 20
    assert min(opened) > 0
    assert (health.live, health.finished, health.instances) == (0, finished, 1)
