"""Which checkpoints have one tokenizer. Laws: (1) the same tokens in another spelling of the file are the same; (2) any
change of what a text becomes is another; (3) each pool speaks of its own checkpoint's tokenizer, unless
`model.tokenizer` speaks for both."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.engine.config import hash_tokenizer, tokenizer_of, tokenizer_path
from actors.messages import Role
from cluster.spec import ClusterSpec

TREE: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 2, "content": "<end>", "special": True}],
    "normalizer": None,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 3}, "merges": ["a b"]},
}


def checkpoint(folder: Path, tree: Any = None, **files: str) -> str:
    folder.mkdir()
    if tree is not None:
        (folder / "tokenizer.json").write_text(json.dumps(tree))
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    return str(folder)


def test_law_1_another_spelling_is_the_same_tokenizer(tmp_path: Path) -> None:
    again = {**copy.deepcopy(TREE), "truncation": {"max_length": 512}}
    again["model"]["merges"] = [["a", "b"]]
    again["model"]["vocab"] = dict(reversed(TREE["model"]["vocab"].items()))
    one = checkpoint(tmp_path / "one", TREE)
    other = checkpoint(tmp_path / "other", again, merges_txt="a b")
    assert hash_tokenizer(one) == hash_tokenizer(other)


def _merge(tree: dict[str, Any]) -> None:
    tree["model"]["merges"].append("ab a")


def _number(tree: dict[str, Any]) -> None:
    tree["model"]["vocab"].update(a=1, b=0)


def _added(tree: dict[str, Any]) -> None:
    tree["added_tokens"][0]["content"] = "<stop>"


def _split(tree: dict[str, Any]) -> None:
    tree["pre_tokenizer"]["add_prefix_space"] = True


@pytest.mark.parametrize("change", [_merge, _number, _added, _split])
def test_law_2_other_tokens_are_another_tokenizer(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    changed = copy.deepcopy(TREE)
    change(changed)
    assert hash_tokenizer(checkpoint(tmp_path / "one", TREE)) != hash_tokenizer(checkpoint(tmp_path / "two", changed))


def test_law_2_without_a_tokenizer_json_the_vocabulary_files_count(tmp_path: Path) -> None:
    one = checkpoint(tmp_path / "one", vocab_txt="a b")
    assert hash_tokenizer(one) == hash_tokenizer(checkpoint(tmp_path / "two", vocab_txt="a b"))
    assert hash_tokenizer(one) != hash_tokenizer(checkpoint(tmp_path / "three", vocab_txt="a c"))
    assert hash_tokenizer("someone/model") == "someone/model"


def test_law_3_whose_tokenizer_a_pool_speaks_of(tmp_path: Path) -> None:
    whole, packed = checkpoint(tmp_path / "whole", TREE), checkpoint(tmp_path / "packed", TREE)
    bare = checkpoint(tmp_path / "bare")
    tree: dict[str, Any] = {"model": {"path": whole}, "pools": {"prefill": {}, "decode": {"weights": packed}}}
    spec = ClusterSpec.parse(tree)
    assert tokenizer_path(spec, Role.PREFILL) == whole
    assert tokenizer_path(spec, Role.DECODE) == packed
    assert hash_tokenizer(packed) == tokenizer_of(spec)
    tree["pools"]["decode"]["weights"] = bare
    assert tokenizer_path(ClusterSpec.parse(tree), Role.DECODE) == whole
    tree["model"]["tokenizer"], tree["pools"]["decode"]["weights"] = bare, packed
    assert tokenizer_path(ClusterSpec.parse(tree), Role.DECODE) == bare
