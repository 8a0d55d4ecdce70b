"""Bodies that no engine could take are refused with the field's name; all others pass as they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.json_body import MAX_DEPTH, BadBody, parse


@pytest.mark.parametrize(
    ("body", "field", "why"),
    [
        (r'{"session_id": "\ud800"}', "session_id", "half of a surrogate pair"),
        (r'{"stop": ["a", "\udfff"]}', "stop.1", "half of a surrogate pair"),
        (r'{"vllm_xargs": {"a": "b\ud800"}}', "vllm_xargs.a", "character 1"),
        (r'{"vllm_xargs": {"\ud800": 1}}', "vllm_xargs", "a key of vllm_xargs"),
        (b'{"user": "\xed\xa0\x80"}', "user", "half of a surrogate pair"),
        (f'{{"top_k": {10**26}}}', "top_k", "out of range"),
        (f'{{"seed": {-(10**26)}}}', "seed", "out of range"),
        (f'{{"prompt": [1, {2**63}]}}', "prompt.1", "out of range"),
        ('{"temperature": NaN}', "temperature", "no such number"),
        ('{"temperature": -Infinity}', "temperature", "no such number"),
        ('{"temperature": 1e999}', "temperature", "no such number"),
        ('{"request_id": "' + "x" * 300 + '"}', "request_id", "at most 256"),
        ('{"a": ' + "9" * 5000 + "}", "", "not JSON"),
        ("[" * 5000 + "]" * 5000, "", "nested"),
        ('{"a":' * 200 + "1" + "}" * 200, "a" + ".a" * 99, "nested"),
        ("{", "", "not JSON"),
        ("", "", "not JSON"),
        (b'{"a": "\xff"}', "", "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "", "not UTF-8"),
    ],
)
def test_what_is_refused(body: str | bytes, field: str, why: str) -> None:
    with pytest.raises(BadBody, match=why) as caught:
        parse(body if isinstance(body, bytes) else body.encode())
    assert caught.value.field == field
    assert len(str(caught.value)) < 300


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    # Anything that can be encoded: half of a surrogate pair cannot.
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.booleans())
def test_every_other_body_passes_as_it_is(tree: Any, ascii_only: bool) -> None:
    assert parse(json.dumps(tree, ensure_ascii=ascii_only).encode()) == tree


def test_the_deepest_body_that_passes() -> None:
    parse(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    with pytest.raises(BadBody, match="nested"):
        parse(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
