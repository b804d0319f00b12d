"""The model's own chats: shaped by the template, answered by the model, the same again for the same seed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from firsttoken.drafting.corpus import GIVEN, GREEDY, SAMPLED, USER, Corpus, make_corpus, write_chats
from firsttoken.engine.config import ConfigError
from tests.drafting.tiny import CHAT, CONFIG, tiny_corpus
from tests.engine.tiny import EOS, full_logits, tiny_model


def turns(tokens, kinds):
    """Runs of equal kind: (kind, token ids)."""
    runs = []
    for token, kind in zip(tokens.tolist(), kinds.tolist(), strict=True):
        if runs and runs[-1][0] == kind:
            runs[-1][1].append(token)
        else:
            runs.append((kind, [token]))
    return runs


def test_every_row_is_a_conversation_in_the_template():
    corpus = tiny_corpus()
    assert corpus.tokens.shape == corpus.kinds.shape == (CONFIG.rows, CONFIG.length)
    for tokens, kinds in zip(corpus.tokens, corpus.kinds, strict=True):
        runs = turns(tokens, kinds)
        assert runs[0] == (GIVEN, list(CHAT.header))
        speaker = USER
        for i, (kind, ids) in enumerate(runs[1:-1]):
            if kind == GIVEN:
                script = CHAT.to_answer if speaker == USER else CHAT.to_user
                # the mark is the speaker's own if they wrote it
                assert ids in (list(script), list(script[1:]))
                speaker = GREEDY if speaker == USER else USER
            else:
                assert (kind == USER) == (speaker == USER), i
                most = CONFIG.max_user_tokens if kind == USER else CONFIG.max_answer_tokens
                assert len(ids) <= most
                assert EOS not in ids[:-1]


def test_greedy_answers_are_the_models_argmax():
    corpus = tiny_corpus()
    row = 0
    assert GREEDY in corpus.kinds[row]
    assert SAMPLED not in corpus.kinds[row]
    best = full_logits(corpus.tokens[row].tolist()).argmax(-1)
    for at in (corpus.kinds[row] == GREEDY).nonzero().flatten().tolist():
        assert corpus.tokens[row, at] == best[at - 1]
    assert SAMPLED in corpus.kinds[-1]
    assert GREEDY not in corpus.kinds[-1]


def test_given_prompts_are_the_first_user_texts():
    corpus = write_chats(tiny_model(), CHAT, CONFIG, 4, 0, prompts=[[20, 21, 22], [30]])
    for row, prompt in enumerate([[20, 21, 22], [30], [20, 21, 22], [30]]):
        start = [*CHAT.header, *prompt, *CHAT.to_answer]
        assert corpus.tokens[row, : len(start)].tolist() == start
        assert corpus.kinds[row, len(start)] in (GREEDY, SAMPLED)


def test_an_interrupted_corpus_goes_on_and_is_the_same(tmp_path):
    config = replace(CONFIG, rows=6, shard_rows=2, length=24)
    whole = make_corpus(tiny_model(), CHAT, config, tmp_path / "a", target="t")

    class Stop(Exception):
        pass

    written = 0

    def interrupt(tokens):
        nonlocal written
        written += tokens
        if written > 3 * 24:
            raise Stop

    with pytest.raises(Stop):
        make_corpus(tiny_model(), CHAT, config, tmp_path / "b", target="t", on_step=interrupt)
    assert (tmp_path / "b" / "shard-000.safetensors").exists()
    assert not (tmp_path / "b" / "shard-002.safetensors").exists()
    again = make_corpus(tiny_model(), CHAT, config, tmp_path / "b", target="t")
    assert torch.equal(again.tokens, whole.tokens)
    assert torch.equal(again.kinds, whole.kinds)
    with pytest.raises(ConfigError, match="another seed"):
        make_corpus(tiny_model(), CHAT, replace(config, seed=5), tmp_path / "b", target="t")
    with pytest.raises(ConfigError, match="another target"):
        make_corpus(tiny_model(), CHAT, config, tmp_path / "b", target="other")


def test_frequent_tokens_count_answers_alone():
    tokens = torch.tensor([[9, 9, 9, 3, 3, 4, 8]], dtype=torch.int32)
    kinds = torch.tensor([[USER] * 3 + [GREEDY] * 2 + [SAMPLED] + [GIVEN]], dtype=torch.uint8)
    corpus = Corpus(tokens, kinds)
    assert corpus.frequent_tokens(2).tolist() == [3, 4]
    assert corpus.frequent_tokens(2, always=(1,)).tolist() == [1, 3]
