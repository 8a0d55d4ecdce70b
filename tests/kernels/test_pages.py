"""seal_pages and open_pages of every backend against the numpy oracle.

1. Sealed bytes are the oracle's, for all orders and page sizes. 2. The digest is that of the bytes.
3. Opening writes exactly the tokens it should. 4. A page with a wrong digest changes nothing. 5. Arguments that do not
fit are refused by name.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import page_oracle as oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from page_checks import BACKENDS, BINDING, E4M3, KV_ORDERS, as_bits, check_round_trip, random_caches

from kernels import dispatch
from kernels.arguments import PageCaches, as_caches
from kernels.layout import LayoutError, PageDtype, PageLayout, PageOrder, Rounding, SealBinding


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("order", KV_ORDERS)
def test_bf16_to_e4m3(backend: str, order: PageOrder, rounding: Rounding) -> None:
    src = PageLayout(2, 32, 3, 32, PageDtype.BF16, order)
    wire = src.with_dtype(E4M3, rounding=rounding, k_scales=(0.05, 2.0), v_scales=(1.0, 0.3))
    check_round_trip(backend, src, wire, wire, [4, 0, 8], 3, [7, 2, 5])


def test_threads_share_the_pages_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels import cpu_numba

    monkeypatch.setattr(cpu_numba, "STREAM_MIN_BYTES", 4096)
    src = PageLayout(2, 32, 2, 64, PageDtype.BF16, PageOrder.KV_PACKED)
    wire = src.with_dtype(E4M3)
    dispatch.set_threads(2)
    try:
        check_round_trip("numba", src, wire, wire, [4, 0, 8, 2, 1], 5, [7, 2, 5, 1, 3])
        check_round_trip("numba", src, wire, wire, [4], 1, [7])
    finally:
        dispatch.set_threads(1)
    with pytest.raises(ValueError, match="threads is 0, must be from 1"):
        dispatch.set_threads(0)


def test_equal_layouts_share_prepared_caches() -> None:
    """Checked once; a layout that they were not checked against checks them anew."""
    src = PageLayout(2, 32, 2, 64, PageDtype.BF16, PageOrder.KV_PACKED)
    prepared = PageCaches(random_caches(src, 3), src)
    assert as_caches(prepared, replace(src)) is prepared
    with pytest.raises(ValueError, match="2 caches for 3 layers"):
        as_caches(prepared, replace(src, num_layers=3))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [PageDtype.BF16, E4M3])
@pytest.mark.parametrize("order", KV_ORDERS)
def test_a_format_that_stays_is_copied_bit_for_bit(backend: str, order: PageOrder, dtype: PageDtype) -> None:
    src = PageLayout(2, 16, 1, 32, dtype, order)
    check_round_trip(backend, src, src, src, [3, 1], 2, [0, 8])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("from_order", KV_ORDERS)
@pytest.mark.parametrize("to_order", KV_ORDERS)
def test_orders_convert_into_each_other(backend: str, from_order: PageOrder, to_order: PageOrder) -> None:
    src = PageLayout(1, 32, 2, 16, PageDtype.BF16, from_order)
    wire = replace(src, order=to_order).with_dtype(E4M3, rounding=Rounding.TRUNCATE, k_scales=(0.5,), v_scales=(0.7,))
    check_round_trip(backend, src, wire, wire, [2, 6], 2, [1, 3])
    # The destination may also lay the wire's bytes out anew.
    check_round_trip(backend, src, wire, replace(wire, order=from_order), [2, 6], 2, [1, 3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "wire",
    [
        PageLayout(2, 16, 1, 576, PageDtype.BF16, PageOrder.MLA),
        PageLayout(2, 16, 1, 576, E4M3, PageOrder.MLA, Rounding.NEAREST_EVEN, (0.1, 1.0)),
        PageLayout(2, 16, 1, 576, E4M3, PageOrder.FP8_DS_MLA),
    ],
    ids=["bf16", "e4m3", "ds_mla"],
)
def test_mla(backend: str, wire: PageLayout) -> None:
    src = PageLayout(2, 16, 1, 576, PageDtype.BF16, PageOrder.MLA)
    check_round_trip(backend, src, wire, wire, [5, 2, 3], 3, [0, 1, 8])
    if wire.order is PageOrder.FP8_DS_MLA:
        check_round_trip(backend, wire, wire, wire, [5, 2, 3], 3, [0, 1, 8])
        check_round_trip(backend, src, wire, replace(wire, page_tokens=64), [5, 2, 3], 3, [4])


def test_ds_mla_keeps_the_scale_of_ordinary_rows() -> None:
    """Decoding a row gives each value within half a step of its tile, and the rope part exactly."""
    from kernels.reference import encode_ds_mla

    rows = torch.randn(64, 576, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows[3, :128] = 0
    packed = encode_ds_mla(rows)
    scales = packed[:, 512:528].contiguous().view(torch.float32)
    values = packed[:, :512].contiguous().view(torch.float8_e4m3fn).float().view(64, 4, 128) * scales[:, :, None]
    error = (values - rows[:, :512].float().view(64, 4, 128)).abs()
    assert bool((error <= scales[:, :, None] * 16.001).all())  # half a step at 448 is 16
    assert torch.equal(packed[:, 528:].contiguous().view(torch.bfloat16), rows[:, 512:])
    assert scales[3, 0].item() == 2.0**-126


@settings(derandomize=True, max_examples=40, deadline=None)
@given(data=st.data())
def test_page_sizes_by_index_arithmetic(data: st.DataObject) -> None:
    order_a, order_b, order_c = (data.draw(st.sampled_from(KV_ORDERS)) for _ in range(3))
    sizes = st.sampled_from([16, 32, 48, 64])
    heads = data.draw(st.integers(1, 4))
    src = PageLayout(2, data.draw(sizes), heads, 16, PageDtype.BF16, order_a)
    to_fp8 = data.draw(st.booleans())
    wire = replace(src, order=order_b, page_tokens=data.draw(sizes))
    if to_fp8:
        wire = wire.with_dtype(E4M3, rounding=data.draw(st.sampled_from(Rounding)), k_scales=(0.25, 1.5))
    dst = replace(wire, order=order_c, page_tokens=data.draw(sizes))
    num_src = data.draw(st.integers(1, 4))
    tokens = num_src * src.page_tokens
    n = data.draw(st.integers((tokens - src.page_tokens) // wire.page_tokens + 1, -(-tokens // wire.page_tokens)))
    covered = n * wire.page_tokens
    num_dst = data.draw(
        st.integers((covered - wire.page_tokens) // dst.page_tokens + 1, -(-covered // dst.page_tokens))
    )
    ids = st.permutations(range(16))
    check_round_trip(
        data.draw(st.sampled_from(BACKENDS)),
        src,
        wire,
        dst,
        data.draw(ids)[:num_src],
        n,
        data.draw(ids)[:num_dst],
        blocks=16,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_major_strides_of_a_gpu_cache(backend: str) -> None:
    """NHD storage seen as the logical (blocks, heads, tokens, 2D), and several layers in one allocation."""
    src = PageLayout(2, 16, 2, 16, PageDtype.BF16, PageOrder.KV_PACKED)
    flat = random_caches(replace(src, num_layers=1, num_kv_heads=4), 5)[0].reshape(5, 2, 16, 2, 32)  # B, L, N, H, C
    caches = [flat[:, layer].permute(0, 2, 1, 3) for layer in range(2)]
    assert not caches[0].is_contiguous()
    wire = src.with_dtype(E4M3)
    out = torch.empty(2, wire.page_bytes, dtype=torch.uint8)
    targets = [
        torch.zeros(5, 16, 2, 32, dtype=torch.uint8).view(torch.float8_e4m3fn).permute(0, 2, 1, 3) for _ in range(2)
    ]
    with dispatch.use_backend(backend):
        digests = dispatch.seal_pages(caches, src, wire, [4, 1], out, BINDING, 0)
        assert dispatch.open_pages(out, wire, digests, targets, wire, [0, 3], BINDING, 0).all()
    expected = oracle.seal([as_bits(cache) for cache in caches], src, wire, [4, 1], 2)
    np.testing.assert_array_equal(out.numpy(), expected)
    for layer in range(2):
        np.testing.assert_array_equal(
            as_bits(targets[layer])[[0, 3]].reshape(2, -1), expected.reshape(2, 2, -1)[:, layer]
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_beyond_two_to_the_31_elements(backend: str) -> None:
    """A cache whose blocks lie 2^31 elements apart (memory that is never touched costs nothing)."""
    src = PageLayout(1, 16, 1, 16, PageDtype.BF16, PageOrder.CPU_VEC)
    stride = (1 << 31) + 64
    storage = torch.empty(2 * stride, dtype=torch.bfloat16)  # 8 GiB of address space
    cache = torch.as_strided(storage, src.cache_shape(2), (stride, 512, 32, 1))
    cache[1] = torch.arange(512).view(1, 16, 32)
    wire = src.with_dtype(E4M3)
    out = torch.empty(1, wire.page_bytes, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        dispatch.seal_pages([cache], src, wire, [1], out, BINDING, 0)
    expected = oracle.seal([as_bits(cache[1:2].clone())], src, wire, [0], 1)
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty(backend: str) -> None:
    src = PageLayout(1, 16, 1, 16, PageDtype.BF16, PageOrder.CPU_VEC)
    wire = src.with_dtype(E4M3)
    caches, out = random_caches(src, 2), torch.empty(0, wire.page_bytes, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        assert dispatch.seal_pages(caches, src, wire, [], out, BINDING, 0).shape == (0,)
        assert dispatch.page_digests(out, wire, BINDING, 0).shape == (0,)
        target = random_caches(wire, 2)
        assert dispatch.open_pages(out, wire, [], target, wire, [], BINDING, 0).shape == (0,)


def test_output_may_view_foreign_memory_with_a_row_stride() -> None:
    src = PageLayout(1, 16, 1, 16, PageDtype.BF16, PageOrder.CPU_VEC)
    wire = src.with_dtype(E4M3)
    room = bytearray(b"\xee" * (wire.page_bytes * 4 + 64))
    view = torch.frombuffer(room, dtype=torch.uint8)
    skip = -view.data_ptr() % 64
    rows = view[skip : skip + 3 * wire.page_bytes].view(3, wire.page_bytes)
    out = rows[::2]
    caches = random_caches(src, 4)
    dispatch.seal_pages(caches, src, wire, torch.tensor([3, 1], dtype=torch.int32), out, BINDING, 0)
    expected = oracle.seal([as_bits(cache) for cache in caches], src, wire, [3, 1], 2)
    np.testing.assert_array_equal(out.numpy(), expected)
    assert rows[1].tolist() == [0xEE] * wire.page_bytes


@pytest.mark.parametrize("backend", BACKENDS)
def test_digests_in_every_form_and_a_replay_is_refused(backend: str) -> None:
    src = PageLayout(1, 16, 1, 16, E4M3, PageOrder.CPU_VEC)
    caches, out = random_caches(src, 4), torch.empty(2, src.page_bytes, dtype=torch.uint8)
    with dispatch.use_backend(backend):
        digests = dispatch.seal_pages(caches, src, src, [3, 1], out, BINDING, 5)
        numbers = dispatch.digests_to_ints(digests)
        for form in (digests, numbers, digests.tolist(), digests.numpy(), np.array(numbers, dtype=np.uint64)):
            assert dispatch.open_pages(out, src, form, random_caches(src, 4), src, [0, 1], BINDING, 5).all()
        for binding, ordinal in ((BINDING, 4), (SealBinding(BINDING.ticket_hash, 3), 5), (SealBinding(1, 2), 5)):
            targets = random_caches(src, 4, seed=8)
            kept = [target.clone() for target in targets]
            verdict = dispatch.open_pages(out, src, digests, targets, src, [0, 1], binding, ordinal)
            assert verdict.tolist() == [False, False]
            assert all(torch.equal(a, b) for a, b in zip(targets, kept, strict=True))


def test_arguments_that_do_not_fit_are_named() -> None:
    src = PageLayout(2, 16, 2, 16, PageDtype.BF16, PageOrder.CPU_VEC)
    wire = src.with_dtype(E4M3)
    caches = random_caches(src, 3)
    out = torch.empty(2, wire.page_bytes, dtype=torch.uint8)
    fp8 = random_caches(wire, 3)
    good = torch.zeros(2, dtype=torch.int64)

    def seal(**change: Any) -> None:
        values: dict[str, Any] = {
            "caches": caches, "src": src, "wire": wire, "block_ids": [0, 1], "out": out, "binding": BINDING,
            "first_ordinal": 0,
        }  # fmt: skip
        dispatch.seal_pages(**{**values, **change})

    def opened(**change: Any) -> None:
        values: dict[str, Any] = {
            "wire_pages": out, "wire": wire, "digests": good, "caches": fp8, "dst": wire, "block_ids": [0, 1],
            "binding": BINDING, "first_ordinal": 0,
        }  # fmt: skip
        dispatch.open_pages(**{**values, **change})

    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        (seal, {"caches": caches[:1]}, ValueError, "1 caches for 2 layers"),
        (seal, {"caches": fp8}, ValueError, "cache of layer 0 is torch.uint8"),
        (seal, {"caches": [caches[0], caches[1][:, :1]]}, ValueError, "cache of layer 1"),
        (seal, {"caches": [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]}, ValueError, "contiguous"),
        (seal, {"block_ids": [0, 3]}, ValueError, "block_ids go from 0 to 3, the cache has blocks 0..2"),
        (seal, {"block_ids": [-1, 0]}, ValueError, "block_ids go from -1"),
        (seal, {"block_ids": [0]}, ValueError, "1 source blocks of 16 tokens do not go with 2 wire pages"),
        (seal, {"block_ids": [0, 1, 2]}, ValueError, "3 source blocks"),
        (seal, {"block_ids": torch.zeros(2)}, ValueError, "block_ids must be"),
        (seal, {"out": out[:, 1:]}, ValueError, "out must be uint8"),
        (seal, {"out": out.to(torch.int8)}, ValueError, "out must be uint8"),
        (seal, {"first_ordinal": -1}, ValueError, "first_ordinal is -1"),
        (seal, {"wire": replace(wire, num_kv_heads=1)}, LayoutError, "num_kv_heads 2 against 1"),
        (seal, {"src": wire}, ValueError, "cache of layer 0 is torch.bfloat16"),
        (seal, {"wire": replace(wire, head_dim=32)}, LayoutError, "head_dim 16 against 32"),
        (opened, {"digests": good[:1]}, ValueError, "digests must be 2"),
        (opened, {"digests": good.float()}, ValueError, "digests must be 2"),
        (opened, {"block_ids": [1, 1]}, ValueError, "names a block twice"),
        (opened, {"block_ids": [1, 3]}, ValueError, "block_ids go from 1 to 3"),
        (opened, {"dst": src, "caches": caches}, LayoutError, "open does not convert"),
        (opened, {"dst": replace(wire, k_scales=(0.5,))}, LayoutError, "second rounding"),
    ]
    for call, change, kind, words in cases:
        with pytest.raises(kind, match=words.replace("(", r"\(")):
            call(**change)


def test_backends_are_chosen_once_and_by_name() -> None:
    assert dispatch.backend_name("cpu") == "numba"
    assert dispatch.backend_name("cuda") == "triton"
    with dispatch.use_backend("reference"):
        assert dispatch.backend_name("cpu") == "reference"
    assert dispatch.backend_name("cpu") == "numba"
    with pytest.raises(ValueError, match="no kernel backend 'fast'"), dispatch.use_backend("fast"):
        raise AssertionError("not reached")


@pytest.mark.parametrize("operator", ["seal", "open"])
def test_the_gil_is_released(operator: str) -> None:
    """While one thread is inside one call, another one runs Python: it would not if the call kept the GIL."""
    src = PageLayout(4, 128, 8, 128, PageDtype.BF16, PageOrder.CPU_VEC)
    wire = src.with_dtype(E4M3, rounding=Rounding.TRUNCATE, k_scales=(0.3,))
    caches, targets = random_caches(src, 1), random_caches(wire, 64)
    out = torch.zeros(64, wire.page_bytes, dtype=torch.uint8)
    digests = dispatch.seal_pages(caches, src, wire, [0] * 64, out, BINDING, 0)
    span: list[float] = []

    def work() -> None:
        begin = time.perf_counter()
        if operator == "seal":
            dispatch.seal_pages(caches, src, wire, [0] * 64, out, BINDING, 0)
        else:
            dispatch.open_pages(out, wire, digests, targets, wire, list(range(64)), BINDING, 0)
        span.extend((begin, time.perf_counter()))

    # A loaded machine may not let the other thread in during one short call: any of ten is enough.
    for _ in range(10):
        span.clear()
        thread = threading.Thread(target=work)
        seen = []
        thread.start()
        while thread.is_alive():
            seen.append(time.perf_counter())
            time.sleep(0.0005)
        begin, end = span
        middle = [t for t in seen if begin + (end - begin) * 0.25 < t < begin + (end - begin) * 0.75]
        if middle:
            return
    raise AssertionError("no other thread ran in the middle of any of ten calls")
