"""A Hugging Face checkpoint as it lies on disk: config, tensors by name, block-scaled FP8 pairs, other files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ops.compress.tensorfile import TensorRef, read_header

SCALE_SUFFIX = "_scale_inv"
FP8_BLOCK = 128  # both sides of the square of weights that shares one scale
INDEX_NAME = "model.safetensors.index.json"
# Weights in other forms beside the safetensors ones: never copied, they would be loaded in place of ours.
FOREIGN_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """One opened checkpoint. `tensors` keeps the order of files and of bytes within them, so that a walk is
    a sequential read; `fingerprint` names its content by sizes, times and headers without reading weights."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorRef]
    fingerprint: str
    tokenizer_sha256: str
    other_files: tuple[Path, ...] = field(repr=False)

    @cached_property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of the config (multimodal models nest it)."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def model_type(self) -> str:
        return str(self.text_config.get("model_type", self.config.get("model_type", "")))

    @cached_property
    def quantization_config(self) -> dict[str, Any] | None:
        found = self.config.get("quantization_config") or self.text_config.get("quantization_config")
        return found if isinstance(found, dict) else None

    @property
    def tied(self) -> bool:
        return bool(self.config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings", False)))

    @property
    def nbytes(self) -> int:
        return sum(ref.nbytes for ref in self.tensors.values())

    def scale_of(self, ref: TensorRef) -> TensorRef | None:
        """The block scales of an FP8 weight, None for any other tensor. ValueError when they are missing."""
        if ref.dtype != "F8_E4M3":
            return None
        scale = self.tensors.get(ref.name + SCALE_SUFFIX)
        if scale is None:
            raise ValueError(
                f"{ref.name} is FP8 but {ref.name + SCALE_SUFFIX} is not in {self.path}: only block-scaled FP8 "
                "(DeepSeek/GLM form) can be read; convert the checkpoint to BF16 first"
            )
        block = (self.quantization_config or {}).get("weight_block_size") or [FP8_BLOCK, FP8_BLOCK]
        if list(block) != [FP8_BLOCK, FP8_BLOCK]:
            raise ValueError(
                f"{self.path}/config.json: weight_block_size {block}; only 128 x 128 blocks are understood"
            )
        expected = tuple(-(-size // FP8_BLOCK) for size in ref.shape)
        if len(ref.shape) != 2 or scale.shape != expected or scale.dtype not in ("F32", "BF16"):
            raise ValueError(
                f"{scale.name} is {scale.dtype} {list(scale.shape)}; a weight of {list(ref.shape)} in blocks of "
                f"128 x 128 needs F32 or BF16 {list(expected)}"
            )
        return scale


def _shard_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    index = path / INDEX_NAME
    if index.exists():
        weight_map: dict[str, str] = json.loads(index.read_text())["weight_map"]
        files = [path / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise ValueError(f"{index} names {len(missing)} files that are not there: {', '.join(missing[:3])}")
        return files, weight_map
    files = sorted(path.glob("*.safetensors"))
    if len(files) > 1:
        raise ValueError(f"{path} has {len(files)} safetensors files and no {INDEX_NAME}; download the index too")
    return files, None


def _hash_files(paths: Iterator[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        if path.exists():
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads config and headers only. ValueError names the file and what is wrong with it."""
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ValueError(f"{path} has no config.json: a Hugging Face checkpoint folder is needed")
    config = json.loads(config_file.read_text())
    files, weight_map = _shard_files(path)
    if not files:
        raise ValueError(f"{path} has no .safetensors file; convert other weight forms to safetensors first")
    tensors: dict[str, TensorRef] = {}
    digest = hashlib.sha256(config_file.read_bytes())
    for file in files:
        refs, raw = read_header(file)
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode() + raw)
        for ref in refs:
            if weight_map is not None and weight_map.get(ref.name) != file.name:
                continue  # an index may leave out tensors that a file still holds
            if ref.name in tensors:
                raise ValueError(f"tensor {ref.name} is in {tensors[ref.name].file} and in {file.name}")
            tensors[ref.name] = ref
    lost = [name for name in weight_map or () if name not in tensors]
    if lost:
        raise ValueError(f"{path / INDEX_NAME} names {len(lost)} tensors that no file holds: {', '.join(lost[:3])}")
    tokenizer = _hash_files(path / name for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json"))
    return Checkpoint(path, config, tensors, digest.hexdigest(), tokenizer, tuple(_other_files(path)))


def _other_files(path: Path) -> Iterator[Path]:
    """Tokenizer, templates, code, licence: everything but weights, config and hidden entries, relative to `path`."""
    for file in sorted(path.rglob("*")):
        relative = file.relative_to(path)
        hidden = any(part.startswith(".") for part in relative.parts)
        ours = relative.name in ("config.json", INDEX_NAME) or file.suffix in FOREIGN_WEIGHTS
        if file.is_file() and not hidden and not ours and not relative.name.endswith(".index.json"):
            yield relative
