"""Lines of 64 bytes, spelled out as 512-bit vector instructions: read, convert, write and hash in one pass.

LLVM by itself picks half the width and keeps conversion, digest and store in loops of their own. Where the CPU has
narrower vectors, LLVM splits these operations; the bytes are the same everywhere.

An encoder turns 32 BF16 values (16-bit lanes) into 32 e4m3 codes without tables, branches or wider lanes:

    magnitude m = x without its sign; d = min(m, 448) - 2^-11, never below 0, in units of the BF16 pattern
    normal      (d << 4) - 8192: the code in 1/256, because an e4m3 step is 16 BF16 steps wide
    subnormal   the significand, shifted right by what is missing to the exponent of 2^-6
    code        the larger of both (they are equal at 2^-6), rounded to whole codes

A scale that is a power of two moves the constants. For another scale the value is scaled in float32 and cut to BF16
with the lost bits gathered in the last one, which no rounding to four significant bits can tell from the value.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.digest import BLOCK_BYTES, GOLDEN, MIX_A, MIX_B

_WORD, _NUMBER, _HALF, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_WORDS, _NUMBERS = ir.VectorType(_WORD, 8), ir.VectorType(_NUMBER, 16)
_YMM = ir.VectorType(_BYTE, 32)
_FLOATS, _HALVES, _BYTES = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_HALF, 32), ir.VectorType(_BYTE, 64)

COPY, TRUNCATE_SHIFT, NEAREST_SHIFT, TRUNCATE, NEAREST_PRODUCT, NEAREST = range(6)
"""How a value becomes bytes. COPY: as it is. SHIFT: 1 / scale is a power of two. TRUNCATE, NEAREST_PRODUCT: multiplied
with 1 / scale in float32. NEAREST: divided by the scale."""

TOP, FLOOR = 0x43E0, 0x3C80 - 5 * 128
"""BF16 patterns of 448 and 2^-11; for a scale of 2^-k both less 128 k."""

_FEATURES = llvm.get_host_cpu_features()
NO_SHIFTS = bool(_FEATURES.get("avx2")) and not _FEATURES.get("avx512bw")  # of 16-bit lanes, each by its own count


class _Lines:
    """Shorthand over an IR builder."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def call(self, name: str, result: Any, *arguments: Any) -> Any:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), arguments)

    def load(self, address: Any, kind: Any, align: int) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=align)

    def at(self, base: Any, index: Any, step: int, more: int = 0) -> Any:
        offset = self.builder.mul(index, ir.Constant(_WORD, step))
        return self.builder.add(base, self.builder.add(offset, ir.Constant(_WORD, more)))

    def spread(self, value: Any, kind: Any) -> Any:
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_NUMBER, 0))
        return self.builder.shuffle_vector(
            first, first, ir.Constant(ir.VectorType(_NUMBER, kind.count), [0] * kind.count)
        )

    def codes_in_256ths(self, magnitude: Any, top: Any, floor: Any) -> Any:
        b = self.builder
        least = self.call("llvm.umin.v32i16", _HALVES, magnitude, top)
        d = self.call("llvm.usub.sat.v32i16", _HALVES, least, floor)
        wide = b.shl(d, _all(_HALVES, 4))
        if NO_SHIFTS:
            normal = self.call("llvm.usub.sat.v32i16", _HALVES, wide, _all(_HALVES, 8192))
            return self.call("llvm.umax.v32i16", _HALVES, b.lshr(self.shifted(d), _all(_HALVES, 1)), normal)
        significand = b.or_(b.and_(wide, _all(_HALVES, 0x7F0)), _all(_HALVES, 0x800))
        right = self.call("llvm.usub.sat.v32i16", _HALVES, _all(_HALVES, 5), b.lshr(d, _all(_HALVES, 7)))
        normal = self.call("llvm.usub.sat.v32i16", _HALVES, wide, _all(_HALVES, 8192))
        return self.call("llvm.umax.v32i16", _HALVES, b.lshr(significand, right), normal)

    def shifted(self, d: Any) -> Any:
        """The significand in 16ths, shifted left by the exponent: looked up as a factor, since AVX2 shifts no 16-bit
        lane by its own count. From exponent 6 on the factor is of no account: the normal code is larger."""
        b = self.builder
        significand = b.or_(b.and_(d, _all(_HALVES, 0x7F)), _all(_HALVES, 0x80))
        exponent = b.lshr(d, _all(_HALVES, 7))
        factors = ir.Constant(_YMM, [1 << i if i < 6 else 0 for i in range(16)] * 2)
        halves = []
        for first in (0, 32):
            part = ir.Constant(ir.VectorType(_NUMBER, 32), list(range(first, first + 32)))
            values, which = (
                b.shuffle_vector(b.bitcast(x, _BYTES), b.bitcast(x, _BYTES), part) for x in (significand, exponent)
            )
            factor = self.call("llvm.x86.avx2.pshuf.b", _YMM, factors, which)
            halves.append(self.call("llvm.x86.avx2.pmadd.ub.sw", ir.VectorType(_HALF, 16), values, factor))
        return b.shuffle_vector(*halves, ir.Constant(ir.VectorType(_NUMBER, 32), list(range(32))))

    def nearest(self, x: Any, top: Any, floor: Any) -> Any:
        b = self.builder
        magnitude = b.and_(x, _all(_HALVES, 0x7FFF))
        code = self.codes_in_256ths(magnitude, top, floor)
        odd = b.and_(b.lshr(code, _all(_HALVES, 8)), _all(_HALVES, 1))
        code = b.add(b.add(code, _all(_HALVES, 0x7F)), odd)
        code = b.lshr(b.or_(code, b.and_(x, _all(_HALVES, 0x8000))), _all(_HALVES, 8))
        return b.select(b.icmp_unsigned(">", magnitude, _all(_HALVES, 0x7F80)), _all(_HALVES, 0x7F), code)

    def truncate(self, x: Any, top: Any, floor: Any) -> Any:
        b = self.builder
        magnitude = b.and_(x, _all(_HALVES, 0x7FFF))
        code = self.codes_in_256ths(magnitude, top, floor)
        # Neither zero nor NaN: those lose the sign.
        signed = b.icmp_unsigned("<", b.sub(magnitude, _all(_HALVES, 1)), _all(_HALVES, 0x7F80))
        sign = b.select(signed, b.and_(x, _all(_HALVES, 0x8000)), _all(_HALVES, 0))
        return b.lshr(b.or_(code, sign), _all(_HALVES, 8))

    def scaled(self, x: Any, scale: Any, how: int) -> Any:
        """BF16 lanes, scaled in float32, as BF16 lanes whose last bit also stands for all that was cut."""
        b = self.builder
        pairs, cut = b.bitcast(x, _NUMBERS), _all(_NUMBERS, 0xFFFF)
        out = []
        for bits in (b.shl(pairs, _all(_NUMBERS, 16)), b.and_(pairs, _all(_NUMBERS, 0xFFFF0000))):
            value = b.bitcast(bits, _FLOATS)
            value = b.fdiv(value, scale) if how == NEAREST else b.fmul(value, scale)
            if how == TRUNCATE:
                value = self.writers_rounding(value)
            bits = b.bitcast(value, _NUMBERS)
            lost = self.call("llvm.umin.v16i32", _NUMBERS, b.and_(bits, cut), _all(_NUMBERS, 1))
            out.append(b.or_(b.lshr(bits, _all(_NUMBERS, 16)), lost))
        return b.bitcast(b.or_(out[0], b.shl(out[1], _all(_NUMBERS, 16))), _HALVES)

    def writers_rounding(self, value: Any) -> Any:
        """`Rounding.TRUNCATE` below 2^-6: nearest even at 2^-29, where adding 2^-6 ends. The sign and zero stay."""
        b = self.builder
        bits = b.bitcast(value, _NUMBERS)
        sign, magnitude = b.and_(bits, _all(_NUMBERS, 0x80000000)), b.and_(bits, _all(_NUMBERS, 0x7FFFFFFF))
        edge = _all(_FLOATS, 2.0**-6)
        rounded = b.fsub(b.fadd(b.bitcast(magnitude, _FLOATS), edge), edge)
        # What rounds to zero is not zero: it keeps its sign, as the least subnormal does.
        least = self.call("llvm.umin.v16i32", _NUMBERS, magnitude, _all(_NUMBERS, 1))
        small = b.or_(b.bitcast(rounded, _NUMBERS), least)
        is_small = b.icmp_unsigned("<", magnitude, _all(_NUMBERS, 0x3C800000))
        return b.bitcast(b.or_(sign, b.select(is_small, small, magnitude)), _FLOATS)

    def codes(self, x: Any, top: Any, floor: Any, scale: Any, how: int) -> Any:
        if how not in (TRUNCATE_SHIFT, NEAREST_SHIFT):
            x = self.scaled(x, scale, how)
        return (self.truncate if how in (TRUNCATE_SHIFT, TRUNCATE) else self.nearest)(x, top, floor)

    def joined(self, low: Any, high: Any) -> Any:
        """Twice 32 codes in 16-bit lanes -> 64 bytes, as words."""
        b = self.builder
        even = ir.Constant(ir.VectorType(_NUMBER, 64), list(range(0, 128, 2)))
        return b.bitcast(b.shuffle_vector(b.bitcast(low, _BYTES), b.bitcast(high, _BYTES), even), _WORDS)

    def products(self, words: Any, keys: Any, index: Any) -> list[Any]:
        """Eight products of S1, eight of S2; `keys`: where the keys of line 0 are, in `expanded_keys()`."""
        b, low = self.builder, _all(_WORDS, 0xFFFFFFFF)
        high = b.lshr(words, _all(_WORDS, 32))
        out = []
        for first in (0, 2):
            one, two = (self.load(self.at(keys, index, 64, k * BLOCK_BYTES), _WORDS, 8) for k in (first, first + 1))
            out.append(b.mul(b.and_(b.add(words, one), low), b.and_(b.add(high, two), low)))
        return out

    def write(self, words: Any, target: Any, index: Any, stream: bool) -> None:
        place = self.builder.inttoptr(self.at(target, index, 64), _WORDS.as_pointer())
        store = self.builder.store(words, place, align=64 if stream else 16)
        if stream:  # past the cache: not read again by this core, and not fetched before it is written
            store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(_NUMBER, 1)]))

    def prefetch(self, address: Any) -> None:
        """Into the second level, which has more reads on their way than the first. A wrong address does nothing."""
        flags = [ir.Constant(_NUMBER, flag) for flag in (0, 2, 1)]
        self.call("llvm.prefetch.p0", ir.VoidType(), self.builder.inttoptr(address, _BYTE.as_pointer()), *flags)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)


class _Pass(_Lines):
    """One way through lines: how they are converted, whether they are written, and where to."""

    def __init__(self, builder: Any, how: int, write: bool, stream: bool, top: Any, floor: Any, scale: Any) -> None:
        super().__init__(builder)
        self.how, self.writes, self.stream = how, write, stream
        self.width = 64 if how == COPY else 128  # bytes of the source that become a line
        self.top, self.floor = (self.spread(builder.trunc(each, _HALF), _HALVES) for each in (top, floor))
        self.scale = self.spread(scale, _FLOATS)

    def sums(self, source: Any, target: Any, keys: Any, lines: Any, ahead: Any) -> list[Any]:
        """[part of S1, part of S2] of `lines` lines; see `_line_pass`."""
        b = self.builder
        sums = [cgutils.alloca_once(b, _WORDS) for _ in range(2)]
        for total in sums:
            b.store(_all(_WORDS, 0), total)
        with cgutils.for_range(b, lines) as loop:
            i = loop.index
            starts = range(0, self.width, 64)
            for more in starts:
                self.prefetch(self.at(ahead, i, self.width, more))
            kind = _WORDS if self.how == COPY else _HALVES
            parts = [self.load(self.at(source, i, self.width, more), kind, 16) for more in starts]
            words = parts[0]
            if self.how != COPY:
                words = self.joined(*(self.codes(part, self.top, self.floor, self.scale, self.how) for part in parts))
            if self.writes:
                self.write(words, target, i, self.stream)
            for total, product in zip(sums, self.products(words, keys, i), strict=True):
                b.store(b.add(b.load(total), product), total)
        return [self.call("llvm.vector.reduce.add.v8i64", _WORD, b.load(total)) for total in sums]

    def mix(self, x: Any) -> Any:
        b = self.builder
        for bits, factor in ((30, MIX_A), (27, MIX_B)):
            x = b.mul(b.xor(x, b.lshr(x, ir.Constant(_WORD, bits))), ir.Constant(_WORD, factor))
        return b.xor(x, b.lshr(x, ir.Constant(_WORD, 31)))


def _line_pass(how: int, write: bool) -> Any:
    @intrinsic
    def lines_pass(
        typingctx: Any, source: Any, target: Any, keys: Any, lines: Any, ahead: Any, top: Any, floor: Any, scale: Any
    ) -> Any:
        """(part of S1, part of S2) of `lines` lines, which are written to `target` where the pass writes.

        source, target: multiples of 16; keys: address of the keys of the first line; ahead: address of what is read
        next, brought in at the rate of the source.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sums = _Pass(builder, how, write, False, *args[5:]).sums(*args[:5])
            return context.make_tuple(builder, signature.return_type, sums)

        return types.UniTuple(types.uint64, 2)(*[types.uint64] * 7, types.float32), generate

    return lines_pass


def _block_pass(how: int, write: bool, stream: bool = False) -> Any:
    @intrinsic
    def blocks_pass(
        typingctx: Any, source: Any, target: Any, keys: Any, lines: Any, ahead: Any, position: Any, seed: Any, top: Any,
        floor: Any, scale: Any,
    ) -> Any:  # fmt: skip
        """The sum of the hashes of the blocks that `lines` lines are; only the last block may be short.

        As `_line_pass`; position: of the first block, from 1. Where the stores stream, target is a multiple of 64.
        """

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            source, target, keys, lines, ahead, position, seed = args[:7]
            make = _Pass(builder, how, write, stream, *args[7:])
            per = ir.Constant(_WORD, BLOCK_BYTES // 64)
            blocks = builder.udiv(builder.add(lines, ir.Constant(_WORD, BLOCK_BYTES // 64 - 1)), per)
            total = cgutils.alloca_once(builder, _WORD)
            builder.store(ir.Constant(_WORD, 0), total)
            with cgutils.for_range(builder, blocks) as loop:
                left = builder.sub(lines, builder.mul(loop.index, per))
                count = builder.select(builder.icmp_unsigned("<", left, per), left, per)
                starts = [
                    make.at(base, loop.index, BLOCK_BYTES // 64 * width)
                    for base, width in ((source, make.width), (target, 64), (ahead, make.width))
                ]
                s1, s2 = make.sums(starts[0], starts[1], keys, count, starts[2])
                place = builder.mul(builder.add(position, loop.index), ir.Constant(_WORD, GOLDEN))
                hashed = make.mix(builder.xor(s2, make.mix(builder.add(builder.add(s1, seed), place))))
                builder.store(builder.add(builder.load(total), hashed), total)
            return builder.load(total)

        return types.uint64(*[types.uint64] * 9, types.float32), generate

    return blocks_pass


def _plain_copy(stream: bool) -> Any:
    @intrinsic
    def copy(typingctx: Any, source: Any, target: Any, lines: Any, ahead: Any) -> Any:
        """Copies lines; arguments as in `_line_pass`."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            make, (source, target, lines, ahead) = _Lines(builder), args
            with cgutils.for_range(builder, lines) as loop:
                make.prefetch(make.at(ahead, loop.index, 64))
                make.write(make.load(make.at(source, loop.index, 64), _WORDS, 16), target, loop.index, stream)
            return context.get_dummy_value()

        return types.void(*[types.uint64] * 4), generate

    return copy


@intrinsic
def fence(typingctx: Any) -> Any:
    """Streamed stores are seen by others before what follows."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


plain_copy, stream_plain = _plain_copy(False), _plain_copy(True)
hash_lines, hash_blocks = _line_pass(COPY, write=False), _block_pass(COPY, write=False)

copy_lines = _line_pass(COPY, True)
truncate_shift_lines = _line_pass(TRUNCATE_SHIFT, True)
nearest_shift_lines = _line_pass(NEAREST_SHIFT, True)
truncate_lines = _line_pass(TRUNCATE, True)
nearest_product_lines = _line_pass(NEAREST_PRODUCT, True)
nearest_lines = _line_pass(NEAREST, True)

copy_blocks, stream_copy = _block_pass(COPY, True), _block_pass(COPY, True, stream=True)
truncate_shift_blocks, stream_truncate_shift = (_block_pass(TRUNCATE_SHIFT, True, each) for each in (False, True))
nearest_shift_blocks, stream_nearest_shift = (_block_pass(NEAREST_SHIFT, True, each) for each in (False, True))
truncate_blocks = _block_pass(TRUNCATE, True)
nearest_product_blocks = _block_pass(NEAREST_PRODUCT, True)
nearest_blocks = _block_pass(NEAREST, True)
