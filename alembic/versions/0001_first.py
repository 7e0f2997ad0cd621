"""Create the tables.

What stands here is what was released: later changes of taskstore/schema.py come as revisions of their own.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    schema = context.config.attributes.get("schema")
    create_tasks(prefix, schema)
    create_parts_of_tasks(prefix, schema)
    op.create_table(
        f"{prefix}instances",
        sa.Column("instance_id", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("machine_id", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("process_start", sa.BigInteger()),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False),
        sa.Column("lease_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", name=f"pk_{prefix}instances"),
        schema=schema,
    )
    meta = op.create_table(
        f"{prefix}meta",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=f"pk_{prefix}meta"),
        schema=schema,
    )
    op.execute(meta.insert().values(name="oldest_code", value=sa.cast(sa.literal("1"), sa.LargeBinary())))


def create_tasks(prefix: str, schema: str | None) -> None:
    op.create_table(
        f"{prefix}tasks",
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("auth_key", KEY, nullable=False),
        sa.Column("server", sa.Text(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("name", sa.Text()),
        sa.Column("session_digest", KEY),
        sa.Column("idempotency_digest", KEY),
        sa.Column("request_digest", KEY),
        sa.Column("outcome_digest", KEY),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("previous_status", sa.Text()),
        sa.Column("status_message", sa.LargeBinary()),
        sa.Column("is_error", sa.Boolean(), nullable=False),
        sa.Column("progress", sa.Double()),
        sa.Column("progress_total", sa.Double()),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("last_updated_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger()),
        sa.Column("ttl_ms", sa.BigInteger()),
        sa.Column("expires_at", sa.BigInteger()),
        sa.Column("poll_interval_ms", sa.BigInteger()),
        sa.Column("owner_kind", sa.Text(), nullable=False),
        sa.Column("instance_id", KEY),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("crashes", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("on_crash", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("cancel_requested_at", sa.BigInteger()),
        sa.Column("parent_task_id", KEY),
        sa.Column("request", sa.LargeBinary()),
        sa.Column("caller", sa.LargeBinary()),
        sa.Column("result", sa.LargeBinary()),
        sa.Column("error", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("task_id", name=f"pk_{prefix}tasks"),
        sa.CheckConstraint(
            "status IN ('working', 'input_required', 'completed', 'failed', 'cancelled')",
            name=op.f(f"ck_{prefix}tasks_status"),
        ),
        sa.CheckConstraint(
            "owner_kind IN ('instance', 'parked', 'queued', 'external')", name=op.f(f"ck_{prefix}tasks_owner_kind")
        ),
        sa.CheckConstraint(
            "(status IN ('completed', 'failed', 'cancelled')) = (finished_at IS NOT NULL)",
            name=op.f(f"ck_{prefix}tasks_finished_at"),
        ),
        sa.CheckConstraint("(status = 'failed') = (error IS NOT NULL)", name=op.f(f"ck_{prefix}tasks_error")),
        sa.CheckConstraint("result IS NULL OR status = 'completed'", name=op.f(f"ck_{prefix}tasks_result")),
        sa.CheckConstraint(
            "(owner_kind = 'instance') = (instance_id IS NOT NULL)", name=op.f(f"ck_{prefix}tasks_instance_id")
        ),
        schema=schema,
    )
    live = "finished_at IS NULL"
    create_index("tasks", "list", ["auth_key", "created_at", "task_id"])
    create_index(
        "tasks", "idempotency", ["auth_key", "idempotency_digest"], "idempotency_digest IS NOT NULL", unique=True
    )
    create_index("tasks", "expiry", ["expires_at"], "finished_at IS NOT NULL")
    create_index("tasks", "instance", ["instance_id"], live)
    create_index("tasks", "queued", ["server", "created_at"], f"owner_kind = 'queued' AND {live}")
    create_index("tasks", "live", ["auth_key"], live)


def create_parts_of_tasks(prefix: str, schema: str | None) -> None:
    task_id = f"{prefix}tasks.task_id" if schema is None else f"{schema}.{prefix}tasks.task_id"
    op.create_table(
        f"{prefix}events",
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("from_status", sa.Text()),
        sa.Column("to_status", sa.Text(), nullable=False),
        sa.Column("instance_id", KEY),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.PrimaryKeyConstraint("task_id", "version", name=f"pk_{prefix}events"),
        sa.ForeignKeyConstraint(["task_id"], [task_id], name=f"fk_{prefix}events_task_id", ondelete="CASCADE"),
        schema=schema,
    )
    op.create_table(
        f"{prefix}inputs",
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("key", KEY, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("request", sa.LargeBinary(), nullable=False),
        sa.Column("response", sa.LargeBinary()),
        sa.Column("asked_at", sa.BigInteger(), nullable=False),
        sa.Column("answered_at", sa.BigInteger()),
        sa.Column("closed_at", sa.BigInteger()),
        sa.PrimaryKeyConstraint("task_id", "key", name=f"pk_{prefix}inputs"),
        sa.ForeignKeyConstraint(["task_id"], [task_id], name=f"fk_{prefix}inputs_task_id", ondelete="CASCADE"),
        sa.CheckConstraint("(response IS NULL) = (answered_at IS NULL)", name=op.f(f"ck_{prefix}inputs_response")),
        schema=schema,
    )
    create_index("inputs", "open", ["task_id"], "answered_at IS NULL AND closed_at IS NULL")


def create_index(
    table: str, purpose: str, columns: list[str], where: str | None = None, *, unique: bool = False
) -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    condition = None if where is None else sa.text(where)
    op.create_index(
        f"ix_{prefix}{table}_{purpose}",
        f"{prefix}{table}",
        columns,
        unique=unique,
        schema=context.config.attributes.get("schema"),
        sqlite_where=condition,
        postgresql_where=condition,
    )


def downgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    for table in ("inputs", "events", "tasks", "instances", "meta"):
        op.drop_table(f"{prefix}{table}", schema=context.config.attributes.get("schema"))
