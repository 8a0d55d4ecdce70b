"""A replica's pages as a picture in the terminal: which request holds which page. Pure."""

from __future__ import annotations

import string
from typing import Any

MARKS = string.ascii_uppercase + string.ascii_lowercase + string.digits
OTHER, SHARED, FREE = "+", "#", "."
ROWS_MAX = 32


def picture(replica_id: str, replica: dict[str, Any], width: int = 64) -> list[str]:
    """`found`: a replica's entry of `GET /status/pages`. A mark is a page, or several where there are very many."""
    total, owners = int(replica["blocks_total"]), replica["owners"]
    lines = [f"{replica['pool']} {replica_id} ({replica['state']}): {_counts(replica)}"]
    if not owners:
        return [*lines, f"  no pages with owners: {'not reported yet' if held(replica) else 'idle'}"]
    marks = page_marks(replica)
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


def held(replica: dict[str, Any]) -> int:
    return int(replica["blocks_held"])


def page_marks(replica: dict[str, Any]) -> dict[int, str]:
    """Of every page with an owner."""
    marks = {
        int(page): MARKS[number] if number < len(MARKS) else OTHER
        for number, owner in enumerate(replica["owners"])
        for page in owner["pages"]
    }
    return marks | dict.fromkeys((int(page) for page in replica["shared"]), SHARED)


def cell(marks: list[str]) -> str:
    there = set(marks) - {FREE}
    return FREE if not there else there.pop() if len(there) == 1 else SHARED


def _counts(replica: dict[str, Any]) -> str:
    parts = [f"{held(replica):,} of {replica['blocks_total']:,} pages held by {len(replica['owners'])} requests"]
    parts += [f"{len(replica['shared']):,} shared"] if replica["shared"] else []
    parts += [f"{replica['blocks_quarantined']:,} quarantined"] if replica["blocks_quarantined"] else []
    return ", ".join([*parts, f"{replica['blocks_free']:,} free"])
