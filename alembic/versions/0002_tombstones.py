"""Add tombstones: what is left of an expired task, where the option is on.

Code of revision 0001 runs a database of this one: it never looks at the new table.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

KEY = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    schema = context.config.attributes.get("schema")
    op.create_table(
        f"{prefix}tombstones",
        sa.Column("task_id", KEY, nullable=False),
        sa.Column("auth_key", KEY, nullable=False),
        sa.Column("expired_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("task_id", name=f"pk_{prefix}tombstones"),
        schema=schema,
    )
    op.create_index(f"ix_{prefix}tombstones_age", f"{prefix}tombstones", ["expired_at"], schema=schema)


def downgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    op.drop_table(f"{prefix}tombstones", schema=context.config.attributes.get("schema"))
