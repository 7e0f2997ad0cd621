"""The other process of the scenario ``wait``: it creates tasks and completes them when it is told to.

``python -m benchmarks.waker PLACE DURABILITY``. Each line it reads is an order, each line it writes the answer:
``create`` is answered with a task's id; ``complete ID`` with the instant (perf_counter) just before the call. On Linux
that clock is the machine's, so another process can subtract. The end of the input ends the process.
"""

import sys
from time import perf_counter

from benchmarks.drivers.ours import WAITER, options_of, url_of
from benchmarks.work import RESULT_TEXT
from taskstore import SyncTaskHandle, SyncTaskStore


def main() -> None:
    """Serve orders until the input ends."""
    place, durability = sys.argv[1:]
    handles: dict[str, SyncTaskHandle] = {}
    with SyncTaskStore.open(url_of(place), options=options_of(durability)) as store:
        for line in sys.stdin:
            order, _, task_id = line.strip().partition(" ")
            if order == "create":
                task = store.create_task(auth=WAITER, name="report")
                handles[task.task_id] = store.handle(task)
                answer = task.task_id
            else:
                at = perf_counter()
                handles.pop(task_id).complete({"text": RESULT_TEXT})
                answer = repr(at)
            sys.stdout.write(answer + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
