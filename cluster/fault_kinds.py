"""The kinds of faults that can be put into a running engine, and what has to notice each. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["worker", "prefill", "scheduler"]


class FaultError(ValueError):
    """A fault that is not allowed or not possible here."""


@dataclass(frozen=True, slots=True)
class Kind:
    guard: str  # what has to notice: tags, lives, seals, road, ledger
    side: Side
    escapes: bool  # without the guard it changes what a request reads, so wrong tokens are to be expected
    what: str


KINDS: dict[str, Kind] = {
    "table_other_request": Kind("tags", "worker", True, "a block table entry names another request's page"),
    "table_free_page": Kind("tags", "worker", True, "a block table entry names a page that nobody holds"),
    "table_own_page": Kind("tags", "worker", True, "a block table entry names another page of the same request"),
    "page_freed_and_taken": Kind("tags", "scheduler", True, "a page is freed early and another request takes it"),
    "stale_tag": Kind("tags", "worker", False, "a page's tag is an earlier one"),
    "tag_bumped": Kind("tags", "worker", False, "a page's tag is one that no request was given"),
    "late_landing": Kind("lives", "worker", True, "an aborted request's pages land after they were given to another"),
    "replayed_page": Kind("seals", "worker", True, "staging holds a page of an earlier ticket"),
    "bit_flip": Kind("seals", "worker", True, "one bit of a page in staging is turned over"),
    "page_permutation": Kind("seals", "worker", True, "two pages of a ticket are swapped in staging"),
    "token_permutation": Kind("seals", "worker", True, "two tokens inside a page are swapped in staging"),
    "truncated_page": Kind("seals", "worker", True, "the end of a page never reached staging"),
    "wrong_scale": Kind("seals", "prefill", False, "prefill converts with other scales than decode reads with"),
    "seal_lost": Kind("road", "prefill", False, "the proof of a ticket is lost"),
    "seal_late": Kind("road", "prefill", False, "the proof comes after the deadline"),
    "seal_duplicated": Kind("road", "prefill", False, "the proof comes twice"),
    "page_freed_early": Kind("ledger", "scheduler", True, "a page goes back to the free list while it is read"),
    "shared_page_freed_early": Kind("ledger", "scheduler", True, "a shared page loses one reference too many"),
}
