from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch

BACKENDS = ["reference", "numba"]


@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data())
def test_against_the_sentence_it_implements(data: st.DataObject) -> None:
    """A row is bad iff some c < num_pages has a page outside the pool or a tag other than expected."""
    pages, rows, columns = data.draw(st.integers(0, 8)), data.draw(st.integers(0, 5)), data.draw(st.integers(0, 20))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    low, high = torch.iinfo(kind).min, torch.iinfo(kind).max
    tag = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 1 << 32])
    tags = torch.tensor(data.draw(st.lists(tag, min_size=pages, max_size=pages)), dtype=torch.int64)
    ids = st.one_of(st.integers(0, max(pages - 1, 0)), st.sampled_from([-1, pages, low, high]))
    table = torch.tensor([[data.draw(ids) for _ in range(columns)] for _ in range(rows)], dtype=kind).view(
        rows, columns
    )
    lengths = [data.draw(st.integers(0, columns)) for _ in range(rows)]
    expected = torch.zeros(rows, columns + 3, dtype=torch.int64)[:, : columns + data.draw(st.integers(0, 3))]
    for r in range(rows):
        for c in range(columns):
            page = int(table[r, c])
            right = int(tags[page]) if 0 <= page < pages else 7
            expected[r, c] = data.draw(tag) if data.draw(st.integers(0, 9)) == 0 else right
    first = []
    for r in range(rows):
        wrong = [
            c
            for c in range(lengths[r])
            if not 0 <= int(table[r, c]) < pages or int(tags[int(table[r, c])]) != int(expected[r, c])
        ]
        first.append(wrong[0] if wrong else -1)
    num = torch.tensor(lengths, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])))
    for backend in BACKENDS:
        with dispatch.use_backend(backend):
            bad, column = dispatch.check_tags(tags, table, num, expected)
        assert column.tolist() == first, backend
        assert bad.tolist() == [c >= 0 for c in first], backend
        assert (bad.dtype, column.dtype) == (torch.bool, torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_never_followed(backend: str) -> None:
    """Padding that would be far outside the pool, in a table with a row stride."""
    tags = torch.arange(100, 200)
    table = torch.full((64, 300), 2**31 - 1, dtype=torch.int32)[:, :256]
    table[:, :5] = torch.arange(5, dtype=torch.int32)
    expected = torch.full((64, 300), -7, dtype=torch.int64)
    expected[:, :5] = tags[:5]
    lengths = torch.full((64,), 5, dtype=torch.int32)
    with dispatch.use_backend(backend):
        bad, first = dispatch.check_tags(tags, table, lengths, expected)
        assert not bad.any()
        assert set(first.tolist()) == {-1}
        expected[63, 4] += 1 << 40  # a difference in the high half only
        lengths[7] = 6
        bad, first = dispatch.check_tags(tags, table, lengths, expected)
    assert bad.nonzero().flatten().tolist() == [7, 63]
    assert first[[7, 63]].tolist() == [5, 4]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_length_that_does_not_fit_is_an_error(backend: str) -> None:
    tags, table, expected = torch.zeros(4, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3)
    with dispatch.use_backend(backend):
        for lengths in ([0, 4], [0, -1]):
            with pytest.raises(ValueError, match=r"num_pages\[1\] is"):
                dispatch.check_tags(tags, table, torch.tensor(lengths), expected.long())


def test_arguments_that_do_not_fit_are_named() -> None:
    tags = torch.zeros(4, dtype=torch.int64)
    table, expected = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)
    lengths = torch.zeros(2, dtype=torch.int32)
    for words, arguments in {
        "page_tags must be int64": (tags.int(), table, lengths, expected),
        "block_table must be": (tags, table.float(), lengths, expected),
        "expected must be int64": (tags, table, lengths, expected.int()),
        "expected must have at least 3 columns": (tags, table, lengths, expected[:, :2]),
        "num_pages must be": (tags, table, lengths[:1], expected),
        "contiguous rows": (tags, table.t().contiguous().t(), lengths, expected),
    }.items():
        with pytest.raises(ValueError, match=words):
            dispatch.check_tags(*arguments)
