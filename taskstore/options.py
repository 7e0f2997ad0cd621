"""StoreOptions: every setting of a store, checked when it is made."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, get_args

from taskstore.cipher import Cipher, check_keys
from taskstore.clock import Clock
from taskstore.dialects import Durability, Journal
from taskstore.operations import Limits, Rules
from taskstore.payload import check_text
from taskstore.schema import DEFAULT_PREFIX, check_identifier
from taskstore.task import Task

TtlPolicy = Literal["keep", "strict"]
PayloadPolicy = Literal["refuse", "repair"]

_CHOICES = {"durability": Durability, "journal": Journal, "ttl_policy": TtlPolicy, "payload_policy": PayloadPolicy}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """Settings of a store; the defaults serve most servers.

    Attributes:
        durability: ``full``: what was acknowledged survives power loss. ``normal``: the death of the process;
            a power loss may take the last moments.
        journal: Of SQLite. ``wal``: nobody waits for the writer. ``rollback``: for file systems without shared memory,
            which the write-ahead log needs; readers and the writer wait for each other.
        lease: How long an instance on another machine must be seen without a heartbeat to be taken for dead.
        heartbeat: Between two beats; at most a third of the lease.
        default_ttl: Lifetime of a task that asks for none; None is unlimited.
        max_ttl: Longest lifetime a task can ask for; a longer one is cut to it, and reported so. None is unlimited.
        min_retention: How long an outcome is kept after the finish, however short the ttl was.
        binding_secret: Keys the digests that bind tasks to requestors. Without one a random secret in the
            database does, so whoever can read the database could test a guess at who a requestor is.
        old_binding_secrets: Secrets that the database was bound under before; None is the time when it had none. A
            task of an auth context that is found under one of them is bound under ``binding_secret`` when that auth
            context calls next.
        table_prefix: Of every table.
        schema: PostgreSQL schema of the tables; None is the connection's own.
        migrate: Whether opening brings the schema up to date. None: yes on SQLite, no on PostgreSQL.
        upkeep: Whether opening recovers, and a thread goes on to recover and sweep.
        recovery_interval: Between two recovery passes.
        sweep_interval: Between two sweeps of expired tasks.
        ttl_policy: ``keep``: a live task outlives its ttl while a process works on it. ``strict``: it ends at its ttl.
        tombstones: Tell the owner of a bound task that it was there and expired, for so long. None: never.
        tombstone_limit: How many are kept at most, the newest.
        payload_policy: What becomes of a payload with a value that JSON lacks. ``refuse``: ``PayloadError`` names its
            path, and nothing is stored. ``repair``: NaN and infinities become null, lone surrogates U+FFFD.
        keys: Seal payloads at rest: 32 random bytes each. The first one seals, all of them open.
        limits: What one auth context may have and ask.
        on_recovered: Called with the tasks that a batch of recovery has decided over, after they are; on the thread
            that recovers, so it should be quick. What it raises is logged.
        server: Name of the server the tasks belong to; several servers can share a database, and each runs its own.
        clock: What is asked for the time.

    Raises:
        ValueError: A setting contradicts another one or makes no sense; the message names it.
    """

    durability: Durability = "full"
    journal: Journal = "wal"
    lease: timedelta = timedelta(seconds=30)
    heartbeat: timedelta = timedelta(seconds=10)
    default_ttl: timedelta | None = timedelta(hours=1)
    max_ttl: timedelta | None = timedelta(days=30)
    min_retention: timedelta = timedelta(minutes=15)
    ttl_policy: TtlPolicy = "keep"
    tombstones: timedelta | None = None
    tombstone_limit: int = 100_000
    payload_policy: PayloadPolicy = "refuse"
    binding_secret: bytes | None = field(default=None, repr=False)
    old_binding_secrets: Sequence[bytes | None] = field(default=(), repr=False)
    keys: Sequence[bytes] = field(default=(), repr=False)
    table_prefix: str = DEFAULT_PREFIX
    schema: str | None = None
    migrate: bool | None = None
    upkeep: bool = True
    recovery_interval: timedelta = timedelta(seconds=10)
    sweep_interval: timedelta = timedelta(seconds=60)
    limits: Limits = field(default_factory=Limits)
    on_recovered: Callable[[Sequence[Task]], None] | None = None
    server: str = ""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        for name, choice in _CHOICES.items():
            if getattr(self, name) not in get_args(choice):
                allowed = " or ".join(map(repr, get_args(choice)))
                raise ValueError(f"{name} must be {allowed}, not {getattr(self, name)!r}.")
        for name in ("lease", "heartbeat", "recovery_interval", "sweep_interval"):
            if getattr(self, name) <= timedelta(0):
                raise ValueError(f"{name} must be longer than nothing, not {getattr(self, name)}.")
        if self.tombstone_limit < 1:
            raise ValueError(f"tombstone_limit must be at least 1, not {self.tombstone_limit}.")
        for name in ("default_ttl", "max_ttl", "min_retention", "tombstones"):
            value = getattr(self, name)
            if value is not None and value < timedelta(0):
                raise ValueError(f"{name} must not be negative, but is {value}.")
        if self.heartbeat * 3 > self.lease:
            raise ValueError(
                f"heartbeat ({self.heartbeat}) must be at most a third of the lease ({self.lease}), "
                "or a beat that comes late looks like a death."
            )
        if self.max_ttl is not None and (self.default_ttl is None or self.default_ttl > self.max_ttl):
            raise ValueError(f"default_ttl ({self.default_ttl}) must not exceed max_ttl ({self.max_ttl}).")
        if any(secret is not None and len(secret) < 16 for secret in (self.binding_secret, *self.old_binding_secrets)):
            raise ValueError("A binding_secret must have at least 16 bytes; make one with secrets.token_bytes(32).")
        check_keys(self.keys)
        check_identifier(self.table_prefix, "table_prefix")
        if self.schema is not None:
            check_identifier(self.schema, "schema")
        check_text(self.server, "server")

    def rules(self) -> Rules:
        """Return what these settings say to every unit of work."""
        return Rules(
            lease_ms=whole_milliseconds(self.lease),
            min_retention_ms=whole_milliseconds(self.min_retention),
            strict=self.ttl_policy == "strict",
            tombstones=self.tombstones is not None,
            repair=self.payload_policy == "repair",
            limits=self.limits,
            cipher=Cipher(self.keys),
        )


def whole_milliseconds(span: timedelta) -> int:
    """Count milliseconds, a part of one as a whole one: nobody gets less than asked for."""
    whole, rest = divmod(span, timedelta(milliseconds=1))
    return whole + bool(rest)
