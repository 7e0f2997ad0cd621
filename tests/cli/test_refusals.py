"""What the command line does when it cannot do what it is asked: messages, exit codes, and nothing else."""

import secrets
from pathlib import Path
from typing import Any

import pytest

import taskstore
from taskstore import AuthContext, StoreOptions, TaskStore

SECRET = bytes(range(32))

# Runs the command line where some module is not installed.
WITHOUT = "import sys; sys.modules[sys.argv.pop(1)] = None; from taskstore.cli import main; main()"


@pytest.mark.parametrize("command", [("ls",), ("show", "tsk_1"), ("check",), ("recover",), ("sweep",)])
def test_a_missing_file_is_an_error_and_stays_missing(tmp_path: Path, run: Any, command: tuple[str, ...]) -> None:
    """A mistyped path must not show an empty store, nor make one."""
    path = tmp_path / "typo.db"
    name, *rest = command

    ran = run(name, f"sqlite:///{path}", *rest)

    assert (ran.code, ran.out) == (3, "")
    assert "No such database file" in ran.err
    assert str(path) in ran.err
    assert list(tmp_path.iterdir()) == []


def test_migrate_may_make_the_file(tmp_path: Path, run: Any) -> None:
    """It is the command that makes things; in a folder that is there."""
    made = run("migrate", f"sqlite:///{tmp_path / 'new.db'}")
    refused = run("migrate", f"sqlite:///{tmp_path / 'nowhere' / 'new.db'}")

    assert (made.code, (tmp_path / "new.db").exists()) == (0, True)
    assert refused.code == 3


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path, run: Any) -> None:
    """And it is left as it is."""
    path = tmp_path / "notes.txt"
    path.write_text("not a database, but long enough to look like one to somebody in a hurry")

    ran = run("ls", f"sqlite:///{path}")

    assert (ran.code, ran.out) == (3, "")
    assert "not a database" in ran.err
    assert path.read_text().startswith("not a database")


def test_an_unreachable_server_is_an_error_without_the_password(run: Any) -> None:
    """Error messages end up in tickets."""
    ran = run("ls", "postgresql+psycopg://user:hunter2@127.0.0.1:1/name")

    assert (ran.code, ran.out) == (3, "")
    assert "cannot be reached" in ran.err
    assert "hunter2" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("ls", "tasks.db"), "no database URL"),
        (("ls", "mysql://host/name"), "mysql"),
        (("ls", "postgresql+asyncpg://host/name"), "asyncpg"),
        (("ls", "sqlite://"), "in memory"),
        (("check", "sqlite:///tasks.db", "--schema", "mcp"), "SQLite has no schemas"),
        (("check", "sqlite:///tasks.db", "--prefix", "a;b"), "--prefix"),
        (("migrate", "mysql://host/name", "--sql"), "mysql"),
        (("ls", "sqlite:///tasks.db", "--status", "done"), "completed"),
        (("ls", "sqlite:///tasks.db", "--limit", "0"), "--limit"),
        (("ls",), "URL"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_usage_exits_2(run: Any, arguments: tuple[str, ...], problem: str) -> None:
    """The message names what is wrong, on standard error."""
    ran = run(*arguments)

    assert (ran.code, ran.out) == (2, "")
    assert problem in ran.words


async def test_another_binding_secret_names_the_variable(database_url: str, run_beside: Any) -> None:
    """Under another secret than the servers', a session would seem to have no tasks."""
    async with TaskStore.open(database_url, options=StoreOptions(binding_secret=SECRET)) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"), session_id="s1")

        without = await run_beside("ls", database_url)
        wrong = await run_beside("ls", database_url, TASKSTORE_BINDING_SECRET=SECRET[::-1].hex())
        garbled = await run_beside("ls", database_url, TASKSTORE_BINDING_SECRET="secret")
        right = await run_beside("ls", database_url, "--session", "s1", "--json", TASKSTORE_BINDING_SECRET=SECRET.hex())

    for ran in (without, wrong, garbled):
        assert (ran.code, ran.out) == (2, "")
        assert "TASKSTORE_BINDING_SECRET" in ran.err
    assert [found["task_id"] for found in right.json["tasks"]] == [task.task_id]


async def test_sealed_payloads_need_their_key(database_url: str, run_beside: Any) -> None:
    """Whoever may reach the database does not read what tools and users said, unless they have the key."""
    old, new = secrets.token_bytes(32), secrets.token_bytes(32)
    async with TaskStore.open(database_url, options=StoreOptions(keys=[old])) as store:
        task = await store.create_task(auth=AuthContext(subject="alice"))
        handle = store.handle(task)
        await handle.progress(1, message="rendering")
        await handle.complete("done")

        without = await run_beside("ls", database_url)
        wrong = await run_beside("show", database_url, task.task_id, TASKSTORE_KEYS=new.hex())
        garbled = await run_beside("ls", database_url, TASKSTORE_KEYS="00ff")
        right = await run_beside(
            "show", database_url, task.task_id, "--json", TASKSTORE_KEYS=f"{new.hex()},{old.hex()}"
        )

    for ran in (without, wrong):
        assert (ran.code, ran.out) == (2, "")
        assert "TASKSTORE_KEYS" in ran.err
    assert garbled.code == 2
    assert right.json["task"]["status_message"] == "rendering"
    assert right.json["outcome"]["result"] == "done"


async def test_a_look_does_not_bind_a_new_database(database_url: str, run_beside: Any) -> None:
    """Whoever looks before the first server starts must not decide under which secret it has to open."""
    for command in ("check", "ls", "recover", "sweep"):
        assert (await run_beside(command, database_url)).code == 0

    async with TaskStore.open(database_url, options=StoreOptions(binding_secret=SECRET)) as store:
        assert (await store.operator.health()).live == 0


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_extra_the_command_says_what_to_install(run: Any, missing: str) -> None:
    """The package installs without typer and rich, and so does the command."""
    ran = run(missing, "--help", program=("-c", WITHOUT))

    assert (ran.code, ran.out) == (2, "")
    assert "pip install 'taskstore[cli]'" in ran.err


def test_without_the_sdk_only_the_demo_is_missing(run: Any, tmp_path: Path) -> None:
    """An operator's machine needs no MCP SDK."""
    demo = run("mcp", "demo", program=("-c", WITHOUT))
    migrated = run("mcp", "migrate", f"sqlite:///{tmp_path / 'tasks.db'}", program=("-c", WITHOUT))

    assert (demo.code, demo.out) == (2, "")
    assert "pip install 'taskstore[cli,mcp]'" in demo.err
    assert migrated.code == 0


def test_the_help_teaches(run: Any) -> None:
    """Exit codes, the environment, and an example of every command."""
    whole = run("--help")

    assert whole.code == 0
    for expected in ("Exit codes", "TASKSTORE_BINDING_SECRET"):
        assert expected in whole.out
    for command in ("migrate", "check", "recover", "sweep", "ls", "show", "demo", "import-dir", "export-dir"):
        assert f"taskstore {command}" in run(command, "--help").out


def test_the_version_is_the_packages(run: Any) -> None:
    """Whoever reports a bug is asked for it."""
    assert run("--version").out == f"taskstore {taskstore.__version__}\n"
