"""How much of what is opened is verified, and landings that come too late. On tiny caches, with the real kernels.

1. `full`: a spoiled page is a MISMATCH and is not written; the others are.
2. `off`: pages are written as they are, and the bytes are those that verifying would have written.
3. `sampled`: the verified pages depend on the ticket alone, about as many as the rate says, and every page is written
   or refused exactly once.
4. Pages that live another life by now are STALE, whatever the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from actors.engine.integrity.tag_check import TagCheck
from actors.engine.integrity.tracker import IntegrityDelta
from actors.engine.metadata import OpenJob
from actors.engine.orders import OpenParams
from actors.engine.worker_half import FerryConnectorWorker
from actors.messages import HandOver, Lease, Role, Seal, Verdict
from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, SealBinding

pytestmark = pytest.mark.compiles  # the real kernels

LAYOUT = PageLayout(2, 32, 2, 32, PageDtype.E4M3, PageOrder.CPU_VEC)
NUM_PAGES, BLOCKS = 6, 20


@pytest.fixture
def half() -> Iterator[FerryConnectorWorker]:
    made = FerryConnectorWorker("r", Role.DECODE, 0, 1, "/nowhere", sample_rate=0.5)
    made.layout = LAYOUT
    made._caches = caches()
    yield made
    made.close()


def caches() -> list[torch.Tensor]:
    return [torch.zeros(LAYOUT.cache_shape(BLOCKS), dtype=torch.uint8) for _ in range(LAYOUT.num_layers)]


def pages_of(seed: int = 1) -> torch.Tensor:
    return torch.randint(
        0, 255, (NUM_PAGES, LAYOUT.page_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )


def job_of(pages: torch.Tensor, ticket_id: int = 7, tags: list[int] | None = None) -> OpenJob:
    digests = dispatch.digests_to_ints(dispatch.page_digests(pages, LAYOUT, SealBinding(ticket_id, 1), 0))
    seal = Seal(
        ticket_id=ticket_id,
        attempt=1,
        layout_fingerprint=LAYOUT.fingerprint,
        num_tokens=NUM_PAGES * 32,
        digests=(tuple(digests),),
    )
    lease = Lease(ticket_id=ticket_id, attempt=1, node_id="n", segment="s", offset=0, num_bytes=1)
    over = HandOver(ticket_id=ticket_id, attempt=1, seal=seal, lease=lease, deadline_s=1.0)
    return OpenJob("a", OpenParams(hand_over=over), [3, 9, 4, 17, 1, 12], 0, NUM_PAGES * 32, tags)


def written(half: FerryConnectorWorker, job: OpenJob) -> list[bool]:
    return [any(bool(cache[block].any()) for cache in half._caches) for block in job.block_ids]


@pytest.mark.parametrize("seals", ["full", "sampled", "off"])
def test_good_pages_are_written_the_same_whatever_is_verified(half: FerryConnectorWorker, seals: str) -> None:
    pages = pages_of()
    job = job_of(pages)
    half.set_seals(seals)
    assert half._land(job, pages) == {Verdict.OK: NUM_PAGES}
    expected = caches()
    binding = SealBinding(7, 1)
    digests = list(job.order.hand_over.seal.digests[0])
    assert bool(dispatch.open_pages(pages, LAYOUT, digests, expected, LAYOUT, job.block_ids, binding, 0).all())
    assert all(torch.equal(mine, right) for mine, right in zip(half._caches, expected))
    assert half.pages_verified + half.pages_unverified == NUM_PAGES
    assert {"full": half.pages_unverified, "off": half.pages_verified}.get(seals, 0) == 0


def test_full_refuses_the_spoiled_page_alone(half: FerryConnectorWorker) -> None:
    pages = pages_of()
    job = job_of(pages)
    pages[2, 100] ^= 1
    assert half._land(job, pages) == {Verdict.OK: NUM_PAGES - 1, Verdict.MISMATCH: 1}
    assert written(half, job) == [True, True, False, True, True, True]


def test_off_takes_what_it_gets(half: FerryConnectorWorker) -> None:
    pages = pages_of()
    job = job_of(pages)
    pages[2, 100] ^= 1
    half.set_seals("off")
    assert half._land(job, pages) == {Verdict.OK: NUM_PAGES} and all(written(half, job))


def test_sampled_verifies_a_share_that_depends_on_the_ticket_alone(half: FerryConnectorWorker) -> None:
    half.set_seals("sampled")
    verified = []
    for ticket_id in range(400):
        runs = list(half._runs(ticket_id, 0, NUM_PAGES))
        assert [(first, last) for first, last, _ in runs] == list(
            zip([0, *(last for _, last, _ in runs)], [e for _, e, _ in runs])
        )
        assert runs[-1][1] == NUM_PAGES and runs == list(half._runs(ticket_id, 0, NUM_PAGES))
        chosen = [flag for first, last, flag in runs for _ in range(last - first)]
        # A chunk that begins later chooses the same pages.
        later = [flag for first, last, flag in half._runs(ticket_id, 2, NUM_PAGES - 2) for _ in range(last - first)]
        assert chosen[2:] == later
        verified.append(sum(chosen))
    assert 0.45 < sum(verified) / (400 * NUM_PAGES) < 0.55
    ticket_id = next(t for t in range(400) if 0 < verified[t] < NUM_PAGES)
    pages = pages_of()
    job = job_of(pages, ticket_id)
    pages[:, 5] ^= 1
    assert half._land(job, pages) == {
        Verdict.OK: NUM_PAGES - verified[ticket_id],
        Verdict.MISMATCH: verified[ticket_id],
    }


@pytest.mark.parametrize("seals", ["full", "off"])
def test_a_landing_on_a_later_life_is_stale(half: FerryConnectorWorker, seals: str) -> None:
    pages = pages_of()
    check = TagCheck(BLOCKS, 32, 4, 8)
    lives: dict[str, Any] = {"tags": {block: 100 + block for block in (3, 9, 4, 17, 1, 12)}}
    check.step(IntegrityDelta(**lives), None)
    half.check = check
    half.set_seals(seals)
    job = job_of(pages, tags=[100 + block for block in (3, 9, 4, 17, 1, 12)])
    assert half._land(job, pages) == {Verdict.OK: NUM_PAGES}
    half._caches = caches()
    check.step(IntegrityDelta(tags={17: 500}), None)
    assert half._land(job, pages) == {Verdict.STALE: NUM_PAGES}
    assert not any(written(half, job))
