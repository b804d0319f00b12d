"""Journal → store: everything once, whatever is replayed; dead processes' requests become aborted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firsttoken.gateway import accounts, journal, ledger, pools, reports
from firsttoken.gateway import tables as t
from firsttoken.gateway.histogram import LAST_BIN, bin_of, middle, percentile
from firsttoken.gateway.journal import Journal, Record
from firsttoken.gateway.store import Store

NOW = 1_700_000_000.0
ALL = reports.Selection(since=NOW - 1e5, until=NOW + 86_400, load_test=True)


def record(id: str, status: str = "ok", **values: object) -> Record:
    base = {
        "process_id": "p",
        "key_id": "k",
        "endpoint": "chat",
        "alias": "chat",
        "model": "m",
        "upstream": "u",
        "started_at": NOW,
    }
    if status != "running":
        base |= {"prompt_tokens": 10, "completion_tokens": 5, "ttft_ms": 50.0, "duration_ms": 100.0}
    return Record(id=id, status=status, **{**base, **values})  # type: ignore[arg-type]


def totals(store: Store) -> dict[str, int]:
    with store.read() as connection:
        rows = reports.usage(connection, ALL)
        return {name: rows[0][name] if rows else 0 for name in (*t.ROLLUP_SUMS, "ttft_count")}


def test_a_replayed_batch_changes_nothing(store: Store) -> None:
    batch = [record("1", "running"), record("1"), record("2", "running"), record("3", "error")]
    ledger.ingest(store, batch)
    once = totals(store)
    ledger.ingest(store, batch)
    ledger.ingest(store, [record("1", "running")])
    assert totals(store) == once
    assert (once["requests"], once["ok"], once["error"]) == (2, 1, 1)
    assert (once["prompt_tokens"], once["completion_tokens"], once["ttft_count"]) == (20, 10, 2)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=30), st.integers(1, 7))
def test_any_order_and_any_batches_sum_up_to_the_same(
    tmp_path_factory: pytest.TempPathFactory, order: list[tuple[int, bool]], size: int
) -> None:
    store = Store(f"sqlite:///{tmp_path_factory.mktemp('ledger') / 'g.db'}")
    store.migrate()
    records = [record(str(id), "ok" if ended else "running", prompt_tokens=2**id) for id, ended in order]
    for start in range(0, len(records), size):
        ledger.ingest(store, records[start : start + size])
    ended = {id for id, ended in order if ended}
    assert totals(store)["prompt_tokens"] == sum(2**id for id in ended)
    assert totals(store)["requests"] == len(ended)
    with store.read() as connection:
        assert connection.execute(sa.select(sa.func.count()).select_from(t.requests)).scalar() == len(
            {i for i, _ in order}
        )
    store.close()


def test_a_dead_process_leaves_aborted_requests_which_a_late_end_replaces(store: Store) -> None:
    ledger.register(store, "p", "host", 1, 60)
    ledger.ingest(store, [record("1", "running"), record("2")])
    assert ledger.reap(store, "p", dead=True) == 1
    assert ledger.reap(store, "p", dead=True) == 0
    after = totals(store)
    assert (after["aborted"], after["ok"], after["prompt_tokens"]) == (1, 1, 10)
    ledger.ingest(store, [record("1")])  # its journal turns up
    ledger.ingest(store, [record("1")])
    late = totals(store)
    assert (late["aborted"], late["ok"], late["requests"], late["prompt_tokens"]) == (0, 2, 2, 20)


def test_quota_use_moves_with_the_rows(store: Store) -> None:
    ledger.register(store, "p", "host", 1, 60)
    grant = pools.acquire(store, "p", "k", [pools.Need("quota_month", 100, 1)])["quota_month"]
    windows = {"quota_month": grant.window_start}
    batch = [record("1", windows=windows), record("2", windows=windows)]
    assert ledger.ingest(store, batch) == {("k", "quota_month", grant.window_start): 30}
    assert ledger.ingest(store, batch) == {}
    with store.read() as connection:
        assert reports.quotas(connection, "k")["quota_month"]["used"] == 30
        assert connection.execute(sa.select(t.limit_shares.c.amount)).scalar() == 70
    ledger.reap(store, "p", dead=True)
    ledger.register(store, "q", "host", 1, 60)
    assert pools.acquire(store, "q", "k", [pools.Need("quota_month", 100, 1)])["quota_month"].amount == 70


def test_spend_uses_the_price_at_the_end_of_the_request(store: Store) -> None:
    accounts.set_price(store, "admin", "m", {"prompt": 2.0, "cached": 0.5, "completion": 8.0})
    ledger.ingest(store, [record("1", cached_tokens=4)])
    accounts.set_price(store, "admin", "m", None)
    ledger.ingest(store, [record("2")])
    assert totals(store)["cost_nano"] == (6 * 2.0 + 4 * 0.5 + 5 * 8.0) * 1000
    with store.read() as connection:
        text = reports.as_csv(reports.usage(connection, ALL, ("model",)))
    p = f"{middle(bin_of(50.0)):.1f}"
    assert text.splitlines()[1].endswith(f"0.000054000,{p},{p},{p}")


def test_load_test_traffic_is_apart(store: Store) -> None:
    ledger.ingest(store, [record("1"), record("2", load_test=True)])
    with store.read() as connection:
        live = reports.Selection(since=ALL.since, until=ALL.until)
        assert reports.usage(connection, live)[0]["requests"] == 1
        assert reports.usage(connection, ALL)[0]["requests"] == 2
        assert [row["id"] for row in reports.requests(connection, live)] == ["1"]


def test_old_rows_go_and_day_figures_stay(store: Store) -> None:
    ledger.ingest(store, [record("1"), record("2", started_at=time.time())])
    ledger.prune(store, 86_400, 86_400)
    with store.read() as connection:
        assert connection.execute(sa.select(t.requests.c.id)).scalars().all() == ["2"]
        assert connection.execute(sa.select(sa.func.count()).select_from(t.rollup_minute)).scalar() == 1
        assert connection.execute(sa.select(sa.func.sum(t.rollup_day.c.requests))).scalar() == 2


# ---------------------------------------------------------------- the journal

KILLED = """
import os, signal, sys
from pathlib import Path
from firsttoken.gateway.journal import Journal, Record
journal = Journal(Path(sys.argv[1]), "dead")
for i in range(50):
    common = dict(id=str(i), process_id="dead", key_id="k", endpoint="chat", alias="a", model="m", started_at=1.7e9)
    journal.append(Record(**common))
    if i % 2:
        journal.append(Record(**common, status="ok", prompt_tokens=1))
    if i == 20:
        journal.rotate()
os.write(journal.fd, b'{"id":"torn","proc')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "journal"
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == -9
    assert ledger.bury_orphans(store, folder, own="me") == ["dead"]
    sums = totals(store)
    assert (sums["ok"], sums["aborted"], sums["prompt_tokens"]) == (25, 25, 25)
    assert list(folder.iterdir()) == []


def test_a_live_process_is_not_buried(store: Store, tmp_path: Path) -> None:
    mine = Journal(tmp_path, "alive")
    mine.append(record("1", "running", process_id="alive"))
    assert ledger.bury_orphans(store, tmp_path, own="me") == []
    assert [r.id for r in mine.replay()] == ["1"]
    mine.close(delete=True)
    assert list(tmp_path.glob("alive*")) == []


@given(
    st.lists(
        st.builds(
            Record,
            **{f: st.text(max_size=8) for f in ("id", "process_id", "key_id", "endpoint", "alias", "model")},
            started_at=st.floats(0, 2e9),
            prompt_tokens=st.none() | st.integers(0, 2**40),
            error=st.none() | st.text(max_size=20),
        )
    )
)
def test_records_come_back_as_they_were(records: list[Record]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        written = Journal(Path(folder), "p")
        for one in records:
            written.append(one)
        assert list(journal.read(written.path)) == records
        written.close(delete=True)


# ---------------------------------------------------------------- histograms


@given(st.lists(st.floats(0.2, 1e6), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99]))
def test_percentiles_are_within_five_percent(values: list[float], share: float) -> None:
    counts: dict[int, int] = {}
    for value in values:
        counts[bin_of(value)] = counts.get(bin_of(value), 0) + 1
    exact = sorted(values)[max(1, -int(-share * len(values) // 1)) - 1]
    found = percentile(counts, share)
    assert found is not None
    assert abs(found / exact - 1) < 0.05


def test_bins_have_ends() -> None:
    assert bin_of(0.0) == 0
    assert bin_of(1e12) == LAST_BIN
    assert middle(bin_of(100.0)) == pytest.approx(100.0, rel=0.045)
    assert percentile({}, 0.5) is None
