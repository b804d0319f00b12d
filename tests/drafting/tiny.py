"""A tiny model that chats, and a corpus of it."""

from __future__ import annotations

from functools import cache

from firsttoken.drafting.chat_format import ChatFormat
from firsttoken.drafting.corpus import Corpus, CorpusConfig, write_chats
from tests.engine.tiny import tiny_model

CHAT = ChatFormat(header=(2, 3), to_answer=(7, 4), to_user=(7, 5, 3))
CONFIG = CorpusConfig(rows=8, length=64, max_user_tokens=6, max_answer_tokens=20)


@cache
def tiny_corpus(seed: int = 0) -> Corpus:
    return write_chats(tiny_model(), CHAT, CONFIG, CONFIG.rows, seed)
