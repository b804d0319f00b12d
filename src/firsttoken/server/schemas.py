"""The parameters of the generation routes: what is honoured, accepted without effect, and refused.

Honoured parameters are the fields of the structs below: name, type, bounds and description in one place. From
them come the checks, the OpenAPI document and docs/api-parameters.md. Error messages name the parameter.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from firsttoken.server.errors import bad_request, nearest
from firsttoken.server.unreadable import unreadable

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 32
MAX_STOP_CHARS = 256

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class Generation(Struct, kw_only=True, forbid_unknown_fields=True):
    """What chat and text completions have in common. None: the model's default, or the API's."""

    model: Annotated[str | None, Meta(description="Name of the model, as /v1/models lists it.")] = None
    temperature: Annotated[
        Annotated[float, Meta(ge=0.0, le=100.0)] | None,
        Meta(description="0 is greedy. Default: the model's, else 1."),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(gt=0.0, le=1.0)] | None, Meta(description="Default: the model's, else 1.")
    ] = None
    top_k: Annotated[
        Annotated[int, Meta(ge=-1, lt=2**31)] | None,
        Meta(description="0 or -1: the whole vocabulary. Default: the model's, else 0."),
    ] = None
    min_p: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None, Meta(description="Default: the model's, else 0.")
    ] = None
    seed: Annotated[
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None,
        Meta(description="The same seed gives the same text, whatever else the server does."),
    ] = None
    presence_penalty: Annotated[Penalty, Meta(description="Against tokens that have appeared at all.")] = 0.0
    frequency_penalty: Annotated[
        Penalty, Meta(description="Against tokens by how often they have appeared.")
    ] = 0.0
    repetition_penalty: Annotated[
        Annotated[float, Meta(gt=0.0, le=100.0)] | None,
        Meta(description="Above 1: against tokens in prompt and answer. Default: the model's, else 1."),
    ] = None
    logit_bias: Annotated[
        dict[str, Annotated[float, Meta(ge=-100.0, le=100.0)]],
        Meta(description="Token id → number added to its score, -100 to 100."),
    ] = {}
    stop: Annotated[
        str | list[str],
        Meta(
            description=f"Up to {MAX_STOPS} texts of up to {MAX_STOP_CHARS} characters that end the answer."
        ),
    ] = []
    stop_token_ids: Annotated[
        list[TokenId], Meta(description="Token ids that end the answer.", max_length=128)
    ] = []
    include_stop_str_in_output: Annotated[bool, Meta(description="Keep the stop text in the answer.")] = False
    ignore_eos: Annotated[bool, Meta(description="Go on after the end-of-text token.")] = False
    min_tokens: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)],
        Meta(description="Nothing ends the answer before this many tokens."),
    ] = 0
    n: Annotated[Annotated[int, Meta(ge=1, le=MAX_CHOICES)], Meta(description="Answers per prompt.")] = 1
    stream: Annotated[bool, Meta(description="Send the answer as it is made, as server-sent events.")] = False
    stream_options: Annotated[
        StreamOptions | None,
        Meta(
            description="include_usage: a last chunk with the usage; continuous_usage_stats: in every chunk."
            " Only with stream."
        ),
    ] = None
    skip_special_tokens: Annotated[bool, Meta(description="Leave special tokens out of the text.")] = True
    prompt_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(
            description="Log-probabilities of the prompt's tokens and so many alternatives; not with stream."
        ),
    ] = None
    return_token_ids: Annotated[
        bool, Meta(description="Add token_ids and prompt_token_ids to the answer.")
    ] = False
    return_tokens_as_token_ids: Annotated[
        bool, Meta(description="In logprobs, name tokens token_id:ID instead of by their text.")
    ] = False
    priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)], Meta(description="Lower is served first.")
    ] = 0
    cache_salt: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        Meta(description="Prefixes in the cache are shared only between requests with the same salt."),
    ] = None
    ttft_slo_ms: Annotated[
        Annotated[float, Meta(gt=0.0, le=1e9)] | None,
        Meta(description="Limit for this request's time to first token. Default: --ttft-slo."),
    ] = None
    response_format: Annotated[ResponseFormat | None, Meta(description='Only {"type": "text"}.')] = None


Message = dict[str, Any]
_MESSAGES_SCHEMA = {
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "null"},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        },
                    },
                ]
            },
        },
    }
}


class ChatRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[
        list[Message],
        Meta(
            min_length=1,
            description="The conversation. Contents are texts or lists of text parts; which roles may stand"
            " where is for the model's chat template to say.",
            extra_json_schema=_MESSAGES_SCHEMA,
        ),
    ]
    max_completion_tokens: Annotated[
        Annotated[int, Meta(ge=1, lt=2**31)] | None,
        Meta(description="Most tokens of an answer. Default: what is left of the context."),
    ] = None
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, lt=2**31)] | None,
        Meta(description="The older name of max_completion_tokens."),
    ] = None
    logprobs: Annotated[bool, Meta(description="Log-probabilities of the answer's tokens.")] = False
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(description="This many most likely tokens at each position. Needs logprobs."),
    ] = None
    add_generation_prompt: Annotated[
        bool, Meta(description="End the prompt with the start of an answer.")
    ] = True
    continue_final_message: Annotated[
        bool, Meta(description="Go on with the last message. Needs add_generation_prompt: false.")
    ] = False
    add_special_tokens: Annotated[
        bool,
        Meta(description="Add BOS and EOS to what the chat template wrote; most templates write their own."),
    ] = False
    chat_template_kwargs: Annotated[
        dict[str, Any], Meta(description="Further variables for the chat template, such as enable_thinking.")
    ] = {}


class CompletionRequest(Generation, kw_only=True, forbid_unknown_fields=True):
    prompt: Annotated[
        str | list[Any],
        Meta(
            description="A text, a list of texts, a list of token ids, or a list of such lists.",
            extra_json_schema={
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "string"}},
                    {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
                    },
                ]
            },
        ),
    ]
    max_tokens: Annotated[
        Annotated[int, Meta(ge=0, lt=2**31)] | None,
        Meta(
            description="Most tokens of an answer; 0 only with echo. Default: 16, or what the context leaves."
        ),
    ] = None
    echo: Annotated[bool, Meta(description="Begin the answer with the prompt.")] = False
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None,
        Meta(
            description="Log-probabilities of the tokens (with echo, the prompt's too) and so many alternatives."
        ),
    ] = None
    add_special_tokens: Annotated[
        bool, Meta(description="Add BOS and EOS to prompts given as text, where the model wants them.")
    ] = True


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """Either `prompt`, or `messages` as for chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1, extra_json_schema=_MESSAGES_SCHEMA)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False


class DetokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


ACCEPTED = {
    "user": "a label for the caller",
    "metadata": "labels for the caller",
    "store": "only false: nothing is stored",
    "service_tier": "there is one tier",
    "parallel_tool_calls": "there are no tools",
    "prompt_cache_key": "the prefix cache finds prefixes by itself; cache_salt separates them",
    "prompt_cache_retention": "the prefix cache keeps what fits",
    "safety_identifier": "a label for the caller",
    "spaces_between_special_tokens": "the tokenizers served here put none there",
    "request_id": "X-Request-Id is the request's name",
    "include_reasoning": "reasoning is part of the text",
}
"""Accepted without effect → why there is none. They are not looked at, but for `store`."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "tools": (([],), "tool calls are not supported"),
    "tool_choice": (("none", "auto"), "tool calls are not supported"),
    "functions": (([],), "tool calls are not supported"),
    "function_call": (("none", "auto"), "tool calls are not supported"),
    "modalities": ((["text"],), "only text is produced"),
    "audio": ((), "only text is produced"),
    "prediction": ((), "predicted outputs are not supported; speculation needs none"),
    "reasoning_effort": ((), "set what the model's chat template reads with chat_template_kwargs"),
    "verbosity": (("medium",), "the model has no such setting"),
    "web_search_options": ((), "there is no web search"),
    "chat_template": ((), "the template is the server's: --chat-template"),
    "documents": (([],), "put documents into the messages"),
    "mm_processor_kwargs": ((), "only text is served"),
    "best_of": ((1,), "use n"),
    "suffix": (("",), "insertion is not supported"),
    "use_beam_search": ((False,), "beam search is not supported"),
    "length_penalty": ((1.0,), "beam search is not supported"),
    "early_stopping": ((False,), "beam search is not supported"),
    "truncate_prompt_tokens": ((-1,), "shorten the prompt instead"),
    "bad_words": (([],), "use logit_bias"),
    "allowed_token_ids": ((), "use logit_bias"),
    "logits_processors": (([],), "use logit_bias"),
    "structured_outputs": ((), "constrained decoding is not supported"),
    "guided_json": ((), "constrained decoding is not supported"),
    "guided_regex": ((), "constrained decoding is not supported"),
    "guided_choice": ((), "constrained decoding is not supported"),
    "guided_grammar": ((), "constrained decoding is not supported"),
    "kv_transfer_params": ((), "there is no KV transfer"),
    "vllm_xargs": (({},), "there are no extension arguments"),
    "thinking_token_budget": ((), "use max_completion_tokens"),
}
"""Known and refused unless neutral: name → (neutral values besides null, what to do instead)."""


def parse_body(body: bytes, kind: type[Struct]) -> Any:
    """A request body as `kind`. Raises ApiError 400 that names the parameter at fault."""
    try:
        content = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(body, str(error)) from None
    if not isinstance(content, dict):
        raise bad_request("The body must be a JSON object.")
    return validate(content, kind)


def validate(content: dict[str, Any], kind: type[Struct]) -> Any:
    fields = kind.__struct_fields__
    generation = issubclass(kind, Generation)
    kept = {}
    for name, value in content.items():
        if name in fields:
            # null asks for the default of anything; of a required one it is an error.
            if value is not None:
                kept[name] = value
        elif generation and name in ACCEPTED:
            if name == "store" and value not in (None, False):
                raise bad_request("store: nothing is stored here; only false is accepted.", "store")
        elif generation and name in REFUSED:
            neutral, instead = REFUSED[name]
            if value is not None and not any(_same(value, n) for n in neutral):
                raise bad_request(f"{name} is not supported: {instead}.", name, "unsupported_parameter")
        else:
            known = [*fields, *(ACCEPTED if generation else ()), *(REFUSED if generation else ())]
            shown = name if len(name) <= 64 else name[:64] + "…"
            raise bad_request(
                f"Unknown parameter {shown!r}{nearest(shown, known)}", shown, "unknown_parameter"
            )
    try:
        return msgspec.convert(kept, kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid(error: msgspec.ValidationError) -> Exception:
    """`Expected … - at `$.stop[0]`` becomes an error about the parameter stop."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").lstrip(".")
    name = path.split(".")[0].split("[")[0] or None
    if name is None and "missing required field" in what:
        name = what.split("`")[1]
        return bad_request(f"{name} is required.", name, "missing_required_parameter")
    if name == "response_format":
        return bad_request(
            'response_format: only {"type": "text"} is supported.', "response_format", "unsupported_parameter"
        )
    return bad_request(f"{path or 'body'}: {what[0].lower()}{what[1:]}.", name, "invalid_value")
