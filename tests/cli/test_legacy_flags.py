"""Flags pasted from vLLM's documents, old and new."""

import json

import pytest

from firsttoken.cli.legacy_flags import TABLE, Renamed, translate
from firsttoken.config import settings_of
from firsttoken.engine.config import ConfigError, EngineConfig
from firsttoken.server.config import ServerConfig

CONFIG = json.dumps({"method": "draft_model", "model": "some/draft", "num_speculative_tokens": 5})


@pytest.mark.parametrize(
    ("pasted", "ours"),
    [
        ("--speculative-model some/draft", "--draft some/draft"),
        (
            "--speculative_model=some/draft --num-speculative-tokens 5",
            "--draft some/draft --num-speculative-tokens 5",
        ),
        ("--speculative-model [ngram]", "--draft ngram"),
        ("--swap-space 4 --port 80", "--port 80"),
        ("--swap-space=4 --port 80", "--port 80"),
        ("--enforce-eager --port 80", "--port 80"),
        ("--spec-method ngram --spec-tokens 3", "--draft ngram --num-speculative-tokens 3"),
        ("--speculative-config.method suffix", "--draft ngram"),
        ("--speculative-config.num_speculative_tokens=3", "--num-speculative-tokens 3"),
        ("-tp 1 --data-parallel-size=1", ""),
        ("--host 0.0.0.0 --max_num_seqs=4", "--host 0.0.0.0 --max_num_seqs=4"),
        ("-- --swap-space 4", "-- --swap-space 4"),
    ],
)
def test_translated(pasted, ours):
    assert translate(pasted.split()) == ours.split()


@pytest.mark.parametrize("flag", ["--speculative-config", "-sc", "--speculative_config"])
def test_speculative_config_as_json(flag):
    expected = ["--draft", "some/draft", "--num-speculative-tokens", "5"]
    assert translate([flag, CONFIG]) == expected


@pytest.mark.parametrize(
    ("pasted", "complaint"),
    [
        (["--scheduler-delay-factor", "0.5"], "--scheduler-delay-factor: what it was used for is --ttft-slo"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size 2: the embedded engine uses one device"),
        (["--quantization", "awq"], "--quantization: weights are served in --dtype"),
        (["--speculative-config", "{"], "--speculative-config is not a JSON object"),
        (["--speculative-config", '["ngram"]'], "--speculative-config is not a JSON object"),
        (["--speculative-config", '{"method": "medusa"}'], "speculative method 'medusa' is not built"),
        (
            ["--speculative-config", '{"rejection_sample_method": "block"}'],
            "rejection_sample_method has no counterpart",
        ),
        (["--speculative-config", '{"method": "ngram", "prompt_lookup_max": 4}'], "prompt_lookup_max has no"),
        (["--speculative-config.prompt_lookup_min", "2"], "prompt_lookup_min has no"),
        (["--speculative-config", '{"method": "ngram", "model": "a/b"}'], "method ngram uses no model"),
        (["--speculative-config", '{"method": "eagle3"}'], "method eagle3 needs a model"),
        (["--speculative-model"], "--speculative-model needs a value"),
    ],
)
def test_refused_with_what_to_do_instead(pasted, complaint):
    with pytest.raises(ConfigError) as error:
        translate(pasted)
    assert complaint in str(error.value)


def test_every_translation_is_said(capsys):
    translate(["--speculative-model", "x", "--swap-space", "4", "-tp", "1"])
    assert capsys.readouterr().err.splitlines() == [
        "note: --speculative-model is --draft x here",
        "note: --swap-space has no effect: nothing is swapped: a preempted request is computed again",
        "note: -tp is not needed here",
    ]


def test_the_table_hides_no_flag_of_ours_and_names_only_ours():
    flags = {item.flag for item in settings_of(EngineConfig, ServerConfig).values()}
    assert not flags & TABLE.keys()
    assert {rule.flag for rule in TABLE.values() if isinstance(rule, Renamed)} <= flags
