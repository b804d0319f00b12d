"""The engine's own figures on one GPU: an 8B shape with random weights, no HTTP.

    python benchmarks/gpu_engine.py [--json FILE]

TTFT and TPOT of `Engine.step`, bf16, Llama-3-8B's shape. Random weights: the figures are of time, not of text.
Medians of 5 (TTFT) and of 64 steps (TPOT).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

import torch

from firsttoken.engine import EngineConfig, Request, SamplingParams
from firsttoken.engine.engine import Engine
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 128001,
}


def random_model() -> Decoder:
    """Weights of a trained model's scale, drawn on the GPU."""
    model = Decoder(ModelConfig.from_dict(LLAMA_3_8B), torch.bfloat16, torch.device("cuda"))
    torch.manual_seed(0)
    for name, weight in model.named_weights().items():
        if "norm" in name:
            weight.fill_(1.0)
        else:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    model.prepare()
    return model


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(0)
        self.serial = 0

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randrange(1000, 100_000) for _ in range(length)]

    def ttft(self, prompts: list[list[int]]) -> list[float]:
        """Seconds to the first token of requests that arrive together."""
        started = time.perf_counter()
        names = {}
        for prompt in prompts:
            self.serial += 1
            name = f"r{self.serial}"
            names[name] = 0.0
            params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
            self.engine.add_request(Request(request_id=name, prompt_token_ids=prompt, sampling=params))
        while self.engine.has_work():
            for output in self.engine.step():
                names[output.request_id] = time.perf_counter() - started
        return list(names.values())

    def tpot(self, batch: int, context: int, steps: int) -> float:
        """Median seconds of a decode step of `batch` sequences."""
        for _ in range(batch):
            self.serial += 1
            params = SamplingParams(temperature=0, max_tokens=steps + 1, ignore_eos=True)
            self.engine.add_request(
                Request(request_id=f"r{self.serial}", prompt_token_ids=self.prompt(context), sampling=params)
            )
        times = []
        while self.engine.has_work():
            started = time.perf_counter()
            outputs = self.engine.step()
            if len(outputs) == batch:
                times.append(time.perf_counter() - started)
        return median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json")
    arguments = parser.parse_args()
    started = time.perf_counter()
    model = random_model()
    engine = Engine(EngineConfig(model="llama-3-8b shape, random weights", max_model_len=8192), model=model)
    engine.warmup()
    bench = Bench(engine)
    figures: dict[str, float] = {"start_s": time.perf_counter() - started}
    for length in (512, 2048, 8000):
        figures[f"ttft_{length}_ms"] = 1e3 * median(bench.ttft([bench.prompt(length)])[0] for _ in range(5))
    shared = bench.prompt(2048)
    bench.ttft([shared])
    figures["ttft_2048_cached_128_new_ms"] = 1e3 * median(
        bench.ttft([shared + bench.prompt(128)])[0] for _ in range(5)
    )
    burst = bench.ttft([bench.prompt(2048) for _ in range(64)])
    figures["burst_64x2048_mean_ms"] = 1e3 * sum(burst) / len(burst)
    figures["burst_64x2048_max_ms"] = 1e3 * max(burst)
    for batch in (1, 16, 64):
        figures[f"tpot_batch_{batch}_ms"] = 1e3 * bench.tpot(batch, 512, 64)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name, value in figures.items():
        print(f"{name:32} {value:10.2f}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"device": torch.cuda.get_device_name(), "torch": torch.__version__} | figures, file, indent=1
            )


if __name__ == "__main__":
    main()
