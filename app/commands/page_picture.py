"""A replica's pages as a picture in the terminal: which request holds which page. Pure."""

from __future__ import annotations

import string
from typing import Any

MARKS = string.ascii_uppercase + string.ascii_lowercase + string.digits
OTHER, SHARED, FREE = "+", "#", "."
ROWS_MAX = 32


def picture(replica_id: str, found: dict[str, Any], width: int = 64) -> list[str]:
    """`found`: a replica's entry of `GET /status/pages`. A mark is a page, or several where there are very many."""
    total, owners = int(found["blocks_total"]), found["owners"]
    lines = [f"{found['pool']} {replica_id} ({found['state']}): {_counts(found)}"]
    if not owners:
        return [*lines, f"  no pages with owners: {'not reported yet' if held(found) else 'idle'}"]
    marks = page_marks(found)
    a_mark = max(1, -(-total // (width * ROWS_MAX)))
    firsts = range(1, total + 1, a_mark)  # page 0 is the engine's null page
    cells = [cell([marks.get(page, FREE) for page in range(first, first + a_mark)]) for first in firsts]
    lines += [f"{firsts[at]:7,d}  {''.join(cells[at : at + width])}" for at in range(0, len(cells), width)]
    each = "a page" if a_mark == 1 else f"{a_mark} pages"
    lines.append(f"  {each} a mark; {FREE} has no owner, {SHARED} has several")
    for mark, owner in zip(MARKS + OTHER * len(owners), owners):
        ticket = f"ticket {owner['ticket_id']} {owner['ticket_state']}" if owner["ticket_id"] else "no ticket known"
        lines.append(f"  {mark}  {len(owner['pages']):6,d} pages  {owner['request_id']}  {ticket}")
    return lines


def held(found: dict[str, Any]) -> int:
    return int(found["blocks_held"])


def page_marks(found: dict[str, Any]) -> dict[int, str]:
    """Of every page with an owner."""
    marks = {
        int(page): MARKS[number] if number < len(MARKS) else OTHER
        for number, owner in enumerate(found["owners"])
        for page in owner["pages"]
    }
    return marks | dict.fromkeys((int(page) for page in found["shared"]), SHARED)


def cell(marks: list[str]) -> str:
    there = set(marks) - {FREE}
    return FREE if not there else there.pop() if len(there) == 1 else SHARED


def _counts(found: dict[str, Any]) -> str:
    parts = [f"{held(found):,} of {found['blocks_total']:,} pages held by {len(found['owners'])} requests"]
    parts += [f"{len(found['shared']):,} shared"] if found["shared"] else []
    parts += [f"{found['blocks_quarantined']:,} quarantined"] if found["blocks_quarantined"] else []
    return ", ".join([*parts, f"{found['blocks_free']:,} free"])
