"""Flags of vLLM, past and present, that people paste from posts: what each is here.

A flag with the same meaning under another name is translated, with a note on stderr; one that has nothing to
do here is dropped with a note; one that would change what is served is refused with what to do instead.
Flags that vLLM and firsttoken share are not in the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

from firsttoken.cli.main import underscores_to_hyphens
from firsttoken.engine.config import ConfigError


@dataclass(frozen=True)
class Renamed:
    """The same under another name, value and all."""

    flag: str


@dataclass(frozen=True)
class Dropped:
    """Has no effect here; `why` is a note on stderr."""

    why: str
    takes_value: bool = True


@dataclass(frozen=True)
class Refused:
    """Would change what is served; `instead` says what to do."""

    instead: str


@dataclass(frozen=True)
class Rewritten:
    """The value becomes other arguments, or a ConfigError."""

    rewrite: Callable[[str], list[str]]


def speculative_config(text: str) -> list[str]:
    """vLLM's `--speculative-config '{"method": …, "model": …, "num_speculative_tokens": …}'`."""
    try:
        config = json.loads(text)
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigError(f"--speculative-config is not a JSON object ({error})") from None
    method, model = config.get("method"), config.get("model")
    if model is not None and method in NGRAM_METHODS and model not in (*NGRAM_METHODS, "[ngram]"):
        raise ConfigError(
            f"--speculative-config: method {method} uses no model; remove model {model!r}, or the method"
        )
    if method in MODEL_METHODS and model is None:
        raise ConfigError(f"--speculative-config: method {method} needs a model: a draft's folder")
    arguments: list[str] = []
    for key, value in config.items():
        arguments += speculative_key(key, str(value))
    return arguments


NGRAM_METHODS = ("ngram", "ngram_gpu", "suffix")
MODEL_METHODS = ("draft_model", "eagle", "eagle3")


def speculative_key(key: str, value: str) -> list[str]:
    if key == "num_speculative_tokens":
        return ["--num-speculative-tokens", value]
    if key == "model":
        return speculative_model(value)
    if key == "method":
        return speculative_method(value)
    if key in ("draft_tensor_parallel_size", "tensor_parallel_size") and value == "1":
        return []
    if key in ("prompt_lookup_max", "prompt_lookup_min"):
        raise ConfigError(
            f"--speculative-config: {key} has no counterpart here: the longest match is always taken; remove it"
        )
    raise ConfigError(
        f"--speculative-config: {key} has no counterpart here; give --draft, --num-speculative-tokens and --speculation"
    )


def speculative_model(value: str) -> list[str]:
    return ["--draft", "ngram" if value in (*NGRAM_METHODS, "[ngram]") else value]


def speculative_method(method: str) -> list[str]:
    if method in NGRAM_METHODS:
        return ["--draft", "ngram"]
    if method in MODEL_METHODS:
        return []  # the kind of a draft stands in its own folder
    raise ConfigError(
        f"speculative method {method!r} is not built: use --draft ngram, or --draft with a draft's folder"
    )


def only_one(flag: str) -> Rewritten:
    """A degree of parallelism: 1 is what the embedded engine does."""

    def rewrite(value: str) -> list[str]:
        if value == "1":
            return []
        raise ConfigError(f"{flag} {value}: the embedded engine uses one device; remove the flag")

    return Rewritten(rewrite)


LOSSLESS = "speculation here is always exact, there is nothing to relax; remove the flag"

TABLE: dict[str, Renamed | Dropped | Refused | Rewritten] = {
    # gone from vLLM
    "--speculative-model": Rewritten(speculative_model),
    "--speculative-draft-tensor-parallel-size": only_one("--speculative-draft-tensor-parallel-size"),
    "--speculative-disable-by-batch-size": Dropped(
        "speculation is switched off by measured cost at every load level (--speculation auto)"
    ),
    "--speculative-max-model-len": Dropped("a draft works to the end of the target's context"),
    "--speculative-disable-mqa-scorer": Dropped("there is one way of verifying drafts", takes_value=False),
    "--spec-decoding-acceptance-method": Refused(LOSSLESS),
    "--typical-acceptance-sampler-posterior-threshold": Refused(LOSSLESS),
    "--typical-acceptance-sampler-posterior-alpha": Refused(LOSSLESS),
    "--ngram-prompt-lookup-max": Refused("say --draft ngram; the lengths of its matches are chosen by itself"),
    "--ngram-prompt-lookup-min": Refused("say --draft ngram; the lengths of its matches are chosen by itself"),
    "--swap-space": Dropped("nothing is swapped: a preempted request is computed again"),
    "--preemption-mode": Dropped("a preempted request is always computed again"),
    "--num-lookahead-slots": Dropped("slots for drafted tokens are reserved by themselves"),
    "--scheduler-delay-factor": Refused("what it was used for is --ttft-slo and --itl-target here"),
    "--num-scheduler-steps": Refused("steps are one token each; for the gap between tokens use --itl-target"),
    "--use-v2-block-manager": Dropped("there is one block manager", takes_value=False),
    # alive in vLLM
    "--speculative-config": Rewritten(speculative_config),
    "-sc": Rewritten(speculative_config),
    "--spec-model": Rewritten(speculative_model),
    "--spec-tokens": Renamed("--num-speculative-tokens"),
    "--spec-method": Rewritten(speculative_method),
    "--tensor-parallel-size": only_one("--tensor-parallel-size"),
    "-tp": only_one("--tensor-parallel-size"),
    "--pipeline-parallel-size": only_one("--pipeline-parallel-size"),
    "-pp": only_one("--pipeline-parallel-size"),
    "--data-parallel-size": only_one("--data-parallel-size"),
    "-dp": only_one("--data-parallel-size"),
    "--max-logprobs": Dropped("any number of logprobs that the API allows may be asked for"),
    "--enforce-eager": Dropped("there is no compilation to wait for", takes_value=False),
    "--async-scheduling": Dropped("steps are always planned ahead where that helps", takes_value=False),
    "--no-async-scheduling": Dropped("steps are planned ahead where that helps", takes_value=False),
    "--disable-log-requests": Dropped("requests are not logged", takes_value=False),
    "--no-enable-log-requests": Dropped("requests are not logged", takes_value=False),
    "--disable-log-stats": Dropped("statistics are at /metrics only", takes_value=False),
    "--disable-frontend-multiprocessing": Refused("the engine is always a process of its own; remove the flag"),
    "--kv-cache-memory-bytes": Renamed("--kv-cache-memory"),
    "--model": Refused("give the model without a flag: firsttoken serve MODEL"),
    "--tokenizer": Refused("the tokenizer is the model folder's tokenizer.json"),
    "--trust-remote-code": Refused("code from model folders is never run; remove the flag"),
    "--quantization": Refused("weights are served in --dtype"),
    "-q": Refused("weights are served in --dtype"),
    "--kv-cache-dtype": Refused("the KV cache has the type of --dtype"),
    "--enable-lora": Refused("LoRA is not built: merge the adapter into the weights"),
    "--enable-auto-tool-choice": Refused("tool calls are not built; remove the flag"),
    "--tool-call-parser": Refused("tool calls are not built; remove the flag"),
    "--reasoning-parser": Refused("reasoning is not split from the answer; remove the flag"),
    "--override-generation-config": Refused("put the values into a folder's generation_config.json and give that with"
                                            " --generation-config"),
}  # fmt: skip


def translate(arguments: list[str]) -> list[str]:
    """Command-line arguments as firsttoken takes them. Raises ConfigError for a refused flag."""
    result: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*result, argument, *rest]
        name, equals, value = argument.partition("=")
        name = underscores_to_hyphens(name) if name.startswith("--") else name
        if name.startswith("--speculative-config."):  # vLLM's dotted form of one key
            key = name.partition(".")[2].replace("-", "_")
            result += speculative_key(key, value if equals else next_value(name, rest))
            continue
        rule = TABLE.get(name)
        match rule:
            case None:
                result.append(argument)
            case Renamed(flag):
                note(f"{name} is {flag} here")
                result += [flag, value if equals else next_value(name, rest)]
            case Dropped(why, takes_value):
                note(f"{name} has no effect: {why}")
                if takes_value and not equals:
                    next_value(name, rest)
            case Refused(instead):
                raise ConfigError(f"{name}: {instead}")
            case Rewritten(rewrite):
                became = rewrite(value if equals else next_value(name, rest))
                note(f"{name} is {' '.join(became)} here" if became else f"{name} is not needed here")
                result += became
    return result


def next_value(name: str, rest: list[str]) -> str:
    if not rest:
        raise ConfigError(f"{name} needs a value")
    return rest.pop(0)


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


class TranslatingCommand(TyperCommand):
    """A command that takes vLLM's flags too: `app.command("serve", cls=TranslatingCommand)`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate(args))
