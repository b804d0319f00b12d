"""The conversion of the built-in model's GGUF, on a small model whose original weights are known."""

import json
import struct

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from firsttoken.gguf_folder import convert, to_bfloat16
from tests.sources import HIDDEN, VOCAB, original_weights, write_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    base = tmp_path_factory.mktemp("gguf")
    write_gguf(base / "tiny.gguf")
    (base / "model").mkdir()
    convert(base / "tiny.gguf", base / "model")
    return base / "model"


def test_weights_are_the_original_ones_under_their_names(folder):
    originals = original_weights()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(originals)
        for name, original in originals.items():
            tensor = file.get_tensor(name)
            assert str(tensor.dtype) == "torch.bfloat16"
            np.testing.assert_array_equal(tensor.float().numpy(), original, err_msg=name)


def test_transformers_loads_the_folder(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.hidden_size == HIDDEN
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "he 12"}], tokenize=False)
    assert text == "<|im_start|>user\nhe 12<|im_end|>\n"
    assert tokenizer.eos_token_id == 2


def test_tokenizer_merges_splits_digits_and_keeps_special_tokens_whole(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == VOCAB
    assert tokenizer.encode("the 12<|im_end|>").tokens == ["t", "he", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.encode("x t").tokens == ["x", "Ġt"]
    assert tokenizer.decode(tokenizer.encode("the x t").ids) == "the x t"


def test_another_pre_tokenizer_is_refused(tmp_path):
    write_gguf(tmp_path / "other.gguf", pre_tokenizer="llama-bpe")
    with pytest.raises(ValueError, match="llama-bpe"):
        convert(tmp_path / "other.gguf", tmp_path)


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-(2.0**126))
    )
)
def test_rounding_to_bfloat16_is_torchs(values):
    import torch

    array = np.array(values, dtype=np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(to_bfloat16(array), expected)


def test_the_file_is_plain_safetensors_with_aligned_data(folder):
    raw = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert 8 + length + max(ends) == len(raw)
