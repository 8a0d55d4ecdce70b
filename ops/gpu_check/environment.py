"""What the machine is: each figure of the other stages is worth as much as this says of it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

from ops.gpu_check.plan import Options, Row

PACKAGES = ("torch", "triton", "vllm", "flashinfer-python", "ray", "numba", "msgspec")
ASKED = "name,driver_version,memory.total,pcie.link.gen.current,pcie.link.width.current,clocks.sm,power.limit"


def run(options: Options) -> Iterator[Row]:
    yield {"packages": {name: _version(name) for name in PACKAGES}, "python": platform.python_version()}
    yield {
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0,
        "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
        "kernel": platform.release(),
    }
    if options.dry:
        yield {"device": "cpu"}
        return
    free, total = torch.cuda.mem_get_info()
    yield {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "memory_free": free,
        "memory_total": total,
        "ok": torch.cuda.get_device_capability() >= (8, 9),  # the kernels' native e4m3 conversion
    }
    smi = subprocess.run(
        ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"], capture_output=True, text=True
    )
    yield {"nvidia_smi": smi.stdout.strip() or smi.stderr.strip(), "asked": ASKED}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
