"""Deterministic prompts of an exact token length: random natural words, cut at a token boundary that survives decoding.

The same (seed, label, index) gives the same text on every machine with the same tokenizer, so that every system is
asked the same, and no two labels share a prefix that a prefix cache could have kept.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face level office door health person art war history party result change morning reason research girl "
    "moment air teacher force education river harbour ferry island market winter garden letter music window bridge"
)
WORDS = _TEXT.split()


class PromptError(ValueError):
    """A length that this tokenizer cannot give."""


def make(tokenizer: Any, num_tokens: int, seed: int, label: str, index: int) -> str:
    """A text that `tokenizer` turns into exactly `num_tokens` tokens when a server tokenizes it by itself."""
    if num_tokens < 2:
        raise PromptError(f"num_tokens is {num_tokens}, must be >= 2")
    key = hashlib.sha256(f"{seed}/{label}/{index}".encode()).digest()
    rng = random.Random(int.from_bytes(key[:8], "big"))
    words = [rng.choice(WORDS) for _ in range(num_tokens + 16)]
    for _ in range(64):
        text = tokenizer.decode(tokenizer(" ".join(words))["input_ids"][:num_tokens], skip_special_tokens=True)
        if len(tokenizer(text)["input_ids"]) == num_tokens:
            return str(text)
        rng.shuffle(words)  # a cut inside a word can tokenize differently; another order cuts elsewhere
    raise PromptError(f"no text of exactly {num_tokens} tokens was found for {label}/{index}; use another length")


def batch(tokenizer: Any, num_tokens: int, seed: int, label: str, count: int) -> list[str]:
    return [make(tokenizer, num_tokens, seed, label, index) for index in range(count)]
