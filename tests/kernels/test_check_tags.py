"""`check_tags` against the sentence it implements, on every CPU backend and in Triton's interpreter alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch

BACKENDS = ["reference", "numba"]


def call(backend: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments afterwards, as lists."""
    copies: dict[str, Any] = {n: a.clone() if isinstance(a, torch.Tensor) else a for n, a in arguments.items()}
    with dispatch.use_backend(backend):
        dispatch.check_tags(**copies)
    return {n: a.tolist() if isinstance(a, torch.Tensor) else a for n, a in copies.items()}


def case(rows: int, columns: int, pages: int = 100, page_tokens: int = 4) -> dict[str, Any]:
    """Every row is right and uses all its columns; row r's expectation stands in slot r."""
    table = torch.arange(rows * columns).remainder(pages).view(rows, columns).to(torch.int32)
    tags = torch.arange(1000, 1000 + pages)
    return {
        "page_tags": tags,
        "table": table,
        "seq_lens": torch.full((rows,), columns * page_tokens, dtype=torch.int32),
        "page_tokens": page_tokens,
        "expected": tags[table.long()],
        "slots": torch.arange(rows, dtype=torch.int32),
        "query_start": torch.arange(rows + 1, dtype=torch.int32),
        "slot_mapping": torch.arange(500, 500 + rows),
        "answer": torch.empty(2, rows, dtype=torch.int32),
    }


@settings(derandomize=True, max_examples=120, deadline=None)
@given(data=st.data())
def test_against_the_sentence_it_implements(data: st.DataObject) -> None:
    """A row is bad iff a page that it uses is outside the pool or has another tag than expected; only it is stopped."""
    pages, rows, columns = data.draw(st.integers(1, 8)), data.draw(st.integers(0, 5)), data.draw(st.integers(1, 20))
    page_tokens, slots = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7))
    limits = torch.iinfo(torch.int32)
    tag = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 1 << 32])
    tags = data.draw(st.lists(tag, min_size=pages, max_size=pages))
    ids = st.one_of(st.integers(0, pages - 1), st.sampled_from([-1, pages, limits.min, limits.max]))
    table = [[data.draw(ids) for _ in range(columns)] for _ in range(rows)]
    lengths = [data.draw(st.integers(0, columns * page_tokens + 3)) for _ in range(rows)]
    places = [data.draw(st.sampled_from([*range(slots), -1, slots])) for _ in range(rows)]
    width = columns + data.draw(st.integers(-1, 3))
    expected = [[7] * width for _ in range(slots)]
    for row, place in zip(table, places):
        if 0 <= place < slots and data.draw(st.integers(0, 9)):
            expected[place] = [tags[p] if 0 <= p < pages else 7 for p in (row + [0] * width)[:width]]
    starts = [0]
    for _ in range(rows):
        starts.append(starts[-1] + data.draw(st.integers(0, 3)))
    arguments = {
        "page_tags": torch.tensor(tags),
        "table": torch.tensor(table, dtype=torch.int32).view(rows, columns),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "page_tokens": page_tokens,
        "expected": torch.tensor(expected, dtype=torch.int64).view(slots, width),
        "slots": torch.tensor(places, dtype=torch.int32),
        "query_start": torch.tensor(starts, dtype=torch.int32),
        "slot_mapping": torch.arange(starts[-1] + 2) + 100,
        "answer": torch.full((2, rows), 99, dtype=torch.int32),
    }
    firsts, founds, after, mapping = [], [], [], list(range(100, 102 + starts[-1]))
    for r, row in enumerate(table):
        known = 0 <= places[r] < slots
        used = min(-(-lengths[r] // page_tokens), columns, width)
        wrong = [
            c for c in range(used) if not known or not 0 <= row[c] < pages or tags[row[c]] != expected[places[r]][c]
        ]
        firsts.append(wrong[0] if wrong else -1)
        founds.append(row[wrong[0]] if wrong else -1)
        after.append([0] * columns if wrong else row)
        if wrong:
            mapping[starts[r] : starts[r + 1]] = [-1] * (starts[r + 1] - starts[r])
    for backend in BACKENDS:
        made = call(backend, arguments)
        assert made["answer"] == [firsts, founds], backend
        assert (made["table"], made["slot_mapping"]) == (after, mapping), backend
        assert made["expected"] == expected and made["page_tags"] == tags, backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_never_followed(backend: str) -> None:
    """Padding that is far outside the pool; a difference in the high half of a tag only."""
    arguments = case(64, 256)
    arguments["table"][:, 5:] = 2**31 - 1
    arguments["seq_lens"][:] = 17  # 5 pages of 4 tokens
    assert set(call(backend, arguments)["answer"][0]) == {-1}
    arguments["expected"][63, 4] += 1 << 40
    arguments["seq_lens"][7] = 21
    firsts, founds = call(backend, arguments)["answer"]
    assert {r: (firsts[r], founds[r]) for r in range(64) if firsts[r] >= 0} == {
        7: (5, 2**31 - 1),
        63: (4, int(arguments["table"][63, 4])),
    }


def test_arguments_that_do_not_fit_are_named() -> None:
    good = case(2, 3)
    dispatch.check_tags(**good)
    for name, wrong in {
        "page_tags": good["page_tags"].int(),
        "table": good["table"].t().contiguous().t(),
        "seq_lens": good["seq_lens"][:1],
        "expected": good["expected"].int(),
        "slots": good["slots"].long(),
        "query_start": good["query_start"][:2],
        "slot_mapping": good["slot_mapping"].int(),
        "answer": good["answer"][:1],
    }.items():
        with pytest.raises(ValueError, match=f"{name} must be int"):
            dispatch.check_tags(**(good | {name: wrong}))
