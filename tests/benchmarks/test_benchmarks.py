"""The benchmarks measure what they say: runs have the promised shape, and a flow really is a task's whole life.

Nothing here asserts a time.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from sqlalchemy import create_engine, inspect

from benchmarks import __main__ as command
from benchmarks import environments
from benchmarks.__main__ import main
from benchmarks.backends import BACKENDS
from benchmarks.drivers import filesystem, ours, raw_postgres, raw_sqlite
from benchmarks.report import details, summarize, table
from benchmarks.session import Run
from benchmarks.work import PROGRESS_TEXT, REQUEST_TEXT, RESULT_TEXT, SCENARIOS
from benchmarks.worker import DriverModule, Measured
from taskstore import EventKind, StoreOptions, SyncTaskStore, TaskStatus, TaskStore
from taskstore.testing import PostgresServer
from taskstore.testing.postgres import URL_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
QUICKLY = ("--flows", "3", "--repeat", "2", "--calm", "0", "--no-install")


def measured(*, operations: int, seconds: float) -> Measured:
    """What a run of so many operations in so many seconds reports."""
    return Measured(
        operations=operations,
        seconds=seconds,
        p50_us=1.0,
        p99_us=2.0,
        cpu_us=1.0,
        other_cpu=None,
        steps={"create": 1.0},
        figures={},
    )


def restarted(*, seconds: float) -> Measured:
    """What a run of the scenario recover reports that took so long."""
    return measured(operations=1, seconds=seconds) | {
        "steps": {"open": seconds * 1e6, "read": 1.0},
        "figures": {"resident after, MiB": 50.0},
    }


def run_command(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the command as a user does, and return its JSON."""
    return ran_command(folder, *arguments)[0]


def ran_command(folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run the command as a user does, and return its JSON and what it wrote on both streams."""
    written = folder / "figures.json"

    command = [sys.executable, "-m", "benchmarks", "--json", str(written), "--folder", str(folder)]
    ran = subprocess.run([*command, *QUICKLY, *arguments], cwd=ROOT, stdout=PIPE, stderr=STDOUT, text=True, check=False)

    assert ran.returncode == 0, ran.stdout
    return json.loads(written.read_text()), ran.stdout


def tables(url: str) -> set[str]:
    """Name the tables of a database."""
    engine = create_engine(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


@pytest.mark.parametrize("backend", ["sqlite", "raw-sqlite"])
def test_every_scenario_runs_and_is_reported(backend: str, tmp_path: Path) -> None:
    """Whoever reads the JSON counts on its shape."""
    scenarios = [name for name in SCENARIOS if name not in BACKENDS[backend].without]

    document = run_command(
        tmp_path, "--backend", backend, "--scenario", *scenarios, "--clients", "1", "2", "--sizes", "20"
    )

    expected = {
        (name, 20 if any(SCENARIOS[name].sizes) else 0, clients)
        for name in scenarios
        for clients in ((1,) if SCENARIOS[name].once else (1, 2))
    }
    assert document["unavailable"] == {}
    assert document["backends"][backend]["versions"].keys() >= {"Python", "SQLite"}
    middle, low, high = document["machine"]["flush_us"]
    assert 0 < low <= middle <= high
    assert len(document["runs"]) == len(expected) * 2
    for run in document["runs"]:
        assert run["backend"] == backend
        assert run["measured"]["operations"] == (1 if SCENARIOS[run["scenario"]].once else 3)
        assert run["measured"]["p99_us"] >= run["measured"]["p50_us"] > 0
        assert tuple(run["measured"]["steps"]) == SCENARIOS[run["scenario"]].steps
    assert {(each["scenario"], each["tasks"], each["clients"]) for each in document["summaries"]} == expected


def test_backends_take_turns_on_databases_of_their_own(tmp_path: Path) -> None:
    """One in memory, one in files and one in a database are compared and drawn, and nothing of them is left."""
    backends = ["memory", "filesystem", "sqlite-normal"]
    picture = tmp_path / "figures.png"
    picked = ("--backend", *backends, "--scenario", "flow", "get", "--clients", "2", "--plot", str(picture))

    document, told = ran_command(tmp_path, *picked)

    assert document["unavailable"] == {}
    turns = [run["backend"] for run in document["runs"]]
    groups = [tuple(turns[first : first + 3]) for first in range(0, 12, 3)]
    assert [sorted(group) for group in groups] == [sorted(backends)] * 4
    assert len(set(groups)) > 1, "none always follows the same one"
    assert re.search("^12/12 round 2, get, .*, 2 clients$", told, re.MULTILINE)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["figures.json", "figures.png"]


def test_a_database_of_the_user_gets_a_verdict_and_is_left_as_it_was(empty_database_url: str, tmp_path: Path) -> None:
    """Whoever asks what an own server or disk is worth wants the answer in a sentence, and no tables left behind."""
    before = tables(empty_database_url)

    document, printed = ran_command(tmp_path, "--url", empty_database_url, "--clients", "1", "2")

    assert {run["backend"] for run in document["runs"]} == {"url"}
    assert "on" in document["backends"]["url"]["versions"]
    assert re.search(r"^This disk \(.*\) syncs in [\d.]+ ms \([\d.]+-[\d.]+\)\.$", printed, re.MULTILINE)
    rates = r"about [\d,]+ tasks a second with 1 client, [\d,]+ with 2\."
    assert re.search(rf"^Your database stores a new task in [\d.]+ ms: {rates}$", printed, re.MULTILINE)
    assert tables(empty_database_url) - before <= {"taskstore_alembic_version"}


def test_a_store_of_the_user_is_not_touched(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A URL that was copied from production must cost nobody a task."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with SyncTaskStore.open(database_url, options=StoreOptions(migrate=True)) as store:
        task = store.create_task(auth=None)

        status = main(["--url", database_url, "--folder", str(tmp_path), *QUICKLY])

        assert store.get_task(task.task_id, auth=None) == task
    assert status == 1
    assert "holds a store already" in capsys.readouterr().out


def test_a_password_in_a_url_is_not_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Reports and JSON are shown to others."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    written = tmp_path / "figures.json"

    main(["--url", "postgresql://u:hidden@127.0.0.1:1/x", "--folder", str(tmp_path), "--json", str(written), *QUICKLY])

    told = capsys.readouterr()
    assert "u:***@127.0.0.1" in told.out
    assert "hidden" not in told.out + told.err + written.read_text()


def test_a_postgresql_run_is_compared_with_its_baseline(
    postgres_server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A baseline that was not asked for by name runs all the same, and the databases of the server are gone."""
    monkeypatch.setenv(URL_VARIABLE, postgres_server.url)

    document = run_command(tmp_path, "--backend", "postgres", "--baseline", "raw-postgres")

    ratios = {each["backend"]: each["ratio"] for each in document["summaries"]}
    assert ratios.keys() == {"postgres", "raw-postgres"}
    assert ratios["raw-postgres"] is None
    assert ratios["postgres"] is not None
    assert os.listdir(tmp_path) == ["figures.json"]


async def test_a_flow_of_ours_leaves_a_completed_task_with_its_result(database_url: str) -> None:
    """A benchmark of half the work would be a lie."""
    async with ours.open_driver(database_url, "full") as driver:
        flow = await SCENARIOS["flow"].prepare(driver, 0)

        instants = await flow(0)

        async with TaskStore.open(database_url) as store:
            (task,) = (await store.operator.list_tasks()).tasks
            details = await store.operator.get_details(task.task_id)
            events = await store.operator.list_events(task.task_id)
    assert instants == sorted(instants)
    assert len(instants) == 6
    assert task.status is TaskStatus.COMPLETED
    assert (task.progress, task.progress_total, task.status_message) == (3, 10, PROGRESS_TEXT)
    assert details.outcome is not None
    assert details.outcome.result == {"text": RESULT_TEXT}
    assert [event.kind for event in events] == [EventKind.CREATED, EventKind.COMPLETED]


async def test_a_tool_called_as_a_task_is_a_task_and_the_plain_one_is_none(database_url: str) -> None:
    """What the adapter costs is the difference of the two."""
    async with ours.open_driver(database_url, "full") as driver:
        call = await SCENARIOS["adapter"].prepare(driver, 0)

        instants = await call(0)

        async with TaskStore.open(database_url) as store:
            tasks = (await store.operator.list_tasks()).tasks
    assert instants == sorted(instants)
    assert len(instants) == 4
    assert [task.name for task in tasks] == ["task", "task"]  # one to connect, and one that was measured


async def test_a_restart_of_ours_meets_orphans_and_leaves_none(database_url: str) -> None:
    """Each of them must be the task of a dead process, and have its verdict when the clock stops."""
    async with ours.open_driver(database_url, "full", upkeep=False) as driver:
        restart = await SCENARIOS["recover"].prepare(driver, 30)
        async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
            before = await store.operator.health()

        instants = await restart(0)

        async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
            tasks = (await store.operator.list_tasks()).tasks
            events = await store.operator.list_events(tasks[-1].task_id)
    assert (before.live, before.orphans) == (30, 30)
    assert instants == sorted(instants)
    assert len(instants) == 2
    assert [task.status for task in tasks] == [TaskStatus.FAILED] * 30
    assert [event.kind for event in events] == [EventKind.CREATED, EventKind.RECOVERED]
    assert driver.figures["CPU, ms"] > 0


async def test_kept_and_expired_tasks_of_ours_are_real_ones(database_url: str) -> None:
    """Copies that a read, a page or a sweep does not meet would make everything look quick."""
    async with ours.open_driver(database_url, "full", upkeep=False) as driver:
        await driver.keep(100)
        for _ in range(30):
            await driver.get_kept()
        of_client_0 = await driver.page()
        nothing = await driver.sweep()
        await driver.expire(30)
        swept = await driver.sweep()

        async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
            health = await store.operator.health()
            oldest = (await store.operator.list_tasks()).tasks[-1]
            events = await store.operator.list_events(oldest.task_id)
    assert (of_client_0, nothing, swept) == (10, 0, 30)
    assert (health.finished, health.expired, health.live) == (101, 0, 0)  # the one that was copied has not expired
    assert [event.kind for event in events] == [EventKind.CREATED, EventKind.COMPLETED]


async def test_a_sweep_of_ours_is_measured_beside_writers(database_url: str) -> None:
    """What the sweep costs others is the question; the figures name both sides of the answer."""
    async with ours.open_driver(database_url, "full", upkeep=False) as driver:
        sweep = await SCENARIOS["sweep"].prepare(driver, 300)

        await sweep(0)

        async with TaskStore.open(database_url, options=StoreOptions(upkeep=False)) as store:
            health = await store.operator.health()
    assert (health.expired, health.finished) == (0, 2)
    assert health.live > 0
    assert driver.figures.keys() == {
        "swept with no writers, tasks/s",
        "swept beside writers, tasks/s",
        *(
            f"create beside {what}, {name}, ms"
            for what in ("no sweep", "a sweep")
            for name in ("p50", "p99", "longest")
        ),
    }


@pytest.mark.parametrize("yardstick", [raw_sqlite, raw_postgres], ids=["sqlite", "postgres"])
async def test_a_flow_of_a_yardstick_leaves_a_completed_row(
    yardstick: DriverModule, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The reference must have stored the same bytes as those it is a reference for."""
    place = str(tmp_path / "raw.db")
    if yardstick is raw_postgres:
        place = request.getfixturevalue("postgres_server").create_database()
    async with yardstick.open_driver(place, "full") as driver:
        held = await driver.create(client=0)
        with pytest.raises(LookupError, match="working"):
            await driver.outcome(held)

        await driver.progress(held)
        await driver.complete(held)

        assert await driver.outcome(held) == RESULT_TEXT


async def test_kept_rows_of_the_yardstick_are_found(tmp_path: Path) -> None:
    """A tenth of them belongs to the client that lists."""
    async with raw_sqlite.open_driver(str(tmp_path / "raw.db"), "full") as driver:
        await driver.keep(600)

        assert await driver.page() == 50
        held = await driver.create(client=0)
        await driver.complete(held)
        assert await driver.outcome(held) == RESULT_TEXT


async def test_a_flow_of_the_file_store_leaves_the_completed_task_alone_in_its_folder(tmp_path: Path) -> None:
    """What was written beside a file is renamed, and the result is in it."""
    async with filesystem.open_driver(str(tmp_path / "tasks"), "full") as driver:
        flow = await SCENARIOS["flow"].prepare(driver, 0)

        await flow(0)

    (path,) = (tmp_path / "tasks").iterdir()
    task = json.loads(path.read_bytes())
    assert path.name == f"{task['task_id']}.json"
    assert (task["status"], task["progress"], task["status_message"]) == ("completed", 0.3, PROGRESS_TEXT)
    assert (task["request"], task["result"]) == ({"topic": REQUEST_TEXT}, {"text": RESULT_TEXT})


def test_payloads_have_the_size_they_are_said_to_have() -> None:
    """The description says 600 bytes and 1 KiB of JSON."""
    sizes = [len(json.dumps(each, separators=(",", ":"))) for each in ({"topic": REQUEST_TEXT}, {"text": RESULT_TEXT})]

    assert sizes == [600, 1024]


def test_a_ratio_compares_runs_of_the_same_round() -> None:
    """The machine may have been twice as fast in one round; the ratio must not show that."""
    runs = [
        Run(1, "create", 0, 1, "sqlite", measured(operations=400, seconds=1.0)),
        Run(1, "create", 0, 1, "a2a-sqlite", measured(operations=100, seconds=1.0)),
        Run(2, "create", 0, 1, "a2a-sqlite", measured(operations=200, seconds=1.0)),
        Run(2, "create", 0, 1, "sqlite", measured(operations=800, seconds=1.0)),
    ]

    summaries = summarize(runs, "a2a-sqlite")

    assert [(each.backend, each.per_second, each.ratio) for each in summaries] == [
        ("sqlite", (600, 400, 800), (4, 4, 4)),
        ("a2a-sqlite", (150, 100, 200), None),
    ]
    assert "4.00 [4.00-4.00] |" in table(summaries, "a2a-sqlite")


def test_a_figure_is_compared_with_that_of_the_smallest_size() -> None:
    """Whether a cost grows with the tasks that are kept is what the sizes are for."""
    runs = [
        Run(1, "recover", 10, 1, "sqlite", restarted(seconds=0.1)),
        Run(1, "recover", 1000, 1, "sqlite", restarted(seconds=0.3)),
    ]

    summaries = summarize(runs, None)
    lines = [line.split("|")[1:-1] for line in details(summaries).splitlines()[2:]]

    assert [[cell.strip() for cell in line[2:]] for line in lines] == [
        ["10", "1", "open", "100.0 ms", "1.00"],
        ["10", "1", "read", "1 µs", "1.00"],
        ["10", "1", "resident after, MiB", "50", "1.00"],
        ["1,000", "1", "open", "300.0 ms", "3.00"],
        ["1,000", "1", "read", "1 µs", "1.00"],
        ["1,000", "1", "resident after, MiB", "50", "1.00"],
    ]


def test_a_peer_that_is_not_installed_is_reported_with_the_way_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are measured all the same, and the exit status tells a script."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))

    status = main(["--backend", "raw-sqlite", "a2a-sqlite", "docket-redis", "--folder", str(tmp_path), *QUICKLY])

    printed = capsys.readouterr().out
    assert status == 1
    assert "a2a-sqlite did not run to the end: it is not installed" in printed
    assert "pip install 'a2a-sdk[sqlite]==" in printed
    assert "docket-redis did not run to the end: redis-server is not on the path. Install it: apt-get" in printed
    assert "| flow " in printed
    assert not (tmp_path / "cache").exists()


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody learns after an hour that matplotlib is missing."""
    monkeypatch.setattr(command, "find_spec", lambda _name: None)
    monkeypatch.setattr(environments, "CACHE", tmp_path / "cache")

    with pytest.raises(SystemExit) as ended:
        main(["--plot", str(tmp_path / "figures.png"), "--folder", str(tmp_path), *QUICKLY])

    told = capsys.readouterr()
    assert ended.value.code == 2
    assert "pip install 'matplotlib==" in told.err
    assert told.out == ""
