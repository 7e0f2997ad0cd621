"""Who a task belongs to: auth contexts, their digests, task ids, page cursors.

Source: MCP 2025-11-25, tasks, "Task Isolation and Access Control"; every digest is HMAC-SHA-256 under a key
that HKDF derives from ``binding_secret`` or from the store's own random secret.
"""

import base64
import hashlib
import hmac
import secrets
from dataclasses import dataclass, fields
from functools import lru_cache

ID_PREFIX = "tsk_"
# The base32hex digit of each byte's last five bits: in the order of their values, and lower-case.
_DIGITS = b"0123456789abcdefghijklmnopqrstuv" * 8
_KNOWN_CALLERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthContext:
    """The requestor that a task is bound to; two contexts are the same only when every component is equal.

    Raises:
        ValueError: No component was given, or one is an empty string.
    """

    issuer: str | None = None
    subject: str | None = None
    client_id: str | None = None
    tenant: str | None = None

    def __post_init__(self) -> None:
        components = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in components.items():
            if value is not None and not isinstance(value, str):
                raise ValueError(f"AuthContext.{name} must be a string or None, not {type(value).__name__}.")
            if value == "":
                raise ValueError(f"AuthContext.{name} is empty; leave it out, or give the requestor's {name}.")
        if all(value is None for value in components.values()):
            raise ValueError("AuthContext needs at least one component; pass auth=None for no auth context.")

    def encoded(self) -> bytes:
        """Encode the components so that no two different contexts give the same bytes."""
        parts = (self.issuer, self.subject, self.client_id, self.tenant)
        return _joined(*parts)


class Binding:
    """The digests of one store, all under keys derived from one secret."""

    def __init__(self, secret: bytes) -> None:
        self._auth_key = _derive(secret, b"auth")
        self._session_key = _derive(secret, b"session")
        self._outcome_key = _derive(secret, b"outcome")
        self._idempotency_key = _derive(secret, b"idempotency")
        self._request_key = _derive(secret, b"request")
        self._cursor_key = _derive(secret, b"cursor")
        self.fingerprint = _derive(secret, b"fingerprint").hex()
        self._known_auth_key = lru_cache(_KNOWN_CALLERS)(self._digest_auth)  # the same few call again and again

    def auth_key(self, auth: AuthContext | None) -> str:
        """Digest an auth context; the empty string stands for none."""
        if auth is None:
            return ""
        if not isinstance(auth, AuthContext):
            raise TypeError(f"auth must be an AuthContext, or None for no auth context, not {type(auth).__name__}.")
        return self._known_auth_key(auth)

    def _digest_auth(self, auth: AuthContext) -> str:
        return _digest(self._auth_key, auth.encoded())

    def session_digest(self, session_id: str) -> str:
        """Digest a session id, which is never part of identity and only narrows listings."""
        return _digest(self._session_key, session_id.encode("utf-8", "surrogatepass"))

    def outcome_digest(self, status: str, *payloads: bytes | None) -> str:
        """Digest a terminal write, so that its repetition can be told from another outcome."""
        return _digest(self._outcome_key, _joined(status, *payloads))

    def idempotency_digest(self, auth_key: str, key: str) -> str:
        """Digest an idempotency key of an auth context."""
        return _digest(self._idempotency_key, _joined(auth_key, key))

    def request_digest(self, method: str, name: str | None, request: bytes | None) -> str:
        """Digest what a create asks for, so that its repetition can be told from another request."""
        return _digest(self._request_key, _joined(method, name, request))

    def seal_cursor(self, position: str, scope: str) -> str:
        """Make an opaque cursor of a position; it opens only under the same scope (auth key and filter)."""
        mark = self._cursor_mark(position, scope)
        return base64.urlsafe_b64encode(mark + position.encode()).decode().rstrip("=")

    def open_cursor(self, cursor: str, scope: str) -> str | None:
        """Return the position in a cursor, or None when this store did not make it for this scope."""
        try:
            raw = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
            mark, position = raw[:16], raw[16:].decode()
        except ValueError:  # not base64, not ASCII, not UTF-8
            return None
        return position if hmac.compare_digest(mark, self._cursor_mark(position, scope)) else None

    def _cursor_mark(self, position: str, scope: str) -> bytes:
        message = len(position).to_bytes(8) + position.encode() + scope.encode()
        return hmac.digest(self._cursor_key, message, hashlib.sha256)[:16]


def new_task_id(now: int) -> str:
    """Make a task id: ``tsk_``, the creation time in sortable form, then 270 random bits; lower-case, header-safe.

    The time comes first so that inserts arrive in index order. It is no secret: ``createdAt`` says the same.
    """
    # Ten digits of five bits hold the 48 of the time with two that are 0. base64.b32hexencode() takes eight times as
    # long as this, which is more than an id may cost.
    time = (max(now, 0) & (1 << 48) - 1) << 2
    digits = bytes(time >> shift & 31 for shift in range(45, -1, -5)) + secrets.token_bytes(54)
    return ID_PREFIX + digits.translate(_DIGITS).decode()


def new_instance_id() -> str:
    """Make an instance id: random, so that no host name, pid or restart can repeat one."""
    return "ins_" + secrets.token_hex(16)


def notice(task_id: str) -> str:
    """Digest a task id for a notification, which any role of the database can hear."""
    return hashlib.sha256(task_id.encode()).hexdigest()[:32]


def shorten(task_id: str) -> str:
    """Cut an id for logs and messages: the id of an unbound task is a bearer secret.

    What is left is the creation time and 20 random bits: enough to tell tasks apart, far too little to guess one.
    """
    text = task_id if task_id.isprintable() else ascii(task_id)
    return text if len(text) <= 18 else text[:18] + "…"


def _derive(secret: bytes, purpose: bytes) -> bytes:
    # HKDF-SHA-256 (RFC 5869) with no salt and one block of output. Written out because importing it from
    # cryptography costs every open() 40 ms; a test compares the two.
    extracted = hmac.digest(bytes(32), secret, hashlib.sha256)
    return hmac.digest(extracted, b"taskstore/" + purpose + b"\x01", hashlib.sha256)


def _joined(*parts: str | bytes | None) -> bytes:
    """Join parts so that no two different lists of them give the same bytes."""
    joined = b""
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        joined += b"\x00" if raw is None else b"\x01" + len(raw).to_bytes(8) + raw
    return joined


def _digest(key: bytes, message: bytes) -> str:
    # Not hmac.digest(), which lets go of the GIL even for a short message: that stops an event loop for as long as any
    # other thread likes to run.
    return hmac.new(key, message, hashlib.sha256).hexdigest()
