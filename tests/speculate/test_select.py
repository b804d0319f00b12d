"""Drafts from their folders into an engine: each kind runs, shares what it should, is counted; misfits are named."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch

from firsttoken import models
from firsttoken.drafting.export import export_layers, save_shallow_draft
from firsttoken.engine import EngineConfig, Request, SamplingParams
from firsttoken.engine.config import ConfigError
from firsttoken.engine.engine import Engine
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.loader import load_model
from firsttoken.speculate.draft_folder import save_feature_draft
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from firsttoken.speculate.select import draft_memory, make_speculator
from firsttoken.speculate.shallow_draft import ShallowConfig, shallow_decoder
from tests.engine.tiny import drain, tokens_of, write_checkpoint

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def write_model(folder, **changes):
    raw = RAW | changes
    folder.mkdir()
    write_tokenizer(folder, [f"t{i}" for i in range(60)])
    write_checkpoint(folder, raw)
    return folder


def write_tokenizer(folder, tokens):
    vocab = {token: i for i, token in enumerate(tokens)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": []}))


@pytest.fixture(scope="module", params=[None, LLAMA3], ids=["plain rope", "llama3 rope"])
def model(request, tmp_path_factory):
    changes = {"rope_scaling": request.param} if request.param else {}
    return write_model(tmp_path_factory.mktemp("models") / "model", **changes)


def write_draft(kind, model, out, fingerprint=None):
    target = load_model(model, torch.float32, CPU)
    fingerprint = fingerprint or models.fingerprint(model)
    ids = torch.arange(0, 64, 2)
    if kind == "separate":
        export_layers(model, 3, out)
    elif kind == "shallow":
        config = ShallowConfig(shared_layers=2, tuned_layers=1, draft_vocab_size=len(ids))
        save_shallow_draft(
            shallow_decoder(target, config, ids), target, 2, ids, fingerprint, model, out, {"seed": 1}
        )
    else:
        draft = FeatureDraft(FeatureConfig.for_target(target.config, draft_vocab_size=len(ids)), target, ids)
        start_from_target(draft, target, seed=0)
        save_feature_draft(draft, target, model, fingerprint, out, {})
    return out


def engine_on(model, draft, **settings):
    config = EngineConfig(
        model=str(model), dtype="float64", device="cpu", block_size=4, draft=draft and str(draft), **settings
    )
    return Engine(config, make_speculator=make_speculator, draft_memory=draft_memory)


def answer(engine, temperature):
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=[5, 9, 33, 2, 17] * 5, sampling=sampling)
    engine.add_request(request)
    return tokens_of(drain(engine)["r"])


@pytest.mark.parametrize("kind", ["feature", "shallow", "separate"])
def test_a_draft_runs_from_its_folder_and_is_counted(kind, model, tmp_path):
    draft = write_draft(kind, model, tmp_path / "draft")
    plain = engine_on(model, None, speculation="off")
    engine = engine_on(model, draft, speculation="always", num_speculative_tokens=3)
    for temperature in (0.0, 0.8):
        assert answer(engine, temperature) == answer(plain, temperature)
    assert engine.stats()["num_accepted_tokens"] > 0
    assert engine.speculator.describe()["drafter"] == f"{kind} draft draft"

    target, drafter = engine.model, engine.speculator.drafter
    tokens = engine.limits.num_blocks * 4
    own = {
        "feature": lambda: [drafter._cache.keys, drafter._cache.values, drafter._cache.carry],
        "shallow": lambda: [t for layer in drafter._layers.cache.layers[2:] for t in layer],
        "separate": lambda: [t for layer in drafter._layers.cache.layers for t in layer],
    }[kind]()
    counted = draft_memory(engine.config, target.config, torch.float64)
    assert sum(t.nbytes for t in own) == counted.kv_per_token * tokens
    if kind == "shallow":
        assert all(a is b for a, b in zip(drafter._layers.decoder.layers[:2], target.layers[:2], strict=True))
        for ours, theirs in zip(drafter._layers.cache.layers[:2], engine.runner.cache.layers, strict=False):
            assert ours[0].data_ptr() == theirs[0].data_ptr()
    if kind == "feature":
        written = json.loads((draft / "config.json").read_text())
        rope = ModelConfig.from_dict({**written, "architectures": ["LlamaForCausalLM"]}).rope
        assert rope == target.config.rope

    memory = {"kv_cache_memory": str(200 * 1024)}
    without = engine_on(model, "none", **memory).limits.num_blocks
    assert engine_on(model, draft, max_num_seqs=1, **memory).limits.num_blocks < without


def test_a_shallow_draft_of_other_weights_runs_by_itself(model, tmp_path, caplog):
    draft = write_draft("shallow", model, tmp_path / "draft", fingerprint="of a fine-tune")
    with caplog.at_level(logging.WARNING):
        engine = engine_on(model, draft, speculation="always")
    assert "trained for other weights" in caplog.text
    assert engine.speculator.describe()["drafter"] == "separate draft draft"
    assert answer(engine, 0.0) == answer(engine_on(model, "none"), 0.0)


def test_misfits_are_named(model, tmp_path):
    draft = write_draft("separate", model, tmp_path / "draft")

    def complaint(**settings):
        with pytest.raises(ConfigError) as error:
            engine_on(model, draft, **settings)
        return str(error.value)

    write_tokenizer(draft, ["t0", "t2", "t1", *(f"t{i}" for i in range(3, 60))])
    assert (
        "token 't1' is id 1 in the model and id 2 in the draft; use a draft with the model's" in complaint()
    )
    (draft / "tokenizer.json").unlink()
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"vocab_size": 80}))
    assert "its vocabulary of 80 must be the model's of 64" in complaint()
    shutil.copy(model / "tokenizer.json", draft)
    (draft / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))
    assert "GPT2LMHeadModel is not supported" in complaint()
    (draft / "config.json").write_text(json.dumps(config))
    (draft / "model.safetensors").unlink()
    assert str(draft) in complaint()
