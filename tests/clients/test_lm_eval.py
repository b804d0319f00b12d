"""lm-eval's `local-completions`: its scores are the model's own, by transformers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import NAME, Reference, Server, installed, run

pytestmark = pytest.mark.long

QUESTIONS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Berlin", "a very small dog"], "label": 0},
    {"question": "Two and two make", "choices": ["five", "four", "🙂🙂"], "label": 1},
    {"question": "Ice is made of frozen", "choices": ["water.", "iron.", "Zwölf Boxkämpfer"], "label": 0},
    {"question": "在中国，人们说", "choices": ["中文。", "法语。", "第三种语言。"], "label": 0},
    {"question": "def add(a, b):\n    return", "choices": ["a + b", "b - a", "None  "], "label": 0},
]
PROMPTS = ["The three primary colours are", "Water boils at", "Once upon a time", "今天天气"]
TEXTS = ["The quick brown fox jumps over the lazy dog.", "你好，世界。今天天气很好。 🙂\n\nZwölf Boxkämpfer."]

TASKS = {
    "made_choice": """
task: made_choice
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
""",
    "made_generate": """
task: made_generate
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: ""
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 24, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match}]
""",
    "made_rolling": """
task: made_rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "made_choice": QUESTIONS,
    "made_generate": [{"prompt": prompt} for prompt in PROMPTS],
    "made_rolling": [{"text": text} for text in TEXTS],
}
LOGIT_ERROR = 1e-4
"""Of the engine's logits in float32; a log-probability is off by at most twice that."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
        source = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        (folder / f"{name}.yaml").write_text(text.lstrip() + source)
    return folder


@pytest.mark.parametrize("tokenized", [True, False], ids=["token ids", "text"])
def test_local_completions(
    server: Server, reference: Reference, tasks: Path, tmp_path: Path, tokenized: bool
) -> None:
    arguments = {
        "model": NAME, "base_url": server.url + "/v1/completions", "tokenizer": server.folder,
        "tokenizer_backend": "huggingface", "tokenized_requests": tokenized, "num_concurrent": 4, "max_retries": 1,
    }  # fmt: skip
    run(
        [
            installed("lm_eval"), "--model", "local-completions",
            "--model_args", ",".join(f"{name}={value}" for name, value in arguments.items()),
            "--include_path", tasks, "--tasks", ",".join(TASKS), "--batch_size", 1 if tokenized else 3,
            "--log_samples", "--output_path", tmp_path,
        ],
        tmp_path,
    )  # fmt: skip
    check_choices(samples(tmp_path, "made_choice"), reference)
    check_texts(samples(tmp_path, "made_generate"), reference)
    check_rolling(samples(tmp_path, "made_rolling"), reference)


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval logged, in order of the documents."""
    (file,) = folder.rglob(f"samples_{task}_*.jsonl")
    logged = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(logged) == len(ROWS[task])
    return sorted(logged, key=lambda sample: int(sample["doc_id"]))


def check_choices(logged: list[dict[str, Any]], reference: Reference) -> None:
    tokenizer = reference.tokenizer
    for sample, doc in zip(logged, QUESTIONS, strict=True):
        best = []
        for choice, response in zip(doc["choices"], sample["filtered_resps"], strict=True):
            start = len(tokenizer.encode(doc["question"]))
            ids = tokenizer.encode(f"{doc['question']} {choice}")
            expected, is_greedy = reference.score(ids, start)
            assert float(response[0]) == pytest.approx(
                expected, rel=0, abs=2 * LOGIT_ERROR * (len(ids) - start)
            )
            assert str(response[1]) == str(is_greedy)
            best.append(expected)
        assert sample["acc"] == float(best.index(max(best)) == doc["label"])


def check_texts(logged: list[dict[str, Any]], reference: Reference) -> None:
    for sample, prompt in zip(logged, PROMPTS, strict=True):
        text = reference.greedy(reference.tokenizer.encode(prompt), 24)
        expected = min((text.split(stop)[0] for stop in ("\n", ".")), key=len)
        assert sample["filtered_resps"] == [expected]


def check_rolling(logged: list[dict[str, Any]], reference: Reference) -> None:
    """The whole text after the BOS token, which lm-eval puts before it where the model has one."""
    for sample, text in zip(logged, TEXTS, strict=True):
        ids = [reference.tokenizer.bos_token_id, *reference.tokenizer.encode(text)]
        expected, _ = reference.score(ids, 1)
        (response,) = sample["filtered_resps"]
        value = float(response[0] if isinstance(response, list) else response)
        assert value == pytest.approx(expected, rel=0, abs=2 * LOGIT_ERROR * len(ids))
