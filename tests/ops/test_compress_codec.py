"""Rows to INT4: errors against plain arithmetic, memory against its constant."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from synthetic_checkpoint import quantise_blocks

from ops.compress import codec
from ops.compress.verify import library_decode

pytestmark = pytest.mark.compiles  # in the workers

GRID = (1.0, 0.95, 0.9)


def rows_of(form: str, shape: tuple[int, int]) -> codec.Rows:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.03
    if form == "bf16":
        return codec.plain_rows(weight)
    return codec.Rows(*quantise_blocks(weight))


@pytest.mark.parametrize("form", ["bf16", "fp8"])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("shape", "group"), [((128, 256), 128), ((200, 192), 64), ((8, 96), 32)])
def test_errors_are_those_of_the_library_s_decoding(
    form: str, symmetric: bool, shape: tuple[int, int], group: int
) -> None:
    rows = rows_of(form, shape)
    packed = codec.pack_rows(rows, group, symmetric, GRID)
    weight = codec.dequantise(rows).double()
    decoded = library_decode(packed.packed, packed.scale, packed.zero_point, group)
    errors = codec.row_errors(rows, packed, group)
    assert errors.squared == pytest.approx((weight - decoded).square().sum(1).numpy(), rel=1e-5)
    assert errors.energy == pytest.approx(weight.square().sum(1).numpy(), rel=1e-6)
    assert errors.largest == pytest.approx(float((weight - decoded).abs().max()), rel=1e-5)
    assert 0.03 < np.sqrt(errors.squared.sum() / errors.energy.sum()) < 0.12
    assert errors.codes.sum() == -(-shape[0] // codec.CODE_ROWS) * shape[1]


def test_any_cut_by_rows_gives_the_same_codes_and_sums() -> None:
    rows = rows_of("fp8", (384, 256))
    assert rows.block_scale is not None
    whole = codec.pack_rows(rows, 64, False, GRID)
    sums = codec.row_errors(rows, whole, 64)
    for first in range(0, 384, 128):
        part = codec.Rows(rows.values[first : first + 128], rows.block_scale[first // 128 : first // 128 + 1])
        packed = codec.pack_rows(part, 64, False, GRID)
        assert whole.zero_point is not None
        assert packed.zero_point is not None
        assert torch.equal(packed.packed, whole.packed[first : first + 128])
        assert torch.equal(packed.zero_point, whole.zero_point[first // 8 : first // 8 + 16])
        assert np.array_equal(codec.row_errors(part, packed, 64).squared, sums.squared[first : first + 128])


MEASURE = """
import torch, numpy as np
from ops.compress import codec
from ops.compress.worker import status_bytes
torch.set_num_threads(1)
fp8 = codec.Rows(torch.ones(128, 128).to(torch.float8_e4m3fn), torch.ones(1, 1))
plain = codec.plain_rows(torch.ones(128, 128))
for rows in (plain, fp8):
    codec.row_errors(rows, codec.pack_rows(rows, 128, True, (1.0,)), 128)
    codec.dequantise(rows)
count = 8 << 20
base = status_bytes("VmRSS")
data = np.full(count, 56, np.uint8)
rows = codec.Rows(codec.as_tensor(data, "F8_E4M3", (1024, 8192)), torch.ones(8, 64))
codec.as_bytes(codec.dequantise(rows).bfloat16())
del data, rows
data = np.full(count * 4, 60, np.uint8)
rows = codec.plain_rows(codec.as_tensor(data, "F32", (1024, 8192)))
codec.row_errors(rows, codec.pack_rows(rows, 128, True, (1.0,)), 128)
print((status_bytes("VmHWM") - base) / count)
"""


def test_a_weight_in_work_costs_no_more_memory_than_we_plan_for() -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    assert 4.0 < float(done.stdout) < codec.WORKING_BYTES_PER_WEIGHT
