"""Alembic's entry. The connection comes from `Store.migrate`, already inside a transaction."""

from alembic import context

from firsttoken.gateway.tables import metadata

# render_as_batch: SQLite can't alter most things in place, so Alembic copies the table.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=False,  # the surrounding transaction is Store.migrate's
)
context.run_migrations()
