"""Exports are what other servers load: plain checkpoints that say the same as the draft they come from."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from firsttoken import models
from firsttoken.drafting.export import export_eagle3, export_layers, save_shallow_draft
from firsttoken.engine.config import ConfigError
from firsttoken.engine.model.config import ModelConfig
from firsttoken.engine.model.decoder import Decoder
from firsttoken.engine.model.loader import load_model
from firsttoken.speculate.draft_folder import load_feature_draft, save_feature_draft
from firsttoken.speculate.feature_draft import FeatureConfig, FeatureDraft, start_from_target
from firsttoken.speculate.shallow_draft import ShallowConfig, shallow_decoder
from tests.engine.tiny import NoCache, write_checkpoint

CPU = torch.device("cpu")
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    raw = {**RAW, "tie_word_embeddings": request.param}
    (folder / "tokenizer.json").write_text("{}")
    write_checkpoint(folder, raw)
    return folder


def logits(decoder, tokens):
    tokens = torch.tensor(tokens)
    return decoder.logits(decoder.forward(tokens, torch.arange(len(tokens)), NoCache(2)))


TOKENS = [3, 9, 27, 41, 5, 8]


def test_the_first_layers_are_a_model_of_their_own(folder, tmp_path):
    export_layers(folder, 2, tmp_path)
    target, draft = (load_model(f, torch.float32, CPU) for f in (folder, tmp_path))
    assert draft.config.num_layers == 2
    tokens = torch.tensor(TOKENS)
    stream = target.run_layers(target.embed(tokens), torch.arange(len(tokens)), NoCache(2), stop=2)
    assert torch.equal(logits(draft, TOKENS), target.logits(target.norm(stream)))
    assert (tmp_path / "tokenizer.json").exists()
    with pytest.raises(ConfigError, match="--layers 9"):
        export_layers(folder, 9, tmp_path)


def test_a_shallow_draft_is_written_with_the_whole_head(folder, tmp_path):
    target = load_model(folder, torch.float32, CPU)
    ids = torch.arange(0, 64, 2)
    draft = shallow_decoder(target, ShallowConfig(shared_layers=2, tuned_layers=1, draft_vocab_size=32), ids)
    draft.layers[2].o.weight = draft.layers[2].o.weight * 1.5  # as if trained
    short = logits(draft, TOKENS)
    save_shallow_draft(draft, target, 2, ids, models.fingerprint(folder), folder, tmp_path, {"seed": 1})
    written = load_model(tmp_path, torch.float32, CPU)
    assert torch.allclose(logits(written, TOKENS)[:, ids], short, atol=1e-6)
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3
    assert json.loads((tmp_path / "draft_vocab.json").read_text()) == ids.tolist()
    assert torch.equal(logits(target, TOKENS), logits(load_model(folder, torch.float32, CPU), TOKENS))


def test_a_feature_draft_survives_its_folder_and_its_export(folder, tmp_path):
    target = load_model(folder, torch.float32, CPU)
    config = FeatureConfig.for_target(target.config, draft_vocab_size=20, intermediate_size=64)
    ids = torch.arange(1, 61, 3)
    draft = FeatureDraft(config, target, ids)
    start_from_target(draft, target, seed=4)
    save_feature_draft(draft, target, folder, models.fingerprint(folder), tmp_path / "draft", {"seed": 4})
    loaded = load_feature_draft(tmp_path / "draft", target)
    assert loaded.config == config
    assert torch.equal(loaded.token_ids, ids)
    for name, weight in draft.named_weights().items():
        assert torch.equal(weight, loaded.named_weights()[name]), name
    export_eagle3(folder, tmp_path / "draft", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    # A row of the head is token row + d2t, and t2d marks exactly those tokens.
    assert (torch.arange(20) + weights["d2t"]).tolist() == ids.tolist()
    assert weights["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert torch.equal(weights["lm_head.weight"], target.lm_head.weight[ids])
    assert torch.equal(weights["embed_tokens.weight"], target.embedding)
    assert weights["fc.weight"].shape == (32, 3 * 32)
    assert weights["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * 32)
    # Ids name layers whose INPUT is read: an untrained draft passes the last layer's input through.
    assert raw["eagle_aux_hidden_state_layer_ids"] == [3, 4, 7]
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["draft_vocab_size"] == 20
    # What other servers load is still a draft of ours.
    assert torch.equal(load_feature_draft(tmp_path / "out", target).token_ids, ids)


def test_a_draft_of_another_model_is_refused(folder, tmp_path):
    target = load_model(folder, torch.float32, CPU)
    draft = FeatureDraft(FeatureConfig.for_target(target.config, draft_vocab_size=8), target, torch.arange(8))
    start_from_target(draft, target, seed=0)
    save_feature_draft(draft, target, folder, models.fingerprint(folder), tmp_path, {})
    raw = {**RAW, "hidden_size": 64, "tie_word_embeddings": True}
    other = Decoder(ModelConfig.from_dict(raw), torch.float32, CPU)
    with pytest.raises(ConfigError, match="hidden_size 32, the model 64"):
        load_feature_draft(tmp_path, other)
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ConfigError, match="train the draft again"):
        load_feature_draft(tmp_path, target)
