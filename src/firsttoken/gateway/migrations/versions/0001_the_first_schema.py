"""The first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:

    op.create_table(
        "aliases",
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("target", sa.String(length=200), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aliases")),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.String(length=100), nullable=False),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("target", sa.String(length=200), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_audit")),
    )
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_audit_at"), ["at"], unique=False)

    op.create_table(
        "counters",
        sa.Column("name", sa.String(length=32), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_counters")),
    )
    op.create_table(
        "limit_pools",
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("window_start", sa.Double(), nullable=False),
        sa.Column("used", sa.BigInteger(), nullable=False),
        sa.Column("wanted_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("key_id", "kind", name=op.f("pk_limit_pools")),
    )
    with op.batch_alter_table("limit_pools", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_limit_pools_wanted_until"), ["wanted_until"], unique=False)

    op.create_table(
        "limit_shares",
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("kind", sa.String(length=12), nullable=False),
        sa.Column("holder", sa.String(length=32), nullable=False),
        sa.Column("amount", sa.BigInteger(), nullable=False),
        sa.Column("free_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("key_id", "kind", "holder", name=op.f("pk_limit_shares")),
    )
    with op.batch_alter_table("limit_shares", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_limit_shares_holder"), ["holder"], unique=False)

    op.create_table(
        "plans",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("models", sa.JSON(), nullable=True),
        sa.Column("quota_5h", sa.BigInteger(), nullable=True),
        sa.Column("quota_week", sa.BigInteger(), nullable=True),
        sa.Column("quota_month", sa.BigInteger(), nullable=True),
        sa.Column("priority", sa.String(length=16), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
        sa.UniqueConstraint("name", name=op.f("uq_plans_name")),
    )
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("prompt", sa.Double(), nullable=False),
        sa.Column("cached", sa.Double(), nullable=False),
        sa.Column("completion", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_prices")),
    )
    op.create_table(
        "processes",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.String(length=255), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_processes")),
    )
    op.create_table(
        "requests",
        sa.Column("id", sa.String(length=40), nullable=False),
        sa.Column("client_id", sa.String(length=128), nullable=True),
        sa.Column("process_id", sa.String(length=32), nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("load_test", sa.Boolean(), nullable=False),
        sa.Column("endpoint", sa.String(length=32), nullable=False),
        sa.Column("alias", sa.String(length=200), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("stream", sa.Boolean(), nullable=False),
        sa.Column("status", sa.String(length=8), nullable=False),
        sa.Column("http_status", sa.Integer(), nullable=True),
        sa.Column("error", sa.String(length=300), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=False),
        sa.Column("gateway_ms", sa.Double(), nullable=True),
        sa.Column("queue_ms", sa.Double(), nullable=True),
        sa.Column("prefill_ms", sa.Double(), nullable=True),
        sa.Column("first_decode_ms", sa.Double(), nullable=True),
        sa.Column("ttft_ms", sa.Double(), nullable=True),
        sa.Column("duration_ms", sa.Double(), nullable=True),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=True),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=True),
        sa.Column("drafted_tokens", sa.BigInteger(), nullable=True),
        sa.Column("accepted_tokens", sa.BigInteger(), nullable=True),
        sa.Column("cost_nano", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_requests")),
    )
    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.create_index("ix_requests_key_started", ["key_id", "started_at"], unique=False)
        batch_op.create_index("ix_requests_process_status", ["process_id", "status"], unique=False)
        batch_op.create_index(batch_op.f("ix_requests_started_at"), ["started_at"], unique=False)
        batch_op.create_index("ix_requests_status_started", ["status", "started_at"], unique=False)
        batch_op.create_index("ix_requests_ttft", ["ttft_ms"], unique=False)

    op.create_table(
        "rollup_day",
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=False),
        sa.Column("load_test", sa.Boolean(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("ok", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.BigInteger(), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("limited", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("drafted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "start", "key_id", "model", "upstream", "load_test", name=op.f("pk_rollup_day")
        ),
    )
    op.create_table(
        "rollup_minute",
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=False),
        sa.Column("load_test", sa.Boolean(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("ok", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.BigInteger(), nullable=False),
        sa.Column("aborted", sa.BigInteger(), nullable=False),
        sa.Column("limited", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cached_tokens", sa.BigInteger(), nullable=False),
        sa.Column("completion_tokens", sa.BigInteger(), nullable=False),
        sa.Column("drafted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("accepted_tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nano", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "start", "key_id", "model", "upstream", "load_test", name=op.f("pk_rollup_minute")
        ),
    )
    op.create_table(
        "ttft_day",
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=False),
        sa.Column("load_test", sa.Boolean(), nullable=False),
        sa.Column("bin", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "start", "key_id", "model", "upstream", "load_test", "bin", name=op.f("pk_ttft_day")
        ),
    )
    op.create_table(
        "ttft_minute",
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("key_id", sa.String(length=32), nullable=False),
        sa.Column("model", sa.String(length=200), nullable=False),
        sa.Column("upstream", sa.String(length=100), nullable=False),
        sa.Column("load_test", sa.Boolean(), nullable=False),
        sa.Column("bin", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "start", "key_id", "model", "upstream", "load_test", "bin", name=op.f("pk_ttft_minute")
        ),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("name", sa.String(length=100), nullable=False),
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("hint", sa.String(length=16), nullable=False),
        sa.Column("role", sa.String(length=8), nullable=False),
        sa.Column("plan_id", sa.String(length=32), nullable=True),
        sa.Column("models", sa.JSON(), nullable=True),
        sa.Column("tags", sa.JSON(), nullable=False),
        sa.Column("rpm", sa.BigInteger(), nullable=True),
        sa.Column("tpm", sa.BigInteger(), nullable=True),
        sa.Column("max_concurrency", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["plan_id"], ["plans.id"], name=op.f("fk_keys_plan_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_keys")),
        sa.UniqueConstraint("digest", name=op.f("uq_keys_digest")),
    )
    with op.batch_alter_table("keys", schema=None) as batch_op:
        batch_op.create_index(
            "uq_keys_live_name",
            ["name"],
            unique=True,
            sqlite_where=sa.text("revoked_at IS NULL"),
            postgresql_where=sa.text("revoked_at IS NULL"),
        )


def downgrade() -> None:

    with op.batch_alter_table("keys", schema=None) as batch_op:
        batch_op.drop_index(
            "uq_keys_live_name",
            sqlite_where=sa.text("revoked_at IS NULL"),
            postgresql_where=sa.text("revoked_at IS NULL"),
        )

    op.drop_table("keys")
    op.drop_table("ttft_minute")
    op.drop_table("ttft_day")
    op.drop_table("rollup_minute")
    op.drop_table("rollup_day")
    with op.batch_alter_table("requests", schema=None) as batch_op:
        batch_op.drop_index("ix_requests_ttft")
        batch_op.drop_index("ix_requests_status_started")
        batch_op.drop_index(batch_op.f("ix_requests_started_at"))
        batch_op.drop_index("ix_requests_process_status")
        batch_op.drop_index("ix_requests_key_started")

    op.drop_table("requests")
    op.drop_table("processes")
    op.drop_table("prices")
    op.drop_table("plans")
    with op.batch_alter_table("limit_shares", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_limit_shares_holder"))

    op.drop_table("limit_shares")
    with op.batch_alter_table("limit_pools", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_limit_pools_wanted_until"))

    op.drop_table("limit_pools")
    op.drop_table("counters")
    with op.batch_alter_table("audit", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_audit_at"))

    op.drop_table("audit")
    op.drop_table("aliases")
