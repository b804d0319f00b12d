"""An engine without a model, for tests of the process around it: what it does is written in the prompt.

A prompt [start, ...] yields start, start + 1, ... one token per step and request. The negative numbers below
make it fail in the ways an engine can. `EngineConfig.model` holds options as JSON, see `Options`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.engine.request import Request, RequestOutput, RequestTiming

RAISE = -1
"""The step raises."""
REFUSE = -2
"""add_request raises ValueError."""
FAIL_ALONE = -3
"""The step answers this request with an error output."""
HANG = -4
"""The step does not return."""
CRASH = -5
"""The step dies of a segmentation fault."""
EXIT = -6
"""The step prints a line and exits with code 7."""
HUGE = -7
"""The step's output cannot be sent: it holds an integer that msgpack has no form for."""


@dataclass
class Options:
    load_s: float = 0.0
    step_s: float = 0.0
    load_error: str | None = None
    """config, crash or bug."""
    fail_once: str | None = None
    """A file: while it exists, loading fails (and removes it)."""
    step_log: str | None = None
    """A file that gets a byte per step."""


class ScriptedEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.options = Options(**json.loads(config.model or "{}"))
        self.running: dict[str, tuple[Request, int]] = {}
        self.steps = 0
        self.generated = 0
        self.finished: dict[str, int] = {}
        time.sleep(self.options.load_s)
        if self.options.fail_once and Path(self.options.fail_once).exists():
            Path(self.options.fail_once).unlink()
            raise RuntimeError("failed once")
        match self.options.load_error:
            case "config":
                raise ConfigError("no model in /nowhere: name a folder that exists")
            case "bug":
                raise RuntimeError("a bug\nin two lines")
            case "crash":
                print("out of luck", file=sys.stderr)
                os._exit(9)

    def warmup(self) -> None:
        pass

    def info(self) -> dict[str, Any]:
        return dict(
            model="scripted",
            max_model_len=4096,
            vocab_size=1 << 30,
            eos_token_ids=[0],
            device="cpu",
            dtype="none",
            num_kv_blocks=256,
            block_size=16,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=2048,
            settings={"max_num_seqs": self.config.max_num_seqs},
        )

    def add_request(self, request: Request) -> None:
        if request.prompt_token_ids[0] == REFUSE:
            raise ValueError("the prompt is refused")
        self.running[request.request_id] = (request, 0)

    def abort(self, request_id: str) -> None:
        if self.running.pop(request_id, None):
            self.finished["abort"] = self.finished.get("abort", 0) + 1

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self, on_outputs: Callable[[list[RequestOutput]], None]) -> list[RequestOutput]:
        self.steps += 1
        time.sleep(self.options.step_s)
        if self.options.step_log:
            with open(self.options.step_log, "ab") as file:
                file.write(b".")
        outputs = []
        for request_id, (request, made) in list(self.running.items()):
            start = request.prompt_token_ids[0]
            output = RequestOutput(request_id=request_id, token_ids=[start + made])
            self._misbehave(start, output)
            made += 1
            self.generated += 1
            self.running[request_id] = (request, made)
            if made == 1:
                output.num_cached_tokens = 0
                output.timing = RequestTiming(queue=0.0, prefill=0.001)
            if made == request.sampling.max_tokens:
                output.finish_reason = output.finish_reason or "length"
            if output.finished:
                del self.running[request_id]
                self.finished[output.finish_reason] = self.finished.get(output.finish_reason, 0) + 1
            outputs.append(output)
        on_outputs(outputs)
        return outputs

    def _misbehave(self, code: int, output: RequestOutput) -> None:
        if code == RAISE:
            raise RuntimeError("the step went wrong")
        elif code == FAIL_ALONE:
            output.token_ids, output.finish_reason, output.error = [], "error", "only this one failed"
        elif code == HANG:
            time.sleep(3600)
        elif code == CRASH:
            ctypes.string_at(0)
        elif code == EXIT:
            print("the last words", file=sys.stderr, flush=True)
            os._exit(7)
        elif code == HUGE:
            output.token_ids = [1 << 70]

    def stats(self) -> dict[str, Any]:
        return dict(
            num_running=len(self.running),
            num_blocks_used=len(self.running),
            num_blocks_total=256,
            steps=self.steps,
            generation_tokens=self.generated,
            finished=dict(self.finished),
        )

    def reset_prefix_cache(self) -> bool:
        return not self.running

    def reconfigure(self, changes: dict[str, Any]) -> dict[str, Any]:
        if changes.get("max_num_seqs", 1) < 1:
            raise ConfigError("max_num_seqs must be at least 1")
        self.config.max_num_seqs = changes["max_num_seqs"]
        return {"max_num_seqs": self.config.max_num_seqs}
