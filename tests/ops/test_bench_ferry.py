"""The ferry benchmark on a small layout: real kernels, real worker halves, a real transfer actor's code.

1. Both roads bring exactly the pages that decode's cache should hold, and every block in its turn.
2. The shipped cases are layouts that the worker half recognises as such.
3. A row's numbers fit together; page counts keep to the memory given.
4. The copier copies as many bytes as it is asked for, across the end of its pool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import dispatch
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding
from ops.bench import ferry, picture
from ops.bench.ferry import Case, KernelRoad, Pool, ProductRoad

pytestmark = pytest.mark.compiles  # the real kernels

SMALL = Case("small", PageLayout(2, 32, 2, 32, PageDtype.E4M3, PageOrder.CPU_VEC, Rounding.TRUNCATE), "CPU_ATTN")
LATENT = Case("latent", PageLayout(3, 64, 1, 576, PageDtype.E4M3, PageOrder.MLA), "FLASHMLA")


@pytest.mark.parametrize("road", [KernelRoad, ProductRoad])
@pytest.mark.parametrize("case", [SMALL, LATENT], ids=lambda case: case.name)
def test_pages_arrive(case: Case, road: Any) -> None:
    pool = Pool(case, 8)
    wire = torch.zeros(8, case.wire.page_bytes, dtype=torch.uint8)
    binding = dispatch.SealBinding(0, 0)
    dispatch.seal_pages(pool.source, case.source, case.wire, list(range(8)), wire, binding, 0)
    with road(pool, 5) as ready:
        for pages in (5, 3):
            parts = ready.hand_over(pages)
            assert parts.seal > 0 and parts.open > 0 and (parts.move > 0) == (road is ProductRoad)
    layer_bytes = case.wire.layer_page_bytes
    for layer, target in enumerate(pool.target):
        expected = wire[:, layer * layer_bytes : (layer + 1) * layer_bytes]
        assert torch.equal(target.reshape(8, -1), expected)  # 5 + 3 hand-overs have been through all eight blocks


@pytest.mark.parametrize("case", ferry.cases(), ids=lambda case: case.name)
def test_shipped_cases_are_recognised(case: Case) -> None:
    few = Case(case.name, PageLayout(**{**_fields(case.wire), "num_layers": 1}), case.backend)
    with ProductRoad(Pool(few, 2), 2) as road:  # raises when the worker half describes another layout
        assert road.hand_over(2).total > 0


def _fields(layout: PageLayout) -> dict[str, Any]:
    return {name: getattr(layout, name) for name in layout.__dataclass_fields__}


def test_rows_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ferry, "BATCH_S", 0.002)
    monkeypatch.setattr(ferry, "PAIRS", 4)
    report = ferry.measure((1, 4, 1 << 20), 1 << 20, lambda text: None, only=[SMALL])
    assert [(row["threads"], row["road"], row["pages"]) for row in report["rows"]] == [
        (threads, road, pages) for threads in (1, 2) for road in ("kernels", "product") for pages in (1, 4)
    ]
    for row in report["rows"]:
        assert row["wire_bytes"] == row["pages"] * SMALL.wire.page_bytes
        assert row["traffic_gb_per_s"] == pytest.approx(ferry.TRAFFIC * row["wire_gb_per_s"])
        assert row["share"].low <= row["share"].value <= row["share"].high
        assert len(row["raw"]) == 4 and all(len(batch) == 5 for batch in row["raw"])
    assert len([line for line in ferry.table(report).splitlines() if line.startswith("| small |")]) == 9
    picture.ferry(report, "caption", tmp_path / "ferry.png")
    assert (tmp_path / "ferry.png").read_bytes().startswith(b"\x89PNG")


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="--memory-gib"):
        ferry.measure((1,), 1000, lambda text: None, only=[SMALL])


def test_the_copier_copies_what_it_is_asked_for() -> None:
    copier = ferry.Copier(1000, threads=2)
    copier._target.zero_()
    copier.copy(700)
    assert int(copier._target.sum()) == 700 and copier._at == 700
    copier.copy(2500)
    assert int(copier._target.sum()) == 1000 and copier._at == 200
