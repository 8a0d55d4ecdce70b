"""Starting and ending a measured system, with real processes: a small HTTP server stands where an engine would.

1. A system is ready when it names its model; its log is shown when it is not.
2. Nothing of it is left afterwards, children that left its process group included.
3. A port that is taken is refused before anything is started.
4. Every system of the menu gets the topology's settings.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from pathlib import Path

import pytest

from app.processes import marked
from cluster.spec import ClusterSpec
from ops.bench import systems
from ops.bench.systems import MARK, Running, StartError, SystemSpec

SLEEP = "[sys.executable, '-c', 'import time; time.sleep(60)']"
STRAY = f"import subprocess, sys; subprocess.Popen({SLEEP}, start_new_session=True)"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def small(folder: Path, port: int, model: str = "m", code: str = STRAY) -> SystemSpec:
    (folder / "v1").mkdir(exist_ok=True)
    (folder / "v1" / "models").write_text(json.dumps({"data": [{"id": "m"}]}))
    serve = f"{code}; import runpy; sys.argv = ['x', '{port}', '--bind', '127.0.0.1', '--directory', {str(folder)!r}]; "
    argv = [sys.executable, "-c", serve + "runpy.run_module('http.server', run_name='__main__')"]
    return SystemSpec("small", "a small server", argv, {}, port, model)


async def test_nothing_is_left(tmp_path: Path) -> None:
    running = Running(small(tmp_path, free_port()), print, tmp_path / "log")
    async with running:
        mine = marked(running._mark, MARK)
        assert len(mine) == 2 and running.memory_gib() > 0.005
        assert any("http.server" in word for words in running.command_lines() for word in words)
    for _ in range(50):
        if not marked(running._mark, MARK):
            break
        time.sleep(0.02)
    assert marked(running._mark, MARK) == []


async def test_a_system_that_ends_shows_its_log(tmp_path: Path) -> None:
    spec = small(tmp_path, free_port(), code="import sys; print('no such model', flush=True); sys.exit(3)")
    with pytest.raises(StartError, match=r"ended with 3:\n.*no such model"):
        await Running(spec, print, tmp_path / "log").__aenter__()


async def test_a_system_with_another_model_is_not_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "START_TIMEOUT_S", 1.0)
    running = Running(small(tmp_path, free_port(), model="other"), print, tmp_path / "log")
    with pytest.raises(StartError, match="not ready after"):
        await running.__aenter__()
    assert marked(running._mark, MARK) == []


async def test_a_taken_port_is_refused(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with pytest.raises(StartError, match="is taken"):
            await Running(small(tmp_path, holder.getsockname()[1]), print, tmp_path / "log").__aenter__()


def test_settings_come_from_the_topology() -> None:
    spec = ClusterSpec.load("local-cpu", {"pools.decode.max_num_seqs": 17, "pools.prefill.max_num_seqs": 9})
    plain = systems.plain_vllm(spec, 1, "fp8_e4m3", 1)
    line = " ".join(plain.argv)
    assert "--max-num-seqs 17" in line and "--kv-cache-dtype fp8_e4m3" in line and "--enforce-eager" in line
    assert plain.environment["OMP_NUM_THREADS"] == "1" and plain.environment["VLLM_CPU_KVCACHE_SPACE"] == "1"
    peer = json.loads(systems.ray_llm(spec, 2, "bfloat16", 1).argv[-1])
    assert peer["engine_by_role"]["prefill"]["max_num_seqs"] == 9
    assert peer["engine_by_role"]["decode"]["max_num_seqs"] == 17
    own = systems.ours(spec, "local-cpu", ["pools.decode.max_num_seqs=17"], 3, 1)
    assert "pools.decode.max_num_seqs=17" in own.argv and own.hands_over
    assert {each.model for each in (plain, own)} == {peer["served_name"]} == {"smollm2"}


def test_command_line() -> None:
    settings = {"enforce_eager": True, "enable_prefix_caching": False, "block_size": 32, "extra": {"a": 1}}
    assert systems.command_line(settings) == [
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--block-size",
        "32",
        "--extra",
        '{"a": 1}',
    ]
