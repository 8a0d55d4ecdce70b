"""The systems that are measured: how each is started, when it is ready, how it is ended.

All get the same model, lengths, page size, batch limits, KV memory an engine and threads an engine, taken from one
topology; plain vLLM has one engine, the two prefill/decode systems have two. Every process of a system carries a mark
in its environment, so that nothing of one system is left when the next one is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from actors.engine.config import CPU_EXECUTOR, KEEP_FREED_MEMORY, QUEUE_BUSY_LOOP, QUEUE_BUSY_LOOP_S
from app.commands.local_ray import free_port, use_haproxy_wrapper
from app.processes import end_marked, marked
from cluster.spec import ClusterSpec, PoolSpec
from ops.bench import peers
from ops.bench.facts import ROOT

MARK = "PAGEFERRY_BENCH"
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 60.0

Say = Callable[[str], None]


class StartError(RuntimeError):
    """A system that did not start, with the end of its log."""


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """What is run: `argv` and `environment` on top of this process's, and the address where it answers."""

    name: str
    title: str
    argv: Sequence[str]
    environment: dict[str, str]
    port: int
    model: str
    hands_over: bool = False  # has `GET /status` that counts tokens handed over
    ready_path: str = "/v1/models"
    overlay: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def engine_environment(pool: PoolSpec, threads: int) -> dict[str, str]:
    """The same for every system, what this service sets for itself too: allocators and queues are not compared."""
    environment = {
        **KEEP_FREED_MEMORY,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        QUEUE_BUSY_LOOP: QUEUE_BUSY_LOOP_S,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if pool.kv_cache_gib is not None:
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(int(pool.kv_cache_gib))
    return environment


def engine_settings(spec: ClusterSpec, pool: PoolSpec, kv_dtype: str) -> dict[str, Any]:
    """vLLM engine arguments of a peer that has this pool's settings."""
    settings: dict[str, Any] = {
        # vLLM's queue as our own engines have it, or the peers' EngineCore would take the core that their worker needs.
        "distributed_executor_backend": CPU_EXECUTOR,
        "worker_extension_cls": "actors.engine.vllm_patches.ShortBusyLoop",
        "block_size": pool.block_tokens,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto" if kv_dtype == "bfloat16" else kv_dtype,
        "max_model_len": spec.model.max_model_len,
        "max_num_seqs": pool.max_num_seqs,
        "max_num_batched_tokens": pool.max_num_batched_tokens,
        "enable_prefix_caching": pool.enable_prefix_caching,
        **pool.engine_args,
    }
    return {name: value for name, value in settings.items() if value is not None}


def command_line(settings: dict[str, Any]) -> list[str]:
    """Engine arguments as `vllm serve` takes them."""
    argv = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            argv += [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return argv


def plain_vllm(spec: ClusterSpec, port: int, kv_dtype: str, threads: int) -> SystemSpec:
    pool = spec.pools.decode
    short = "fp8" if kv_dtype.startswith("fp8") else "bf16"
    wide = "" if threads == 1 else f"-{threads}threads"
    vllm = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", spec.model.path]
    where = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", spec.model.served_name]
    return SystemSpec(
        name=f"vllm-{short}{wide}",
        title=f"vllm serve, {short.upper()} KV" + (f", {threads} threads" if wide else ""),
        argv=[*vllm, *where, *command_line(engine_settings(spec, pool, kv_dtype))],
        environment=engine_environment(pool, threads),
        port=port,
        model=spec.model.served_name,
        ready_path="/health",
    )


def _quick_proxy() -> dict[str, str]:
    """HAProxy in front of Serve, as our own service has it."""
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
    use_haproxy_wrapper(environment)
    return environment


def ray_llm(spec: ClusterSpec, port: int, kv_dtype: str, threads: int) -> SystemSpec:
    pools = {"prefill": spec.pools.prefill, "decode": spec.pools.decode}
    short = "fp8" if kv_dtype.startswith("fp8") else "bf16"
    settings = {
        "model": str(Path(spec.model.path).resolve()) if Path(spec.model.path).exists() else spec.model.path,
        "served_name": spec.model.served_name,
        "port": port,
        "temp_dir": "",
        "engine": {},
        "engine_by_role": {
            role: engine_settings(spec, pool, kv_dtype)
            | {"worker_extension_cls": "ops.bench.peer_worker.NoProgressThread"}
            for role, pool in pools.items()
        },
        "kv": {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
    }
    return SystemSpec(
        name=f"ray-pd-{short}",
        title=f"ray.serve.llm prefill/decode, NIXL, {short.upper()} KV",
        argv=[sys.executable, str(Path(__file__).with_name("peer_ray_llm.py")), json.dumps(settings)],
        environment=engine_environment(spec.pools.decode, threads) | _quick_proxy(),
        port=port,
        model=spec.model.served_name,
        overlay=peers.RAY_LLM,
    )


def ours(spec: ClusterSpec, config: str, overrides: Sequence[str], port: int, threads: int) -> SystemSpec:
    command = [sys.executable, "-m", "app.cli", "serve", config, *overrides, "--port", str(port)]
    return SystemSpec(
        name="pageferry",
        title="pageferry, BF16 prefill -> FP8 decode",
        argv=command,
        environment=engine_environment(spec.pools.decode, threads),
        port=port,
        model=spec.model.served_name,
        hands_over=bool(spec.pools.prefill.replicas),
        ready_path="/health",
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU seconds (user and system) of a process since its start, and how often its threads went to sleep."""

    command: str
    cpu_s: float
    switches: int


@dataclass(slots=True)
class Running:
    """A system as an async context: started and ready inside, gone with all its processes after."""

    spec: SystemSpec
    say: Say
    log: Path
    start_s: float = 0.0
    _mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    _process: subprocess.Popen[bytes] | None = None
    _temp_dir: Path | None = None

    async def __aenter__(self) -> Running:
        _demand_free(self.spec.port)
        environment = {**os.environ, **self.spec.environment, MARK: self._mark}
        environment.pop("RAY_ADDRESS", None)
        if self.spec.overlay:
            overlay = peers.ensure(self.spec.overlay, self.say)
            environment["PYTHONPATH"] = f"{overlay}{os.pathsep}{ROOT}"
        self._temp_dir = Path(tempfile.mkdtemp(prefix="pfb-", dir="/tmp"))
        argv = [part.replace('"temp_dir": ""', f'"temp_dir": "{self._temp_dir}"') for part in self.spec.argv]
        began = time.monotonic()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                argv, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            await self._wait_ready(began + START_TIMEOUT_S)
        except BaseException:
            await self.stop()
            raise
        self.start_s = time.monotonic() - began
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _wait_ready(self, until: float) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
            while True:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise StartError(f"{self.spec.title} ended with {self._process.returncode}:\n{self.tail()}")
                if await self._models(session):
                    return
                if time.monotonic() > until:
                    raise StartError(f"{self.spec.title} is not ready after {START_TIMEOUT_S:.0f} s:\n{self.tail()}")
                await asyncio.sleep(0.25)

    async def _models(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self.spec.url + self.spec.ready_path) as answer:
                if answer.status != 200:
                    return False
            async with session.get(f"{self.spec.url}/v1/models") as answer:
                served = (await answer.json(content_type=None)).get("data", []) if answer.status == 200 else []
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return False
        return any(model["id"] == self.spec.model for model in served)

    def tail(self, lines: int = 15) -> str:
        try:
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def memory_mib(self) -> dict[int, float]:
        """Proportional memory of each process, MiB, by process id: shared pages are counted once."""
        found = {}
        for pid in marked(self._mark, MARK):
            try:
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            found[pid] = sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
        return found

    def memory_gib(self) -> float:
        """Of all its processes."""
        return sum(self.memory_mib().values()) / 1024

    def usage(self) -> dict[int, Usage]:
        """What each process that lives now has used so far, by process id."""
        found = {}
        for pid in marked(self._mark, MARK):
            try:
                folder = Path(f"/proc/{pid}")
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                switches = sum(
                    int(line.split()[1])
                    for thread in (folder / "task").iterdir()
                    for line in (thread / "status").read_text().splitlines()
                    if line.startswith("voluntary_ctxt_switches")
                )
            except OSError:
                continue
            ticks = int(fields[11]) + int(fields[12])
            found[pid] = Usage(command, ticks / os.sysconf("SC_CLK_TCK"), switches)
        return found

    def cpu_seconds(self) -> float:
        """CPU time of all processes that live now, for a look at what a system costs when idle."""
        return sum(use.cpu_s for use in self.usage().values())

    def command_lines(self) -> list[list[str]]:
        """The command lines of all processes that live now."""
        found = []
        for pid in marked(self._mark, MARK):
            try:
                found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                continue
        return found

    async def stop(self) -> None:
        """SIGTERM, time to end by itself, then everything that carries the mark. Raises when something is left."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                await asyncio.to_thread(process.wait, STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.say(f"{self.spec.name} did not end within {STOP_TIMEOUT_S:.0f} s; ending its processes")
        left = await asyncio.to_thread(end_marked, self._mark, 3.0, MARK)
        if process is not None and process.poll() is None:
            await asyncio.to_thread(process.wait, 5)
        if self._temp_dir is not None:
            shutil.rmtree(self._temp_dir, ignore_errors=True)
        if left:
            raise StartError(f"processes of {self.spec.title} cannot be ended: {left}")


def _demand_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise StartError(f"port {port} is taken; choose another first port with --port") from None
