"""Run the revisions on the connection, or into the script, that ``taskstore.migrate`` hands over.

Nothing here configures logging or starts an event loop: both belong to the host application.
"""

from alembic import context

from taskstore.schema import DEFAULT_PREFIX, VERSION_TABLE, metadata

options = context.config.attributes
prefix, schema = options.get("prefix", DEFAULT_PREFIX), options.get("schema")
settings = {
    "target_metadata": metadata(prefix, schema),
    "version_table": prefix + VERSION_TABLE,
    "version_table_schema": schema,
    "include_schemas": schema is not None,
    "transactional_ddl": True,
}

if context.is_offline_mode():
    context.configure(dialect_name=options["dialect_name"], literal_binds=True, **settings)
    with context.begin_transaction():
        context.run_migrations()
else:
    # The caller began the transaction, holds the migration lock in it, and commits.
    context.configure(connection=options["connection"], **settings)
    context.run_migrations()
