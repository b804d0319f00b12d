"""The training loop that both kinds of draft share: master weights, schedule, progress, and a way back after a stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from firsttoken.drafting.acceptance import AcceptanceFigures


class Holder(Protocol):
    """What holds a weight: `Linear` or `RMSNorm`."""

    weight: torch.Tensor


class Learner(Protocol):
    """A draft in training."""

    def holders(self) -> Mapping[str, Holder]:
        """Holders of the weights that change."""

    def num_rows(self) -> int:
        """Conversations to learn from."""

    def rows_per_step(self) -> int: ...

    def draw(self, rows: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """What a step over conversations `rows` int64 [B] looks at: tensors of the same shapes every time."""

    def loss(self, *drawn: torch.Tensor) -> torch.Tensor:
        """Mean loss at what was drawn."""

    def figures(self) -> AcceptanceFigures:
        """On held-out conversations, greedily."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int
    rate: float = 1e-3
    """Learning rate after the warm-up; it then falls in a line to zero."""
    warmup_share: float = 0.02
    muon: bool = False
    seed: int = 0
    what: str = ""
    """Names all else that decides the weights (target, corpus, shape): a saved state of something else is not taken."""


class Trainer:
    """Weights are kept in float32 and rounded to the draft's dtype for each step."""

    def __init__(self, learner: Learner, config: TrainConfig, device: torch.device) -> None:
        self.learner = learner
        self.config = config
        self.device = device
        self.step = 0
        self._holders = learner.holders()
        self._dtypes = {name: h.weight.dtype for name, h in self._holders.items()}
        self._masters = {
            name: torch.nn.Parameter(h.weight.detach().to(torch.promote_types(h.weight.dtype, torch.float32)))
            for name, h in self._holders.items()
        }
        matrices = [p for p in self._masters.values() if p.ndim == 2]
        vectors = [p for p in self._masters.values() if p.ndim != 2]
        fused = device.type == "cuda"
        self._optimizers: list[torch.optim.Optimizer] = []
        if config.muon:
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=config.rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
            )
        else:
            vectors = matrices + vectors
        self._optimizers.append(
            torch.optim.AdamW(vectors, lr=config.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
        )
        self._order = torch.empty(0, dtype=torch.int64)
        self._graph: _Graph | None = None

    def run(
        self,
        until: int | None = None,
        *,
        on_step: Callable[[int, float], None] = lambda step, loss: None,
        every: int = 50,
    ) -> None:
        """Steps up to `until` (all, by default). on_step: called every `every` steps with the mean loss since."""
        until = self.config.steps if until is None else min(until, self.config.steps)
        total, since = torch.zeros((), device=self.device), 0
        while self.step < until:
            total += self._one_step(self.config.rate * self._schedule())
            since += 1
            self.step += 1
            if self.step % every == 0 or self.step == until:
                on_step(self.step, float(total) / since)
                total.zero_()
                since = 0
        self.round_weights()

    def _one_step(self, rate: float) -> torch.Tensor:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        generator = torch.Generator(self.device).manual_seed(self.config.seed * 1_000_003 + self.step)
        loss = self._gradients(self.learner.draw(self._rows(), generator))
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss

    def _gradients(self, drawn: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Sets every master's gradient; returns the loss."""
        if self.device.type != "cuda":
            return self._forward_backward(drawn)
        if self._graph is None:
            self._graph = _Graph(self._forward_backward, drawn)
        return self._graph(drawn)

    def _forward_backward(self, drawn: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for name, holder in self._holders.items():
            self._masters[name].grad = None
            holder.weight = self._masters[name].to(self._dtypes[name])
        loss = self.learner.loss(*drawn)
        loss.backward()
        return loss.detach()

    def _schedule(self) -> float:
        warmup = max(1, round(self.config.steps * self.config.warmup_share))
        if self.step < warmup:
            return (self.step + 1) / warmup
        return max(0.0, (self.config.steps - self.step) / max(1, self.config.steps - warmup))

    def _rows(self) -> torch.Tensor:
        """Conversations of this step: each once before any comes again, in an order of the seed."""
        count, size = self.learner.num_rows(), self.learner.rows_per_step()
        size = min(size, count)
        per_epoch = count // size
        epoch, place = divmod(self.step, per_epoch)
        if place == 0 or not len(self._order):  # a new epoch, or after a restore
            generator = torch.Generator().manual_seed(self.config.seed * 7_919 + epoch)
            self._order = torch.randperm(count, generator=generator)
        return self._order[place * size : (place + 1) * size].to(self.device)

    def round_weights(self) -> None:
        """Puts the weights as they are now into the draft, without gradients."""
        for name, holder in self._holders.items():
            holder.weight = self._masters[name].detach().to(self._dtypes[name], copy=True)

    def seconds_per_step(self, tries: int = 6) -> float:
        """What a step takes here. For a trainer that is thrown away: its optimizers are used, at rate zero."""
        started = 0.0
        for i in range(tries + 2):
            if i == 2:
                self._synchronize()
                started = time.perf_counter()
            self._one_step(0.0)
        self._synchronize()
        self.round_weights()
        return (time.perf_counter() - started) / tries

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    # -- interruption ---------------------------------------------------------------------------------------

    def save(self, file: Path) -> None:
        """All that `restore` needs to go on as if nothing had happened."""
        state: dict[str, Any] = {
            "config": self.config.__dict__,
            "step": self.step,
            "masters": {name: m.detach() for name, m in self._masters.items()},
            "optimizers": [o.state_dict() for o in self._optimizers],
        }
        partial = file.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(file)

    def restore(self, file: Path) -> bool:
        """False (and nothing changed) if there is no file, or it is of another training."""
        if not file.exists():
            return False
        state = torch.load(file, map_location=self.device, weights_only=True)
        if state["config"] != self.config.__dict__:
            return False
        self.step = state["step"]
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["masters"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self._order = torch.empty(0, dtype=torch.int64)
        self.round_weights()
        return True


class _Graph:
    """Forward and backward as one CUDA graph: a step is two thousand kernels, and their launches take longer."""

    def __init__(
        self, function: Callable[[tuple[torch.Tensor, ...]], torch.Tensor], drawn: tuple[torch.Tensor, ...]
    ) -> None:
        self._inputs = tuple(x.clone() for x in drawn)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # what compiles or allocates once must have done so before the capture
                function(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = function(self._inputs)

    def __call__(self, drawn: tuple[torch.Tensor, ...]) -> torch.Tensor:
        for static, new in zip(self._inputs, drawn, strict=True):
            static.copy_(new)
        self._graph.replay()
        return self._loss


def steps_in(minutes: float, seconds_per_step: float) -> int:
    return max(1, math.floor(minutes * 60 / seconds_per_step))


def saved_steps(file: Path, config: TrainConfig) -> int | None:
    """The steps of the training saved in `file`, if it was one like `config` in all else."""
    if not file.exists():
        return None
    saved = torch.load(file, map_location="cpu", weights_only=True)["config"]
    steps: int = saved["steps"]
    return steps if {**saved, "steps": config.steps} == config.__dict__ else None
