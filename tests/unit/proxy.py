"""A relay between psycopg and a PostgreSQL server that holds messages up, or cuts connections at a chosen one."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from types import TracebackType
from typing import Self

from sqlalchemy import make_url

# psycopg sends a statement without parameters as a simple query: Q, the length, the text, NUL.
COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
BEGIN_TO_WRITE = b"BEGIN ISOLATION LEVEL READ COMMITTED"


class Cut(Enum):
    """Where a connection is cut: all that the client sees is that it is gone."""

    BEFORE = "before the message reaches the server"
    AFTER = "after the server has carried it out, before its answer reaches the client"
    LATE = "at once, and the message reaches the server only when the client's next transaction begins"


class Proxy:
    """A relay for the length of a ``with`` block.

    Attributes:
        cuts: How many connections were cut at a message so far.
        held_up: How many connections have a message on the way to the server that is held up.
    """

    def __init__(self, url: str) -> None:
        parsed = make_url(url)
        self._server = (parsed.host or "127.0.0.1", parsed.port or 5432)
        self._lock = threading.Lock()
        self._links: set[_Link] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self.url = parsed.set(host="127.0.0.1", port=self._port).render_as_string(hide_password=False)
        self._armed: list[Cut] = []
        self._message, self._after, self._skip = b"", b"", 0
        self._held: tuple[_Link, bytes] | None = None
        self._flows = threading.Event()
        self._flows.set()
        self.cuts = self.held_up = 0

    def __enter__(self) -> Self:
        self._accept()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.refuse()

    def cut(self, *where: Cut, message: bytes = COMMIT, after: bytes = b"", skip: int = 0) -> None:
        """Cut the connections that send a message next, one after the other, each where it says.

        Args:
            message: What the client's message contains.
            after: What another message on the same connection must have contained before.
            skip: How many such messages are let through first.
        """
        with self._lock:
            self._armed, self._message, self._after, self._skip = list(where), message, after, skip

    def disarm(self) -> None:
        """Take back what has not been cut yet."""
        self.cut()

    @contextmanager
    def hold_up(self) -> Iterator[None]:
        """Pass no message on to the server while inside; afterwards all of them, as a network that was congested."""
        self._flows.clear()
        try:
            yield
        finally:
            self._flows.set()

    def cut_all(self) -> None:
        """Cut every connection there is, whatever it is doing; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.close()

    def refuse(self) -> None:
        """Cut every connection, and refuse new ones, as if the server were gone."""
        # A thread that waits in accept() keeps the port open after close(); this ends its wait.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        self.cut_all()

    def accept(self) -> None:
        """Accept connections again, at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._accept()

    def _accept(self) -> None:
        self._acceptor = threading.Thread(target=self._run, args=(self._listener,), name="proxy", daemon=True)
        self._acceptor.start()

    def _run(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            link = _Link(self, client, socket.create_connection(self._server))
            with self._lock:
                self._links.add(link)
            link.start()

    def _take(self, link: "_Link", chunk: bytes) -> Cut | None:
        """Tell whether the message that is awaited has come."""
        with self._lock:
            link.is_due = link.is_due or self._after in chunk
            if not (self._armed and link.is_due and self._message in chunk):
                return None
            if self._skip:
                self._skip -= 1
                return None
            self.cuts += 1
            return self._armed.pop(0)

    def from_client(self, link: "_Link", chunk: bytes) -> bool:
        """Pass on what a client sent; tell whether its connection goes on."""
        if not self._flows.is_set():
            with self._lock:
                self.held_up += 1
            self._flows.wait()
            with self._lock:
                self.held_up -= 1
        if BEGIN_TO_WRITE in chunk:
            with self._lock:
                held, self._held = self._held, None
            if held is not None:
                late, message = held
                late.server.sendall(message)
                late.ended.wait()
        match self._take(link, chunk):
            case None:
                link.server.sendall(chunk)
            case Cut.BEFORE:
                return False
            case Cut.AFTER:
                link.swallows = True
                link.server.sendall(chunk)
            case Cut.LATE:
                link.swallows = link.is_late = True
                with self._lock:
                    self._held = (link, chunk)
                return False
        return True

    def forget(self, link: "_Link") -> None:
        """Drop a connection that has ended."""
        with self._lock:
            self._links.discard(link)


class _Link:
    """One client's connection and the one to the server that belongs to it."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self.client, self.server = proxy, client, server
        self.swallows = False  # whether the server's next answer is the last thing that happens, and is not passed on
        self.is_late = False  # whether the server's side goes on without the client's
        self.is_due = False  # whether what a cut waits for has been seen here
        self.ended = threading.Event()

    def start(self) -> None:
        for pump in (self._upward, self._downward):
            threading.Thread(target=pump, name="proxy-link", daemon=True).start()

    def close(self) -> None:
        self._proxy.forget(self)
        _shut(self.client)
        _shut(self.server)

    def _upward(self) -> None:
        with suppress(OSError):
            while (chunk := self.client.recv(65536)) and self._proxy.from_client(self, chunk):
                pass
        if self.is_late:
            _shut(self.client)
        else:
            self.close()

    def _downward(self) -> None:
        with suppress(OSError):
            while (chunk := self.server.recv(65536)) and not self.swallows:
                self.client.sendall(chunk)
        self.close()
        self.ended.set()


def _shut(end: socket.socket) -> None:
    # Another thread may wait in recv(), which close() alone does not end.
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
