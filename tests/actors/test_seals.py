"""A seal is whole or it is not there."""

from __future__ import annotations

import itertools

import pytest

from actors.messages import Seal
from actors.transfer.channel import PagesSealed
from actors.transfer.seals import SealCollector


def chunk(
    first: int, digests: list[int], *, last: bool, shard: int = 0, shards: int = 1, attempt: int = 1, tokens: int = 100
) -> PagesSealed:
    return PagesSealed(
        ticket_id=5,
        attempt=attempt,
        shard=shard,
        num_shards=shards,
        first_page=first,
        digests=digests,
        layout_fingerprint="f",
        num_tokens=tokens,
        last=last,
    )


def test_chunks_become_one_seal() -> None:
    book = SealCollector()
    assert book.add(chunk(0, [1, 2], last=False)) is None
    seal = book.add(chunk(2, [3], last=True))
    assert isinstance(seal, Seal)
    assert (seal.digests, seal.num_tokens, len(book)) == (((1, 2, 3),), 100, 0)


def test_every_shard_is_waited_for() -> None:
    for order in itertools.permutations(range(3)):
        book = SealCollector()
        seals = [book.add(chunk(0, [10 * shard], last=True, shard=shard, shards=3)) for shard in order]
        assert seals[:2] == [None, None]
        assert seals[2] is not None and seals[2].digests == ((0,), (10,), (20,))


def test_a_doubled_chunk_is_absorbed() -> None:
    book = SealCollector()
    book.add(chunk(0, [1, 2], last=False))
    book.add(chunk(0, [1, 2], last=False))
    seal = book.add(chunk(2, [3], last=True))
    assert seal is not None and seal.digests == ((1, 2, 3),)


@pytest.mark.parametrize(
    "bad",
    [
        chunk(3, [9], last=True),  # a gap
        chunk(0, [1, 7], last=False),  # contradicts what was promised
        chunk(2, [3], last=True, tokens=99),  # of another prompt
        chunk(2, [3], last=True, shard=1),  # a shard that cannot be
    ],
)
def test_a_contradiction_voids_the_attempt_for_good(bad: PagesSealed) -> None:
    book = SealCollector()
    book.add(chunk(0, [1, 2], last=False))
    assert book.add(bad) is None
    assert book.add(chunk(2, [3], last=True)) is None
    assert book.add(chunk(0, [1, 2, 3], last=True, attempt=2)) is not None, "another attempt is another seal"
    book.forget((5, 1))
    assert book.add(chunk(0, [1], last=True)) is not None
