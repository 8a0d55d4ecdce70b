"""No private words: what is written here is read by people who do not know who wrote it.

A word of this list hides which caller, request, connection or state is meant. Say it: "no caller waits for it", "by the
controller", "releasable". Words of a user's interface and keys of recorded measurements stay; they are named below.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("app", "actors", "kernels", "cluster", "ops", "tests")
WORDS = re.compile(
    r"(?<![a-z])(nobody|somebody|anybody|whoever|told|roads?|homeless|silenced|condemn\w*|ripe|scrub|relieve|outlook|outgrow"
    r"|forgive|seats?|weather|notary|far_side|chase)(?![a-z])",
    re.IGNORECASE,
)
KEPT = {
    ("CHANGELOG.md", "road"): "a name that is gone",
    ("ops/bench/ferry.py", "road"): "the key of a column in recorded measurements",
    ("ops/bench/ferry.py", "roads"): "the same",
    ("ops/bench/ferry.py", "notary"): "a name that its owner changes",
    ("ops/bench/picture.py", "road"): "the same",
    ("tests/ops/test_bench_ferry.py", "road"): "the same",
    ("tests/ops/test_bench_ferry.py", "roads"): "the same",
    ("tests/support/openai_forms.py", "weather"): "in the text of a request",
}


def texts() -> list[Path]:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*"))] + sorted(ROOT.glob("*.md"))
    return [file for file in files if file.suffix in (".py", ".md") and "results" not in file.relative_to(ROOT).parts]


def private_words() -> set[tuple[str, str]]:
    return {
        (str(file.relative_to(ROOT)), word.lower())
        for file in texts()
        if file != Path(__file__)
        for word in WORDS.findall(file.read_text())
    }


def test_what_is_written_has_no_private_words() -> None:
    assert len(texts()) > 400
    assert private_words() - set(KEPT) == set()


def test_a_kept_word_is_still_there() -> None:
    assert set(KEPT) - private_words() == set()
