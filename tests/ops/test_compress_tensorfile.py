"""Reading and writing safetensors by offset, held against the public library."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ops.compress.codec import as_bytes
from ops.compress.tensorfile import OutTensor, TensorFileWriter, layout, read_bytes, read_header


def test_what_we_write_is_what_the_library_reads(tmp_path: Path) -> None:
    tensors = {
        "a.weight_scale": torch.randn(4, 3).bfloat16(),
        "a.weight_shape": torch.tensor([4, 96]),
        "a.weight_packed": torch.randint(-(2**31), 2**31 - 1, (4, 12), dtype=torch.int32),
        "bias": torch.randn(5),
        "scalar": torch.tensor(2.5),
    }
    codes = {torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.float32: "F32"}
    outputs = [OutTensor(name, codes[value.dtype], tuple(value.shape)) for name, value in tensors.items()]
    path = tmp_path / "x.safetensors"
    with path.open("w+b", buffering=0) as file:
        writer = TensorFileWriter(file, outputs)
        for name, value in tensors.items():  # interleaved halves, as a streaming packer does
            data = as_bytes(value)
            writer.append(name, data[: data.nbytes // 2])
        for name, value in tensors.items():
            data = as_bytes(value)
            writer.append(name, data[data.nbytes // 2 :])
        writer.finish()
    assert path.stat().st_size == writer.nbytes
    with safe_open(str(path), framework="pt") as opened:
        assert set(opened.keys()) == set(tensors)
        for name, value in tensors.items():
            assert torch.equal(opened.get_tensor(name), value), name
    refs, _ = read_header(path)
    item = {"I64": 8, "I32": 4, "F32": 4, "BF16": 2}
    assert all(ref.start % item[ref.dtype] == 0 for ref in refs)


def test_any_rows_of_a_library_file(tmp_path: Path) -> None:
    weight = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    path = tmp_path / "x.safetensors"
    save_file({"z": torch.ones(3), "w": weight}, path)
    refs, _ = read_header(path)
    (ref,) = (ref for ref in refs if ref.name == "w")
    fd = os.open(path, os.O_RDONLY)
    try:
        rows = read_bytes(fd, ref.start + 2 * ref.row_bytes, 3 * ref.row_bytes)
        assert np.array_equal(rows.view(np.float32).reshape(3, 5), weight[2:5].numpy())
        with pytest.raises(EOFError, match="changed while being read"):
            read_bytes(fd, path.stat().st_size - 4, 8)
    finally:
        os.close(fd)


def test_a_tensor_not_filled_is_a_bug_and_not_a_file(tmp_path: Path) -> None:
    with (tmp_path / "x").open("w+b", buffering=0) as file:
        writer = TensorFileWriter(file, [OutTensor("a", "F32", (4,))])
        writer.append("a", b"\0" * 12)
        with pytest.raises(AssertionError, match="not filled"):
            writer.finish()
        with pytest.raises(AssertionError, match="overruns"):
            writer.append("a", b"\0" * 8)


def _write(path: Path, header: dict[str, object], data: bytes) -> Path:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"\0" * 4, "was cut"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"\0" * 4, "takes 8 bytes, not 4"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8, "begins at"),
        ({"a": {"dtype": "X9", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4, "dtype X9"),
    ],
)
def test_damaged_headers_are_named(tmp_path: Path, header: dict[str, object], data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_header(_write(tmp_path / "x.safetensors", header, data))


def test_a_header_longer_than_the_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="does not fit"):
        read_header(path)
    path.write_bytes((2).to_bytes(8, "little") + b"{!")
    with pytest.raises(ValueError, match="not JSON"):
        read_header(path)


def test_layout_prefix_is_aligned() -> None:
    prefix, offsets = layout([OutTensor("b", "BF16", (3,)), OutTensor("s", "I64", (2,))])
    assert len(prefix) % 8 == 0
    assert offsets == {"s": len(prefix), "b": len(prefix) + 16}
