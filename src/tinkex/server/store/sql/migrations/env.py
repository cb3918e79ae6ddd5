"""Alembic runs this file; the connection comes from `versions.migrate`."""

from alembic import context

from tinkex.server.store.sql.schema import METADATA, version

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=version.name,
)
with context.begin_transaction():
    context.run_migrations()
