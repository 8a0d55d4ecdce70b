"""What the scheduler half tells the worker half, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from actors.engine.integrity.tracker import IntegrityDelta
from actors.engine.orders import OpenParams, SealParams


@dataclass(slots=True)
class SealJob:
    """Pages of a ticket that are complete after this step's forward."""

    order: SealParams
    block_ids: list[int]
    first_page: int
    last: bool


@dataclass(slots=True)
class OpenJob:
    """Pages to verify and scatter: wire page `first_page + i` belongs into `block_ids[i]`. No pages: just release."""

    request_id: str
    order: OpenParams
    block_ids: list[int]
    first_page: int
    num_tokens: int
    tags: list[int] | None = None  # of the pages' lives when they were allocated for this; None: not tracked


@dataclass(slots=True)
class FerryMetadata(KVConnectorMetadata):
    seals: list[SealJob] = field(default_factory=list)
    opens: list[OpenJob] = field(default_factory=list)
    abandoned: list[tuple[int, int]] = field(default_factory=list)  # (ticket, attempt) that will not be sealed further
    cancelled: list[str] = field(default_factory=list)  # requests whose pages must not be written any more
    integrity: IntegrityDelta | None = None  # what the tracker tells its worker side; None when it is off

    def empty(self) -> bool:
        return not (self.seals or self.opens or self.abandoned or self.cancelled) and self.integrity is None
