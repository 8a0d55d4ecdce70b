"""Ahead-of-time compilation of every Triton kernel in every configuration it ships with, without a GPU.

For each kernel, architecture and configuration: registers, spilled bytes, shared memory, and how wide its global loads
and stores are, from ptxas. Spills are an error: these kernels move memory, and a spill is memory they should not move.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.layout import PageDtype, PageLayout, PageOrder, Rounding

ARCHS = {"sm_90": 90, "sm_100": 100}


@dataclass(frozen=True)
class Config:
    """One kernel as it is launched: pointer and scalar types by argument name, compile-time values, warps."""

    kernel: str
    name: str
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int


@dataclass(frozen=True)
class Usage:
    kernel: str
    arch: str
    config: str
    registers: int
    spills: int
    shared_bytes: int
    load_bytes: int
    store_bytes: int
    native_e4m3: bool

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _kv(page_tokens: int, heads: int, dim: int) -> PageLayout:
    return PageLayout(1, page_tokens, heads, dim, PageDtype.BF16, PageOrder.KV_PACKED)


_MLA = PageLayout(1, 64, 1, 576, PageDtype.BF16, PageOrder.MLA)
_DS_MLA = PageLayout(1, 64, 1, 576, PageDtype.E4M3, PageOrder.FP8_DS_MLA)
_INDEX_KEYS = PageLayout(1, 64, 1, 132, PageDtype.UINT8, PageOrder.BYTES)
_E4M3 = PageDtype.E4M3

SHAPES: dict[str, PageLayout] = {
    # A GQA model of 8 heads of 128 on 8, 1 GPUs; the demo model; MLA of DeepSeek, Kimi and GLM.
    "kv16-h1-d128": _kv(16, 1, 128),
    "kv64-h8-d128": _kv(64, 8, 128),
    "kv128-h3-d64": _kv(128, 3, 64),
    "mla64": _MLA,
}


def configs() -> Iterator[Config]:
    """Every configuration that `kernels.triton_backend` launches for the shapes above."""
    from kernels import triton_backend as backend

    yield from _page_configs(backend)
    yield Config(
        "check_tags",
        "all",
        {
            "tags": "*i64", "table": "*i32", "seq_lens": "*i32", "expected": "*i64", "slots": "*i32",
            "query_start": "*i32", "slot_mapping": "*i64", "firsts": "*i32", "founds": "*i32", "page_tokens": "i32",
            "limit": "i32", "columns": "i32", "table_columns": "i32", "table_stride": "i32",
            "expected_stride": "i32", "num_slots": "i32",
        },
        {"BLOCK": backend.TAG_COLUMNS},
        8,
    )  # fmt: skip
    for group in (32, 64, 128):
        for symmetric in (True, False):
            yield from _weight_configs(backend, group, symmetric)


def _page_configs(backend: Any) -> Iterator[Config]:
    for shape, src in SHAPES.items():
        fp8 = src.with_dtype(_E4M3)
        truncated = src.with_dtype(_E4M3, rounding=Rounding.TRUNCATE)
        scaled = src.with_dtype(_E4M3, k_scales=(0.3,), v_scales=(1.0,) if src.order.is_latent else (0.3,))
        pairs = [
            ("bf16-copy", src, src, src.page_tokens, True),
            ("e4m3-copy", fp8, fp8, src.page_tokens, True),
            ("nearest", src, fp8, src.page_tokens, True),
            ("nearest-scaled", src, scaled, src.page_tokens, True),
            ("nearest-repage", src, fp8, 2 * src.page_tokens, True),
            ("nearest-integer", src, fp8, src.page_tokens, False),
            ("truncate", src, truncated, src.page_tokens, False),
        ]
        if src.num_kv_heads > 1:
            by_head = tuple(0.1 * (head + 1) for head in range(src.num_kv_heads))
            pairs.append(("nearest-by-head", src, src.with_dtype(_E4M3, k_scales=by_head), src.page_tokens, True))
        for how, source, wire, src_tokens, native in pairs:
            yield _seal(backend, f"{shape}-{how}", source, wire, src_tokens, native)
        for dtype, wire in (("bf16", src), ("e4m3", fp8)):
            yield _digest(backend, f"{shape}-{dtype}", wire)
            yield _scatter(backend, f"{shape}-{dtype}", wire, wire.page_tokens)
        yield _scatter(backend, f"{shape}-e4m3-repage", fp8, 2 * fp8.page_tokens)
        yield from _small(backend, shape, src.page_tokens)
    for name, copied in (("ds-mla", _DS_MLA), ("index-keys", _INDEX_KEYS)):
        yield _seal(backend, f"{name}-copy", copied, copied, backend._tokens(copied), True)
        yield _digest(backend, name, copied)
        yield _scatter(backend, name, copied, backend._tokens(copied))
    for native in (True, False):
        yield Config(
            "seal_ds_mla",
            "native" if native else "integer",
            {
                "caches": "*i64", "ids": "*i64", "out": "*u8", "stride_block": "i32", "stride_token": "i32",
                "num_ids": "i32", "num_blocks": "i32", "out_stride": "i32",
            },
            {"SRC_TOKENS": 64, "WIRE_TOKENS": 64, "NATIVE": native},
            4,
        )  # fmt: skip


def _seal(backend: Any, name: str, src: PageLayout, wire: PageLayout, src_tokens: int, native: bool) -> Config:
    how, exact, *_ = backend._codec(src.dtype, wire, "cpu")
    types = {
        "caches": "*i64", "ids": "*i64", "out": "*u8", "sums": "*i64", "k_scales": "*fp32", "v_scales": "*fp32",
        "seeds": "*i64", "keys": "*i32", "stride_block": "i32", "stride_head": "i32", "stride_token": "i32",
        "num_ids": "i32", "num_blocks": "i32", "out_stride": "i32", "num_layers": "i32",
    }  # fmt: skip
    constants = {
        "SRC_TOKENS": src_tokens, "WIRE_TOKENS": backend._tokens(wire), "ROW": backend._row(wire),
        "LATENT": wire.order.is_latent, "LAYER_BYTES": wire.layer_page_bytes, "SRC_TYPE": backend._type(src),
        "HOW": how, "EXACT": exact, "NATIVE": native, "HEADS": backend._scale_heads(wire),
        "NB": backend.BLOCKS_PER_PROGRAM,
    }  # fmt: skip
    return Config("seal", name, types, constants, 4)


def _digest(backend: Any, name: str, wire: PageLayout) -> Config:
    types = {"pages": "*u8", "sums": "*i64", "seeds": "*i64", "keys": "*i32", "stride": "i32", "num_layers": "i32"}
    constants = {"LAYER_BYTES": wire.layer_page_bytes, "NB": backend.BLOCKS_PER_PROGRAM}
    return Config("digest", name, types, constants, 4)


def _scatter(backend: Any, name: str, wire: PageLayout, cache_tokens: int) -> Config:
    types = {
        "pages": "*u8", "good": "*i8", "caches": "*i64", "ids": "*i64", "stride": "i32", "stride_block": "i32",
        "stride_head": "i32", "stride_token": "i32", "num_ids": "i32", "num_layers": "i32",
    }  # fmt: skip
    constants = {
        "CACHE_TOKENS": cache_tokens, "WIRE_TOKENS": backend._tokens(wire), "ROW": backend._row(wire),
        "LATENT": wire.order.is_latent, "LAYER_BYTES": wire.layer_page_bytes, "TYPE": backend._type(wire),
        "BLOCK": backend.SCATTER_VALUES,
    }  # fmt: skip
    return Config("scatter", name, types, constants, 8)


def _small(backend: Any, shape: str, tokens: int) -> Iterator[Config]:
    """The one-program-a-page kernels."""
    pages = {"sums": "*i64", "seeds": "*i64"}
    fits = {"ids": "*i64", "num_ids": "i32", "num_blocks": "i32"}
    sizes = {"CACHE_TOKENS": tokens, "WIRE_TOKENS": tokens, "SPAN": backend._span(tokens, tokens)}
    yield Config("finish_seal", shape, {**pages, **fits}, sizes, 1)
    yield Config("judge", shape, {**pages, "digests": "*i64", "good": "*i8", **fits}, sizes, 1)
    if shape == "mla64":
        yield Config("finish_digest", "all", pages, {}, 1)


def _weight_configs(backend: Any, group: int, symmetric: bool) -> Iterator[Config]:
    name = f"g{group}-{'symmetric' if symmetric else 'asymmetric'}"
    for fp8 in (False, True):
        for ratios in (1, 4):
            yield Config(
                "pack",
                f"{name}-{'fp8' if fp8 else 'bf16'}-{ratios}",
                {
                    "weight": "*u8" if fp8 else "*u16", "block_scale": "*fp32" if fp8 else "*bf16", "ratios": "*fp32",
                    "packed": "*i32", "scale": "*u16", "zeros": "*i8", "weight_stride": "i32", "scale_stride": "i32",
                    "num_groups": "i32", "groups_per_row": "i32",
                },
                {
                    "G": group, "SYMMETRIC": symmetric, "FP8": fp8, "NUM_RATIOS": ratios,
                    "TILE": backend.PACK_VALUES // group,
                },
                4,
            )  # fmt: skip
    yield Config(
        "unpack",
        name,
        {
            "packed": "*i32", "scale": "*u16", "zero_point": "*i32", "out": "*u16", "num_words": "i32",
            "words_per_row": "i32",
        },
        {"G": group, "SYMMETRIC": symmetric, "BLOCK": backend.UNPACK_WORDS},
        4,
    )  # fmt: skip


def compile_one(config: Config, arch: str) -> Usage:
    """Raises `triton.CompilationError` and the like if the kernel does not compile for this architecture."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernels import triton_int4, triton_pages

    module = triton_int4 if config.kernel in ("pack", "unpack") else triton_pages
    function = getattr(module, config.kernel)
    names = function.arg_names
    if set(names) != set(config.types) | set(config.constants):
        raise ValueError(f"configuration of {config.kernel} does not match its arguments {names}")
    signature = {name: config.types.get(name, "constexpr") for name in names}
    # What the launcher finds: all pointers, and the strides of whole pages, are multiples of 16.
    aligned = [
        i
        for i, name in enumerate(names)
        if signature[name].startswith("*") or ("stride" in name and "expected" not in name)
    ]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(function, signature, constexprs=config.constants, attrs=attributes)
    options = {"num_warps": config.num_warps, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", ARCHS[arch], 32), options=options)
    ptx = built.asm["ptx"]
    registers, spills = _resources(ptx, arch)
    return Usage(
        config.kernel,
        arch,
        config.name,
        registers,
        spills,
        int(built.metadata.shared),
        _widest(ptx, "ld"),
        _widest(ptx, "st"),
        "e4m3x2" in ptx,
    )


def compile_all(archs: list[str], only: str = "") -> Iterator[Usage]:
    """Configurations whose `kernel config` contains `only`."""
    for config in configs():
        if only in f"{config.kernel} {config.name}":
            for arch in archs:
                yield compile_one(config, arch)


def _resources(ptx: str, arch: str) -> tuple[int, int]:
    """(registers, bytes of spill loads and stores), from the ptxas that Triton uses, with Triton's options."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [get_ptxas(ARCHS[arch]).path, "-v", "--fmad=false", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={target.group(1)}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", done.stderr)
    if done.returncode or registers is None or not spills:
        raise RuntimeError(f"ptxas failed ({done.returncode}) or says neither registers nor spills:\n{done.stderr}")
    return int(registers.group(1)), sum(map(int, spills))


def _widest(ptx: str, what: str) -> int:
    """Bytes of the widest global load or store."""
    sizes = [
        int(count or 1) * int(bits) // 8
        for count, bits in re.findall(rf"{what}\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", ptx)
    ]
    return max(sizes, default=0)
