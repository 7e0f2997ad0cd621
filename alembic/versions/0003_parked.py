"""Add what a parked tool leaves for its next run.

Code of revision 0002 runs a database of this one: it names the columns it uses, and the new one may be null.
"""

import sqlalchemy as sa
from alembic import context, op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    schema = context.config.attributes.get("schema")
    op.add_column(f"{prefix}tasks", sa.Column("parked", sa.LargeBinary()), schema=schema)


def downgrade() -> None:
    prefix = context.config.attributes.get("prefix", "taskstore_")
    op.drop_column(f"{prefix}tasks", "parked", schema=context.config.attributes.get("schema"))
