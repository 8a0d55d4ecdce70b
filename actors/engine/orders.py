"""What a replica asks of its own engine for one request: carried in `kv_transfer_params["pageferry"]`.

Only the replica writes it, after the frontend has refused any such field from outside.
"""

from __future__ import annotations

from typing import Any

import msgspec

from actors.messages import HandOver, Lease

PARAMS_KEY = "pageferry"


class SealParams(msgspec.Struct, frozen=True, kw_only=True, tag="seal"):
    """Prefill: seal the prompt's pages into this lease as they are computed."""

    ticket_id: int
    attempt: int
    num_tokens: int
    wire_layout: dict[str, Any]
    lease: Lease


class OpenParams(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Decode: open the sealed pages that lie in `hand_over.lease` (already on this node)."""

    hand_over: HandOver


Order = SealParams | OpenParams


def to_params(order: Order) -> dict[str, Any]:
    """`kv_transfer_params` for the engine."""
    return {PARAMS_KEY: msgspec.to_builtins(order)}


def from_params(params: dict[str, Any] | None) -> Order | None:
    """The order in a request's `kv_transfer_params`; None when there is none. Raises on a malformed one."""
    raw = (params or {}).get(PARAMS_KEY)
    return None if raw is None else msgspec.convert(raw, type=Order)
