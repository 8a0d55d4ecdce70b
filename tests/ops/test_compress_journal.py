"""The journal: a kill may cut its last line anywhere; nothing else may be lost silently."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.compress.journal import Journal

RECORDS = [
    {"shard": 0, "file": "a", "error": 0.1},
    {"shard": 1, "file": "b\n", "error": 1e-9},
    {"shard": 2, "file": "c"},
]


def _written(path: Path) -> bytes:
    journal = Journal(path)
    for record in RECORDS:
        journal.append(dict(record))
    journal.close()
    return path.read_bytes()


def test_a_cut_at_any_byte_loses_only_the_line_it_cut(tmp_path: Path) -> None:
    data = _written(tmp_path / "j")
    ends = [index + 1 for index, byte in enumerate(data) if byte == ord("\n")]
    for cut in range(len(data) + 1):
        path = tmp_path / "cut"
        path.write_bytes(data[:cut])
        journal = Journal(path)
        whole = sum(end <= cut for end in ends)
        assert journal.records == RECORDS[:whole]
        journal.append({"shard": 9})
        journal.close()
        again = Journal(path)
        assert again.records == [*RECORDS[:whole], {"shard": 9}]
        again.close()


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    data = bytearray(_written(tmp_path / "j"))
    data[12] ^= 1
    (tmp_path / "j").write_bytes(data)
    with pytest.raises(ValueError, match="line 1 of 3 is damaged"):
        Journal(tmp_path / "j")
