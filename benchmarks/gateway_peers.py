"""Another gateway, installed into a virtual environment of its own and started before the same mock upstream.

Its packages never meet ours: the environment lies in the cache folder (`FIRSTTOKEN_HOME`, by default `firsttoken` in
the user's cache folder), is made once, and only its own Python runs it.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from firsttoken.bench.server_process import free_port
from firsttoken.models import home

LITELLM = "1.80.0"
"""A release from before 1.82.7 and 1.82.8, which were published with code that stole credentials."""
START_LIMIT_S = 120.0
KEY = "sk-peer"


def start_litellm(folder: Path, upstream: str) -> tuple[subprocess.Popen[bytes], str]:
    """(process, address) of LiteLLM's proxy: one worker, the mock behind it, a master key, no database."""
    python = _installed(f"litellm[proxy]=={LITELLM}", f"litellm-{LITELLM}")
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: mock\n    litellm_params:\n      model: openai/mock\n"
        f"      api_base: {upstream}/v1\n      api_key: none\n"
        f"general_settings:\n  master_key: {KEY}\n"
    )
    port = free_port()
    command = [python.parent / "litellm", "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    log = open(folder / "litellm.log", "wb")  # noqa: SIM115 (the process keeps it)
    environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(folder), "LITELLM_LOG": "ERROR"}
    # An environment of its own too: no key of this shell reaches it, and it fetches no price list.
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + START_LIMIT_S
    while True:
        try:
            urllib.request.urlopen(f"{url}/health/liveliness", timeout=5).close()
            return process, url
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > until:
                process.kill()
                raise SystemExit(
                    f"LiteLLM did not start: {(folder / 'litellm.log').read_text()[-2000:]}"
                ) from None
            time.sleep(0.5)


def _installed(requirement: str, name: str) -> Path:
    """The Python of the virtual environment that has `requirement`, made if need be."""
    environment = home() / "peers" / name
    python, done = environment / "bin" / "python", environment / "installed"
    if not done.exists():
        print(f"installing {requirement} into {environment}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
        done.touch()
    return python
