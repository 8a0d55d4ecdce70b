from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kernels.layout import (
    LayoutError,
    PageDtype,
    PageLayout,
    PageOrder,
    Rounding,
    SealBinding,
    check_convertible,
    name_hash,
)

BF16 = PageLayout(30, 128, 3, 64, PageDtype.BF16, PageOrder.CPU_VEC)
FP8 = BF16.with_dtype(PageDtype.E4M3, rounding=Rounding.TRUNCATE, k_scales=(0.05,), v_scales=(0.25,))
MLA = PageLayout(2, 64, 1, 576, PageDtype.BF16, PageOrder.MLA)
DS = PageLayout(2, 64, 1, 576, PageDtype.E4M3, PageOrder.FP8_DS_MLA)
INDEX_KEYS = PageLayout(1, 64, 1, 132, PageDtype.UINT8, PageOrder.BYTES)
SPARSE = replace(MLA, layer_names="ab", further_regions=(replace(INDEX_KEYS, layer_names="cd"),))


def test_sizes_are_those_of_the_published_architectures() -> None:
    # KV bytes per token: SmolLM2-135M 23,040 BF16, 11,520 FP8; an MLA layer 1,152 BF16; a DeepSeek sparse row 656.
    assert BF16.page_bytes == 128 * 23040
    assert FP8.page_bytes == 128 * 11520
    assert MLA.layer_page_bytes == 64 * 1152
    assert DS.layer_page_bytes == 64 * 656
    assert BF16.cache_shape(7) == (7, 3, 128, 128)
    assert MLA.cache_shape(7) == (7, 64, 576)
    assert DS.cache_shape(7) == (7, 64, 656)


def test_fingerprint_is_stable_and_sees_every_field() -> None:
    assert FP8.fingerprint == "cfee74d4580148f234f5250e74a26ee2"
    others = [
        replace(FP8, num_layers=31),
        replace(FP8, page_tokens=64),
        replace(FP8, num_kv_heads=6),
        replace(FP8, head_dim=128),
        BF16,
        replace(FP8, order=PageOrder.CPU_AMX),
        replace(FP8, rounding=Rounding.NEAREST_EVEN),
        replace(FP8, k_scales=(0.051,)),
        replace(FP8, v_scales=(0.251,)),
    ]
    prints = {layout.fingerprint for layout in [FP8, *others]}
    assert len(prints) == len(others) + 1
    assert f"{FP8.fingerprint_u64:016x}" == FP8.fingerprint[:16]


def test_equal_layouts_written_differently_have_one_fingerprint() -> None:
    per_layer = replace(FP8, k_scales=(0.05,) * 30)
    assert per_layer == FP8
    assert per_layer.fingerprint == FP8.fingerprint
    assert FP8.k_scales[0] != 0.05  # the nearest float32
    assert replace(BF16, rounding=Rounding.TRUNCATE) == BF16


def test_dict_round_trip_through_json() -> None:
    for layout in (BF16, FP8, MLA, DS, SPARSE, replace(FP8, k_scales=tuple(0.01 * (i + 1) for i in range(30)))):
        assert PageLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"page_tokens": True}, "page_tokens is True"),
        ({"head_dim": 64.0}, "head_dim is 64.0"),
        ({"dtype": "fp8"}, "dtype is 'fp8', must be one of bfloat16, float8_e4m3fn"),
        ({"order": "nhd"}, "order is 'nhd'"),
        ({"rounding": "up"}, "rounding is 'up'"),
        ({"k_scales": 1.0}, "k_scales is 1.0, must be a list"),
        ({"k_scales": [1.0, 2.0]}, "num_layers = 30"),
        ({"k_scales": [0.0]}, "between"),
        ({"v_scales": [float("nan")]}, "finite"),
        ({"v_scales": ["1"]}, "finite"),
        ({"order": "mla"}, "num_kv_heads is 3"),
        ({"order": "cpu_amx", "page_tokens": 24}, "multiples of 16"),
        ({"page_tokens": 1, "num_kv_heads": 1, "head_dim": 4, "order": "kv_packed"}, "multiple of 16"),
        ({"extra": 1}, "unknown 'extra'"),
        ({"layer_names": 7}, "layer_names is 7"),
        ({"further_regions": 7}, "further_regions is 7, must be a list of at most 7"),
        ({"further_regions": [7]}, "page layout is 7, must be an object"),
        ({"further_regions": [INDEX_KEYS.to_dict()]}, "must be regions of 128 tokens a page"),
        ({"dtype": "uint8"}, "dtype is uint8 for order cpu_vec"),
    ],
)
def test_a_peers_layout_is_checked_field_by_field(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LayoutError, match=words.replace("[", r"\[")):
        PageLayout.from_dict({**FP8.to_dict(), **change})


def test_a_missing_field_and_special_orders_are_refused() -> None:
    data = FP8.to_dict()
    del data["rounding"]
    with pytest.raises(LayoutError, match="lacks rounding"):
        PageLayout.from_dict(data)
    with pytest.raises(LayoutError, match="bfloat16 pages have scale"):
        replace(BF16, k_scales=(0.5,))
    with pytest.raises(LayoutError, match="head_dim is 512"):
        replace(DS, head_dim=512)
    with pytest.raises(LayoutError, match="its scales travel"):
        replace(DS, k_scales=(0.5,))
    with pytest.raises(LayoutError, match="v_scales"):
        replace(MLA.with_dtype(PageDtype.E4M3), v_scales=(2.0,))


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (BF16, BF16),
        (BF16, FP8),
        (FP8, FP8),
        (BF16, replace(FP8, page_tokens=32)),
        (replace(BF16, order=PageOrder.CPU_AMX), FP8),
        (BF16, replace(FP8, order=PageOrder.KV_PACKED)),
        (MLA, MLA.with_dtype(PageDtype.E4M3)),
        (MLA, DS),
        (DS, DS),
        (SPARSE, replace(SPARSE, dtype=PageDtype.E4M3, order=PageOrder.FP8_DS_MLA)),
    ],
)
def test_convertible_pairs(src: PageLayout, dst: PageLayout) -> None:
    check_convertible(src, dst)


@pytest.mark.parametrize(
    ("src", "dst", "words"),
    [
        (FP8, BF16, "what rounding took is gone"),
        (BF16, replace(FP8, num_layers=29), "num_layers 30 against 29"),
        (BF16, replace(FP8, head_dim=128), "head_dim 64 against 128"),
        (BF16, replace(FP8, num_kv_heads=1), "num_kv_heads 3 against 1"),
        (FP8, replace(FP8, k_scales=(0.06,)), "a second rounding"),
        (FP8, replace(FP8, rounding=Rounding.NEAREST_EVEN), "a second rounding"),
        (MLA.with_dtype(PageDtype.E4M3), DS, "a second rounding"),
        (replace(BF16, num_layers=2, num_kv_heads=1, head_dim=576), MLA, "order cpu_vec against mla"),
        (DS, MLA, "what rounding took is gone"),
        (SPARSE, MLA, "2 regions against 1"),
        (SPARSE, replace(SPARSE, further_regions=(replace(INDEX_KEYS, head_dim=68),)), "head_dim 132 against 68"),
        (INDEX_KEYS, replace(INDEX_KEYS, page_tokens=32), "page_tokens 64 against 32"),
        (INDEX_KEYS, replace(MLA, num_layers=1, head_dim=132), "order bytes against mla"),
        (replace(BF16, layer_names="12"), replace(FP8, layer_names="34"), "layer_names 12 against 34"),
    ],
)
def test_refused_pairs_show_both_sides(src: PageLayout, dst: PageLayout, words: str) -> None:
    with pytest.raises(LayoutError, match=words) as error:
        check_convertible(src, dst)
    assert src.describe() in str(error.value)
    assert dst.describe() in str(error.value)


def test_every_field_of_a_region_is_in_the_fingerprint() -> None:
    others = (
        replace(SPARSE, layer_names="ba"),
        replace(SPARSE, further_regions=()),
        replace(SPARSE, further_regions=(INDEX_KEYS,)),
        replace(SPARSE, further_regions=SPARSE.further_regions * 2),
    )
    assert len({layout.fingerprint for layout in (SPARSE, *others)}) == 5
    assert SPARSE.page_bytes == MLA.page_bytes + 64 * 132


def test_names_of_layers_count_from_layers_on() -> None:
    assert name_hash(["model.layers.0.attn"]) == name_hash(["language_model.model.layers.0.attn"])
    assert name_hash(["layers.0.attn", "layers.1.attn"]) != name_hash(["layers.1.attn", "layers.0.attn"])


def test_scales_by_head_collapse_to_what_says_the_same() -> None:
    kv = PageLayout(2, 16, 2, 16, PageDtype.BF16, PageOrder.KV_PACKED)
    by_head = kv.with_dtype(PageDtype.E4M3, k_scales=(1.0, 1.0, 2.0, 2.0), v_scales=(1.0, 2.0, 3.0, 4.0))
    assert (by_head.k_scales, by_head.v_scale(1, 0)) == ((1.0, 2.0), 3.0)
    assert by_head.scales_by_head and not replace(by_head, v_scales=(1.0,)).scales_by_head


def test_binding_is_checked() -> None:
    with pytest.raises(ValueError, match="ticket_hash"):
        SealBinding(-1, 0)
    with pytest.raises(ValueError, match="attempt"):
        SealBinding(0, 1 << 32)
