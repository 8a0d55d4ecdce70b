"""Test vectors of the kernels as files in kernels/vectors: inputs and the bytes that the reference makes of them.

Whoever ports an operator to another language or device compares with these. Arrays are base64 of zlib of little-endian
bytes. `write` makes the files anew; `verify` runs the operators of a backend on what the files hold.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels import dispatch, reference
from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding, SealBinding

FOLDER = Path(__file__).parents[2] / "kernels" / "vectors"
_E4M3, _BF16 = PageDtype.E4M3, PageDtype.BF16


def encode(tensor: Tensor) -> dict[str, Any]:
    data = tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.view(1).view(torch.uint8)
    packed = zlib.compress(bytes(data.flatten().tolist()), 9)
    return {"dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape), "zlib": base64.b64encode(packed).decode()}


def decode(value: dict[str, Any]) -> Tensor:
    data = bytearray(zlib.decompress(base64.b64decode(value["zlib"])))
    return torch.frombuffer(data, dtype=torch.uint8).view(getattr(torch, value["dtype"])).reshape(value["shape"])


def _random(seed: int, high: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)


def _e4m3() -> dict[str, Any]:
    """All 65,536 BF16 values in the order of their bits."""
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    cases = [
        {"rounding": rule, "scale": scale, "codes": encode(reference.encode_e4m3(bits, scale, rule))}
        for rule in Rounding
        for scale in (1.0, 0.0625, 230.0)
    ]
    return {"input": "BF16 of the bits 0..65535", "cases": cases}


def _pages() -> dict[str, Any]:
    kv = PageLayout(2, 16, 2, 16, _BF16, PageOrder.KV_PACKED)
    wires = [
        (kv, kv),
        (kv, kv.with_dtype(_E4M3, k_scales=(0.25, 3.0), v_scales=(0.7,))),
        *(
            (
                PageLayout(2, 32, 1, 32, _BF16, order),
                PageLayout(2, 32, 1, 32, _E4M3, order, Rounding.TRUNCATE, (1.0, 0.05), (0.3,)),
            )
            for order in (PageOrder.CPU_VEC, PageOrder.CPU_AMX)
        ),
        (
            PageLayout(1, 32, 2, 16, _BF16, PageOrder.CPU_AMX),
            PageLayout(1, 16, 1, 16, _E4M3, PageOrder.CPU_VEC, Rounding.TRUNCATE),
        ),
        (PageLayout(1, 4, 1, 576, _BF16, PageOrder.MLA), PageLayout(1, 4, 1, 576, _E4M3, PageOrder.MLA)),
        (PageLayout(1, 4, 1, 576, _BF16, PageOrder.MLA), PageLayout(1, 4, 1, 576, _E4M3, PageOrder.FP8_DS_MLA)),
    ]
    cases = []
    for seed, (src, wire) in enumerate(wires):
        bits = [_random(10 * seed + i, 65536, src.cache_shape(3)).to(torch.int16) for i in range(src.num_layers)]
        ids, head_start, first = [2, 0], src.num_kv_heads - wire.num_kv_heads, 1000 + seed
        binding = SealBinding((1 << 64) - 1 - seed, seed)
        out = torch.zeros(2 * src.page_tokens // wire.page_tokens, wire.page_bytes, dtype=torch.uint8)
        caches = [each.view(torch.bfloat16) for each in bits]
        digests = dispatch.seal_pages(caches, src, wire, ids, out, binding, first, head_start=head_start)
        cases.append(
            {
                "source": src.to_dict(),
                "wire": wire.to_dict(),
                "fingerprint": wire.fingerprint,
                "caches": [encode(each) for each in bits],
                "block_ids": ids,
                "head_start": head_start,
                "ticket_hash": binding.ticket_hash,
                "attempt": binding.attempt,
                "first_ordinal": first,
                "pages": encode(out),
                "digests": [f"{value:016x}" for value in dispatch.digests_to_ints(digests)],
            }
        )
    return {"cases": cases}


def _tags() -> dict[str, Any]:
    tags = _random(1, 1 << 62, (50,)) - (1 << 61)
    table = _random(2, 50, (6, 9)).to(torch.int32)
    expected = tags[table.long()]
    lengths = torch.tensor([9, 0, 5, 9, 1, 9], dtype=torch.int32)
    expected[0, 8] += 1
    expected[2, 5] += 1  # padding
    table[3, 2], table[3, 7] = -1, 50
    table[5, 0] = 2**31 - 1
    bad, first = dispatch.check_tags(tags, table, lengths, expected)
    names = ("page_tags", "block_table", "num_pages", "expected", "bad", "first_bad_column")
    values = (tags, table, lengths, expected, bad.to(torch.uint8), first)
    return {"cases": [{name: encode(value) for name, value in zip(names, values, strict=True)}]}


def _int4() -> dict[str, Any]:
    weight = (torch.randn(11, 128, generator=torch.Generator().manual_seed(3)) * 0.04).to(torch.bfloat16)
    weight[2, :32] = 0
    codes = _random(4, 256, (11, 128)).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    block_scale = torch.tensor([[0.0123]])
    cases = []
    for group, symmetric, grid in ((32, True, (1.0,)), (64, False, (1.0, 0.9, 0.8)), (128, True, (1.0, 0.85))):
        for values, scales in ((weight, None), (codes.view(torch.float8_e4m3fn), block_scale)):
            packed = dispatch.pack_int4(values, group, symmetric, grid, block_scale=scales)
            cases.append(
                {
                    "weight": encode(values.view(torch.int16) if scales is None else codes),
                    "block_scale": None if scales is None else encode(scales),
                    "group_size": group,
                    "symmetric": symmetric,
                    "clip_grid": list(grid),
                    "packed": encode(packed.packed),
                    "scale": encode(packed.scale.view(torch.int16)),
                    "zero_point": None if packed.zero_point is None else encode(packed.zero_point),
                    "unpacked": encode(dispatch.unpack_int4(*packed, group).view(torch.int16)),
                }
            )
    return {"cases": cases}


FILES: dict[str, Callable[[], dict[str, Any]]] = {"e4m3": _e4m3, "pages": _pages, "tags": _tags, "int4": _int4}


def text(name: str) -> str:
    """The content of a vector file, by the reference."""
    with dispatch.use_backend("reference"):
        return json.dumps(FILES[name](), indent=1) + "\n"


def write() -> list[Path]:
    FOLDER.mkdir(exist_ok=True)
    paths = []
    for name in FILES:
        path = FOLDER / f"{name}.json"
        path.write_text(text(name))
        paths.append(path)
    return paths


def verify(backend: str) -> list[str]:
    """What a CPU backend makes differently from the files; empty is good. `triton` needs the interpreter."""
    wrong: list[str] = []

    def compare(name: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape or not torch.equal(got.contiguous(), expected):
            wrong.append(f"{backend}: {name}")

    with dispatch.use_backend(backend):
        for case in _load("e4m3"):
            _verify_e4m3(case, compare)
        for i, case in enumerate(_load("pages")):
            gpu_cannot = any(case[side]["order"].startswith("cpu") for side in ("source", "wire"))
            if not (backend == "triton" and gpu_cannot):
                _verify_pages(i, case, compare)
        for case in _load("tags"):
            values = {name: decode(value) for name, value in case.items()}
            bad, first = dispatch.check_tags(
                *(values[n] for n in ("page_tags", "block_table", "num_pages", "expected"))
            )
            compare("tags: bad", bad.to(torch.uint8), values["bad"])
            compare("tags: first bad column", first, values["first_bad_column"])
        for i, case in enumerate(_load("int4")):
            _verify_int4(i, case, compare)
    return wrong


def _load(name: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())["cases"]
    return cases


Compare = Callable[[str, Tensor, Tensor], None]


def _verify_e4m3(case: dict[str, Any], compare: Compare) -> None:
    src = PageLayout(1, 128, 1, 256, _BF16, PageOrder.KV_PACKED)
    scales = (float(case["scale"]),)
    wire = src.with_dtype(_E4M3, rounding=Rounding(case["rounding"]), k_scales=scales, v_scales=scales)
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    out = torch.empty(1, wire.page_bytes, dtype=torch.uint8)
    dispatch.seal_pages([bits.view(src.cache_shape(1))], src, wire, [0], out, SealBinding(0, 0), 0)
    compare(f"e4m3 {case['rounding']} scale {case['scale']}", out[0], decode(case["codes"]))


def _verify_pages(i: int, case: dict[str, Any], compare: Compare) -> None:
    src, wire = PageLayout.from_dict(case["source"]), PageLayout.from_dict(case["wire"])
    caches = [decode(each).view(torch.bfloat16) for each in case["caches"]]
    expected = decode(case["pages"])
    out = torch.full_like(expected, 0xAA)
    binding = SealBinding(case["ticket_hash"], case["attempt"])
    digests = dispatch.seal_pages(
        caches, src, wire, case["block_ids"], out, binding, case["first_ordinal"], head_start=case["head_start"]
    )
    compare(f"pages {i}: bytes", out, expected)
    numbers = [int(value, 16) for value in case["digests"]]
    compare(f"pages {i}: digests", digests, torch.tensor([n - (n >> 63 << 64) for n in numbers]))
    if wire.fingerprint != case["fingerprint"]:
        compare(f"pages {i}: fingerprint {wire.fingerprint}", out[:0], out)
    cache_type = torch.bfloat16 if wire.dtype is _BF16 else torch.uint8
    targets = [torch.zeros(wire.cache_shape(len(out)), dtype=cache_type) for _ in range(wire.num_layers)]
    ids = list(range(len(out)))
    good = dispatch.open_pages(expected, wire, numbers, targets, wire, ids, binding, case["first_ordinal"])
    compare(f"pages {i}: verdicts", good, torch.ones(len(out), dtype=torch.bool))
    stacked = torch.stack([each.reshape(len(out), -1).view(torch.uint8) for each in targets], dim=1)
    compare(f"pages {i}: opened", stacked.reshape(len(out), -1), expected)


def _verify_int4(i: int, case: dict[str, Any], compare: Compare) -> None:
    weight, scales = decode(case["weight"]), case["block_scale"] and decode(case["block_scale"])
    weight = weight.view(torch.bfloat16 if scales is None else torch.float8_e4m3fn)
    packed = dispatch.pack_int4(weight, case["group_size"], case["symmetric"], case["clip_grid"], block_scale=scales)
    compare(f"int4 {i}: packed", packed.packed, decode(case["packed"]))
    compare(f"int4 {i}: scale", packed.scale.view(torch.int16), decode(case["scale"]))
    if packed.zero_point is not None:
        compare(f"int4 {i}: zero point", packed.zero_point, decode(case["zero_point"]))
    unpacked = dispatch.unpack_int4(*packed, case["group_size"])
    compare(f"int4 {i}: unpacked", unpacked.view(torch.int16), decode(case["unpacked"]))
