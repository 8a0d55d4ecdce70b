"""Real engines, shared by a whole session: each costs a model load and about 2.5 GiB."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from engine_specs import MODEL, pair_spec

from ops.engine_pair import EnginePair


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair() -> AsyncIterator[EnginePair]:
    """BF16 prefill in chunks of 256 tokens, FP8 decode with scales other than 1."""
    made = await EnginePair.start(pair_spec())
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)
