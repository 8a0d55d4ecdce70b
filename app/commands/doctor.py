"""`pageferry doctor`: what this machine has for a topology, what it lacks, and how to mend it. Starts nothing."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cluster.json_output import print_json
from cluster.spec import ClusterSpec, SpecError, parse_overrides

GIB = 1 << 30
ENGINE_GIB = 2.5  # of memory beside weights and KV cache: a CPU engine's process
OBJECT_STORE = 256 << 20  # bytes, of `pageferry serve`
FILES_MIN = 4096
SOCKET_PATH_MAX = 107  # characters; Ray and the engines put sockets below the temporary folder
SOCKET_PATH_OURS = 70  # of them behind it
CPU_FLAGS = ("avx2", "avx512f")
State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Finding:
    """`mend`: what to do; "" when nothing is to be done."""

    what: str
    state: State
    found: str
    mend: str = ""


def main(argv: list[str]) -> int:
    make = argparse.ArgumentParser(
        prog="pageferry doctor", description="What this machine lacks for a topology, and how to mend it."
    )
    make.add_argument("config", nargs="?", default="local-cpu", help="topology file, or a shipped one by name")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model.path=/models/m")
    make.add_argument("--json", action="store_true")
    args = make.parse_intermixed_args(argv)
    try:
        spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
    except SpecError as error:
        print(f"pageferry doctor: {error}", file=sys.stderr)
        return 2
    findings = [finding for check in CHECKS for finding in check(spec)]
    healthy = all(finding.state != "missing" for finding in findings)
    if args.json:
        print_json({"config": args.config, "healthy": healthy, "findings": [asdict(each) for each in findings]})
    else:
        Console().print(table(findings))
        print("ready for this topology" if healthy else "not ready: mend what is missing")
    return 0 if healthy else 1


def table(findings: list[Finding]) -> Table:
    rows = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "what", "found", "mend"):
        rows.add_column(name)
    colours = {"ok": "green", "warn": "yellow", "missing": "red"}
    for each in findings:
        rows.add_row(f"[{colours[each.state]}]{each.state}[/]", each.what, each.found, each.mend)
    return rows


def packages(spec: ClusterSpec) -> Iterator[Finding]:
    python = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", "ok" if sys.version_info >= (3, 11) else "missing", python)
    for name, wanted in (("ray", "2.60.0"), ("vllm", "0.32.0")):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", "make setup (CPU), or pip install '.[gpu]'")
            continue
        state: State = "ok" if found.split("+")[0] == wanted else "warn"
        yield Finding(
            name, state, found, "" if state == "ok" else f"tried with {wanted} only: pip install {name}=={wanted}"
        )


def processor(spec: ClusterSpec) -> Iterator[Finding]:
    yield Finding("CPU cores", "ok" if (os.cpu_count() or 1) >= 2 else "warn", str(os.cpu_count()))
    if spec.pools.prefill.gpus_per_replica or spec.pools.decode.gpus_per_replica:
        return
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    has = [flag for flag in CPU_FLAGS if flag in flags]
    mend = "" if has else "vLLM's CPU build needs AVX2: use a GPU topology or another machine"
    yield Finding("CPU instructions", "ok" if has else "missing", ", ".join(has) or "neither AVX2 nor AVX-512", mend)


def memory(spec: ClusterSpec) -> Iterator[Finding]:
    """Staging, and what CPU replicas take; GPUs are planned by `pageferry plan`."""
    free = available_memory() / GIB
    pools = [pool for pool in (spec.pools.prefill, spec.pools.decode) if not pool.gpus_per_replica]
    need = sum(pool.replicas * ((pool.kv_cache_gib or 0) + ENGINE_GIB) for pool in pools)
    need += spec.transfer.staging_bytes_max / GIB
    state: State = "ok" if free >= need else "missing"
    mend = "" if state == "ok" else "fewer replicas, a smaller pools.*.kv_cache_gib or transfer.staging_bytes_max"
    yield Finding("memory", state, f"{free:.1f} GiB free, about {need:.1f} needed beside the weights", mend)


def available_memory() -> int:
    """Bytes; a container's limit counts where it is lower."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, int(text) - int(used.read_text()))
    return free


def shared_memory(spec: ClusterSpec) -> Iterator[Finding]:
    """Ray's object store lies there; staging does not."""
    free = shutil.disk_usage("/dev/shm").free
    state: State = "ok" if free >= OBJECT_STORE else "missing"
    found = f"{free / GIB:.2f} GiB free, {OBJECT_STORE / GIB:.2f} needed"
    mend = "" if state == "ok" else "container: --shm-size=1g"
    yield Finding("/dev/shm", state, found, mend)


def limits(spec: ClusterSpec) -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    state: State = "ok" if files >= FILES_MIN else "warn"
    yield Finding("open files", state, str(files), "" if state == "ok" else f"ulimit -n {FILES_MIN}")
    folder = tempfile.gettempdir()
    fits = len(folder) + SOCKET_PATH_OURS <= SOCKET_PATH_MAX
    yield Finding("TMPDIR", "ok" if fits else "warn", folder, "" if fits else "a path this long: set TMPDIR=/tmp")
    proxy = os.environ.get("http_proxy") or os.environ.get("HTTP_PROXY")
    local = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if proxy and "localhost" not in local and "127.0.0.1" not in local:
        yield Finding("http_proxy", "warn", "set, also for this machine", "export no_proxy=localhost,127.0.0.1")


def ports(spec: ClusterSpec) -> Iterator[Finding]:
    host, port = spec.frontend.host, spec.frontend.port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            yield Finding(f"port {port}", "missing", f"{host}: {error.strerror}", "pageferry serve --port ANOTHER")
            return
    yield Finding(f"port {port}", "ok", f"free on {host}")


def gpus(spec: ClusterSpec) -> Iterator[Finding]:
    pools = (spec.pools.prefill, spec.pools.decode)
    needed = sum(pool.replicas * pool.gpus_per_replica for pool in pools)
    if not needed:
        return
    found = gpu_names()
    state: State = "ok" if len(found) >= needed else "missing"
    mend = "" if state == "ok" else "install the driver (nvidia-smi must list them), join more nodes, or fewer replicas"
    names = ", ".join(dict.fromkeys(found)) or "none"
    yield Finding("GPUs", state, f"{len(found)} here ({names}), {needed} needed in the cluster", mend)


def gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def model_files(spec: ClusterSpec) -> Iterator[Finding]:
    paths = {"model.path": spec.model.path}
    for name in ("prefill", "decode"):
        if weights := getattr(spec.pools, name).weights:
            paths[f"pools.{name}.weights"] = weights
    for setting, path in paths.items():
        yield _model(setting, Path(path))


def _model(setting: str, path: Path) -> Finding:
    if not path.exists():
        if not path.is_absolute() and path.parts[0] not in (".", "..", ".models") and len(path.parts) == 2:
            return Finding(setting, "warn", f"{path}: not here, a hub name", "it is downloaded at the first start")
        mend = "make setup prepares the demo model" if ".models" in path.parts else f"set {setting}"
        return Finding(setting, "missing", f"{path}: no such folder", mend)
    wanted: dict[str, Callable[[], bool]] = {
        "config.json": lambda: (path / "config.json").is_file(),
        "weights (*.safetensors)": lambda: any(path.glob("*.safetensors")),
        "a tokenizer": lambda: any(path.glob("tokenizer*")),
    }
    lacks = [name for name, there in wanted.items() if not there()]
    if lacks:
        return Finding(setting, "missing", f"{path} lacks {', '.join(lacks)}", "copy the whole checkpoint there")
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return Finding(setting, "ok", f"{path}, {size / GIB:.2f} GiB of weights")


CHECKS = (packages, processor, memory, shared_memory, limits, ports, gpus, model_files)
