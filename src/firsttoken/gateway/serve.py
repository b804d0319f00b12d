"""The processes of `firsttoken gateway`: a parent that binds the ports, workers that relay, the console.

The parent serves nothing itself: it migrates the store, starts the others, passes SIGHUP and SIGTERM on, and
replaces a worker that died. A worker ends when its parent is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import uvicorn

from firsttoken.engine.config import ConfigError
from firsttoken.gateway import accounts
from firsttoken.gateway.app import App
from firsttoken.gateway.config import Config, load
from firsttoken.gateway.metrics import CONTENT_TYPE
from firsttoken.gateway.protocol import capped
from firsttoken.gateway.store import Store
from firsttoken.listening import BACKLOG, listen

log = logging.getLogger("firsttoken.gateway")

RESTART_PAUSE_S = 1.0
CONSOLE_RESTART_S = 10.0
"""A console that ended is started again so long after its last start: one that can't start doesn't spin."""
CONSOLE_STOP_S = 3.0
KILL_AFTER_S = 10.0
"""How long after the drain time a worker that hangs is killed."""


# ---------------------------------------------------------------- the parent


class Gateway:
    """The parent process. `run` returns when all has ended."""

    def __init__(self, config: Config, path: Path | None, flags: Mapping[str, Any]):
        self.config, self.path, self.flags = config, path, dict(flags)
        self.spawn = multiprocessing.get_context("spawn")
        self.workers: list[BaseProcess] = []
        self.console: subprocess.Popen[bytes] | None = None
        self.console_started = 0.0
        self.stopping = False

    def run(self, new_admin_key: bool = False) -> int:
        settings = self.config.gateway
        self.config.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.rmtree(self.config.state_dir / "metrics", ignore_errors=True)
        if settings.workers > 1:
            (self.config.state_dir / "metrics").mkdir(mode=0o700)
        secret = prepare_store(self.config, new_admin_key)
        self.socket = bind(settings.host, settings.port, "--port")
        self.metrics_socket = None
        if settings.metrics_port is not None:
            self.metrics_socket = bind(settings.host, settings.metrics_port, "--metrics-port")
        self.console_socket = None
        if settings.console and _console_installed():
            self.console_socket = bind(settings.host, settings.console_port, "--console-port")
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGHUP, self._reload)
        ready = [self._start_worker() for _ in range(settings.workers)]
        for connection in ready:
            if not self._wait_ready(connection):
                self._end()
                return 1
        url = f"http://{settings.host}:{self.socket.getsockname()[1]}{settings.root_path}"
        if self.console_socket is not None:
            self._start_console()
        if secret is not None:
            print(f"admin key (shown once, keep it): {secret}", flush=True)
        if self.metrics_socket is not None:
            print(f"metrics on port {self.metrics_socket.getsockname()[1]}", flush=True)
        if self.console_socket is not None:
            print(f"console on http://{settings.host}:{self.console_socket.getsockname()[1]}", flush=True)
        print(f"gateway ready on {url}", flush=True)
        while not self.stopping:
            self._watch()
        self._end()
        return 0

    def _start_worker(self) -> Connection:
        ours, theirs = self.spawn.Pipe(duplex=False)
        arguments = (self.config, self.path, self.flags, self.socket, self.metrics_socket, theirs)
        worker = self.spawn.Process(target=work, args=arguments, daemon=False)
        worker.start()
        theirs.close()
        self.workers.append(worker)
        return ours

    def _wait_ready(self, connection: Connection) -> bool:
        try:
            return bool(connection.recv())
        except EOFError:
            return False

    def _start_console(self) -> None:
        """A program of its own, on a socket of the parent's: another try of it needs no port that may be taken."""
        assert self.console_socket is not None
        descriptor = self.console_socket.fileno()
        command = [sys.executable, "-m", "firsttoken.gateway.console", "--gateway", self._own_url()]
        command += ["--fd", str(descriptor), "--parent", str(os.getpid())]
        # What only workers need to know stays with them.
        upstreams = {upstream.api_key_env for upstream in self.config.upstreams}
        secrets = upstreams | {self.config.gateway.metrics_token_env}
        environment = {name: value for name, value in os.environ.items() if name not in secrets}
        self.console_started = time.monotonic()
        self.console = subprocess.Popen(command, pass_fds=[descriptor], env=environment)

    def _own_url(self) -> str:
        """Where this gateway is reached from this machine."""
        host, port = self.socket.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        return f"http://{f'[{host}]' if ':' in host else host}:{port}{self.config.gateway.root_path}"

    def _watch(self) -> None:
        """Waits for a worker's end, or a signal; replaces what died."""
        ended = wait([worker.sentinel for worker in self.workers], timeout=0.5)
        self._watch_console()
        if not ended or self.stopping:
            return
        for worker in [worker for worker in self.workers if worker.sentinel in ended]:
            worker.join()
            log.error("worker %s ended with code %s; starting another", worker.pid, worker.exitcode)
            self.workers.remove(worker)
            time.sleep(RESTART_PAUSE_S)
            self._start_worker()

    def _watch_console(self) -> None:
        if self.console is None or self.console.poll() is None or self.stopping:
            return
        if time.monotonic() - self.console_started >= CONSOLE_RESTART_S:
            log.error("the console ended with code %s; starting another", self.console.returncode)
            self._start_console()

    def _stop(self, number: int, frame: Any) -> None:
        self.stopping = True
        for worker in self.workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, number)

    def _reload(self, number: int, frame: Any) -> None:
        for worker in self.workers:
            if worker.pid is not None and worker.is_alive():
                os.kill(worker.pid, signal.SIGHUP)

    def _end(self) -> None:
        if self.console is not None:
            self.console.terminate()
        until = time.monotonic() + self.config.gateway.drain + KILL_AFTER_S
        for worker in self.workers:
            if worker.is_alive() and worker.pid is not None:
                os.kill(worker.pid, signal.SIGTERM)
        for worker in self.workers:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join()
        if self.console is not None:
            try:
                self.console.wait(CONSOLE_STOP_S)
            except subprocess.TimeoutExpired:  # it hangs; nothing of worth is lost with it
                self.console.kill()
                self.console.wait()


def prepare_store(config: Config, new_admin_key: bool = False) -> str | None:
    """Migrates; returns the secret of an admin key if one was made (the first ever, or on demand)."""
    store = Store(config.database_url)
    try:
        try:
            store.migrate()
        except Exception as error:
            message = str(error).splitlines()[0]
            raise ConfigError(
                f"database: {store.url.render_as_string(hide_password=True)}: {message}"
            ) from None
        if new_admin_key:
            name = f"admin {time.strftime('%Y-%m-%d %H:%M:%S')}"
            return accounts.create_key(store, "command line", {"name": name}, role="admin")[1]
        return accounts.ensure_admin_key(store)
    finally:
        store.close()


def _console_installed() -> bool:
    if importlib.util.find_spec("nicegui") is not None:
        return True
    log.warning(
        "no console: it needs NiceGUI (pip install 'firsttoken[gateway]'); --no-console says that you know"
    )
    return False


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A listening socket. ConfigError if the address is taken or not ours."""
    try:
        return listen(host, port)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{flag} {port} on {host}: {why}; choose another") from None


# ---------------------------------------------------------------- a worker


def work(
    config: Config,
    path: Path | None,
    flags: Mapping[str, Any],
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    ready: Connection,
) -> None:
    """A worker's whole life."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    _allow_many_files(config.gateway.max_connections)
    # The store's thread shares the interpreter with the event loop; let it hold it for half a millisecond
    # at most.
    sys.setswitchinterval(0.0005)
    with contextlib.suppress(KeyboardInterrupt):
        _run(_serve(config, path, flags, listener, metrics_listener, ready))


def _run(main: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(
    config: Config,
    path: Path | None,
    flags: Mapping[str, Any],
    listener: socket.socket,
    metrics_listener: socket.socket | None,
    ready: Connection,
) -> None:
    store = Store(config.database_url)
    app = App(config, store)
    server = make_server(app)
    loop = asyncio.get_running_loop()

    def reload() -> None:
        if path is None:
            return
        try:
            app.reload(load(path, flags))
        except ConfigError as error:
            log.error("reload: %s; nothing is changed", error)

    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def parent_died() -> None:
        loop.remove_reader(sentinel)
        server.should_exit = True

    loop.add_signal_handler(signal.SIGHUP, reload)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.handle_exit, number, None)
    loop.add_reader(sentinel, parent_died)
    await app.start()
    metrics = await _serve_metrics(app, metrics_listener) if metrics_listener is not None else None
    try:
        # What start-up made stays for good: a full collection, milliseconds of pause, need not look at it again.
        gc.collect()
        gc.freeze()
        with contextlib.suppress(OSError):  # nobody waits to hear of a worker that replaces another
            ready.send(True)
        ready.close()
        await server.serve(sockets=[listener])
    finally:
        if metrics is not None:
            metrics.close()
        await app.relay.end_all()
        await app.stop()
        store.close()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers: it raises the signal again at its end, which would kill the process
    before it has settled and given its lease back."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: App) -> uvicorn.Server:
    settings = app.config.gateway
    return _Server(
        uvicorn.Config(
            app,
            http=capped(settings.max_header_bytes, settings.request_read, lambda: app.config.gateway.idle),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # a middleware, for a client address that nobody asks for
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(max(1, settings.request_read)),
            timeout_graceful_shutdown=int(max(1, settings.drain)),
            limit_concurrency=settings.max_connections,
            backlog=BACKLOG,
        )
    )


async def _serve_metrics(app: App, listener: socket.socket) -> asyncio.Server:
    """Answers any request on the metrics port with the metrics: nothing else is there."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            body = await app.render_metrics()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            writer.write(head % (CONTENT_TYPE, len(body)) + body)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(answer, sock=listener)


def _allow_many_files(connections: int) -> None:
    """Each stream holds two sockets; the usual limit of 1,024 files is for another age."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * connections + 512
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
