from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from firsttoken.gateway.store import Store

from .running import GatewayProgram, Program, mock, postgres, postgres_tools


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    tools = postgres_tools()
    if tools is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with postgres(tools) as url:
        yield url


def new_postgres_database(server: str) -> str:
    name = f"t{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return server.rpartition("/")[0] + f"/{name}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty database, of both kinds in turn."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'gateway.db'}"
    return new_postgres_database(request.getfixturevalue("postgres_server"))


@pytest.fixture
def store(database: str) -> Iterator[Store]:
    store = Store(database)
    store.migrate()
    yield store
    store.close()


@pytest.fixture(scope="session")
def upstream() -> Iterator[Program]:
    """A mock upstream with its first token after 10 ms and one every 5 ms."""
    program = mock("--ttft", "10ms", "--itl", "5ms", "--tokens", "5")
    yield program
    program.stop()


@pytest.fixture(scope="module")
def gateway(upstream: Program, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProgram]:
    """A gateway before the mock, for tests that only make keys of their own."""
    one = {"name": "one", "base_url": f"{upstream.url}/v1", "models": ["mock"], "priority": True}
    program = GatewayProgram(tmp_path_factory.mktemp("gateway"), [one], '[aliases.chat]\nmodel = "mock"\n')
    yield program
    program.stop()
