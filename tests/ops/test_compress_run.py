"""The run itself. Laws: (1) the bytes depend on source and options alone, not on workers, memory or kills; (2) the
destination appears whole or not at all; (3) memory stays within its bound; (4) what we wrote decodes, by other code,
to what the report says, and damage is found."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from synthetic_checkpoint import Geometry, make_checkpoint

from cluster.quality import State, read_verdict
from ops.compress.families import choose, family_of
from ops.compress.plan import Options, Plan, make_plan
from ops.compress.run import Resources, RunFigures, compress
from ops.compress.source import Checkpoint, open_checkpoint
from ops.compress.verify import verify
from ops.compress.workfolder import WorkFolder

pytestmark = pytest.mark.compiles  # in the workers

GIB = 1 << 30
OPTIONS = Options(group_size=64, shard_bytes=1 << 20)
TWO = Resources(workers=2, max_memory_bytes=3 * GIB)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "source"
    make_checkpoint(path, Geometry(layers=3, experts=8, vocab=512), fp8=True, shard_bytes=6 << 20)
    (path / "tokenizer.json").write_text("{}")
    (path / "code").mkdir()
    (path / "code" / "modeling.py").write_text("# code")
    (path / ".cache").mkdir()
    (path / ".cache" / "junk").write_text("x")
    (path / "pytorch_model.bin").write_bytes(b"foreign weights")
    return path


def planned(path: Path, options: Options = OPTIONS) -> tuple[Checkpoint, Plan]:
    checkpoint = open_checkpoint(path)
    return checkpoint, make_plan(checkpoint, choose(family_of(checkpoint.model_type), [], [], []), options)


def run(source: Path, destination: Path, resources: Resources = TWO, options: Options = OPTIONS) -> RunFigures:
    checkpoint, plan = planned(source, options)
    return compress(checkpoint, plan, destination, resources)


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture(scope="module")
def result(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    destination = tmp_path_factory.mktemp("run") / "int4"
    figures = run(source, destination)
    assert 0 < figures.peak_bytes < figures.max_memory_bytes
    return destination


def test_what_the_result_holds(source: Path, result: Path) -> None:
    names = set(content(result))
    assert {"config.json", "tokenizer.json", "code/modeling.py", "quality.json", "report.md"} <= names
    assert not {"pytorch_model.bin", ".cache/junk"} & names
    assert not result.with_name(f".{result.name}.compressing").exists()
    opened = open_checkpoint(result)
    config = opened.config["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["config_groups"]["group_0"]["weights"]["group_size"] == 64
    report = json.loads((result / "report.json").read_text())
    assert report["bytes_out"] == opened.nbytes
    assert report["bytes_in"] == open_checkpoint(source).nbytes
    assert len(report["worst"]) == 10
    assert all(0.05 < row["relative_error"] < 0.12 for row in report["tensors"])
    assert sum(report["codes"]) > 0
    assert read_verdict(result).state is State.UNJUDGED


@pytest.mark.parametrize(
    "resources", [Resources(1, 2 * GIB), Resources(3, 4 * GIB)], ids=["one worker", "three workers"]
)
def test_law_1_bytes_do_not_depend_on_workers_or_memory(
    source: Path, result: Path, tmp_path: Path, resources: Resources
) -> None:
    run(source, tmp_path / "int4", resources)
    assert content(tmp_path / "int4") == content(result)


MANY_FILES = Options(group_size=64, shard_bytes=1 << 18)


def _command(source: Path, destination: Path, workers: int = 2) -> list[str]:
    return [
        sys.executable, "-m", "app.cli", "compress", str(source), str(destination), "--group-size", "64",
        "--shard-gib", str(MANY_FILES.shard_bytes / GIB), "--workers", str(workers), "--max-memory", "3",
    ]  # fmt: skip


def _names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder)) if folder.exists() else []


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.soak)])
def test_law_1_kills_and_resumes_give_the_same_bytes(source: Path, tmp_path: Path, kills: int) -> None:
    """SIGKILL at random moments of the work: while files are written, renamed, recorded."""
    run(source, tmp_path / "whole", options=MANY_FILES)
    destination = tmp_path / "int4"
    work = tmp_path / ".int4.compressing"
    chance = random.Random(6)
    progressed = 0
    for attempt in range(kills):
        before = _names(work / "files")
        command = _command(source, destination, workers=1 + (attempt % 4 == 0))
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and _names(work / "files") in ([], before):
            time.sleep(0.002)
        time.sleep(chance.uniform(0.0, 0.04))
        assert process.poll() is None, "it ended before it could be killed: give it more files"
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not destination.exists()
        with pytest.raises((ValueError, FileNotFoundError)):
            open_checkpoint(work / "files")
        progressed += len(_names(work / "files")) > len(before)
    assert progressed >= kills // 2
    subprocess.run(_command(source, destination), check=True, capture_output=True)
    assert content(destination) == content(tmp_path / "whole")
    assert not work.exists()


def test_no_writer_outlives_its_parent(source: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        _command(source, tmp_path / "int4"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    children: list[int] = []
    files = tmp_path / ".int4.compressing" / "files"
    while process.poll() is None and not (children and any(files.glob("*.part"))):
        listing = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        children = [pid for pid in map(int, listing.split()) if _is_worker(pid)]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + 5
    while any(_is_worker(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(children) >= 2
    assert not any(_is_worker(pid) for pid in children)


def _is_worker(pid: int) -> bool:
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_law_2_an_existing_destination_is_never_touched(source: Path, tmp_path: Path) -> None:
    (tmp_path / "int4").mkdir()
    with pytest.raises(ValueError, match="exists; name another"):
        run(source, tmp_path / "int4")


def test_unfinished_work_is_not_mixed_with_other_options(source: Path, tmp_path: Path) -> None:
    destination = tmp_path / "int4"
    checkpoint, plan = planned(source)
    with WorkFolder(destination, plan.identity()), pytest.raises(ValueError, match="in use by another run"):
        WorkFolder(destination, plan.identity())
    _, other = planned(source, Options(group_size=32, shard_bytes=1 << 20))
    with pytest.raises(ValueError, match=r"another options and outputs; run it again as it was, or .* --restart"):
        compress(checkpoint, other, destination, TWO)
    with WorkFolder(destination, other.identity(), restart=True) as folder:
        assert folder.records == []


def test_a_vouched_file_that_changed_is_refused(source: Path, tmp_path: Path) -> None:
    _, plan = planned(source)
    with WorkFolder(tmp_path / "int4", plan.identity()) as folder:
        (folder.files / "a").write_bytes(b"1234")
        (folder.files / "stray.part").write_bytes(b"half")
        folder.add({"shard": 0, "file": "a", "bytes": 4})
    with WorkFolder(tmp_path / "int4", plan.identity()) as folder:
        assert [file.name for file in folder.files.iterdir()] == ["a"]
        (folder.files / "a").write_bytes(b"123")
    with pytest.raises(ValueError, match=r"should hold 4 bytes, found 3: start again with --restart"):
        WorkFolder(tmp_path / "int4", plan.identity())


def test_law_3_a_bound_too_small_for_the_libraries_is_refused_with_the_need(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--max-memory leaves \d+ MiB a worker, but it needs \d+ MiB"):
        run(source, tmp_path / "int4", Resources(2, 600 << 20))
    assert not (tmp_path / "int4").exists()


GROW = """
import sys, numpy as np
from pathlib import Path
from ops.compress.plan import Options
from ops.compress.worker import Setup, _limit_memory, status_bytes
share = status_bytes("VmRSS") + (700 << 20)
ready = _limit_memory(Setup(Path("."), Path("."), Options(), share, 1024))
kept = []
try:
    while True:
        kept.append(np.ones(16 << 20, np.uint8))
except MemoryError:
    print(share, status_bytes("VmRSS"), len(kept), ready.chunk_weights)
"""


def test_law_3_a_worker_cannot_grow_past_its_share() -> None:
    """The limit is the kernel's, not a promise: memory asked for beyond the share is refused."""
    done = subprocess.run([sys.executable, "-c", GROW], capture_output=True, text=True, check=True)
    share, resident, taken, chunk = map(int, done.stdout.split())
    assert taken >= 4
    assert resident <= share + (64 << 20)
    assert chunk >= 1 << 20


def test_law_4_verification_by_other_code(source: Path, result: Path, tmp_path: Path) -> None:
    checkpoint, plan = planned(source)
    found = verify(checkpoint, plan, result, workers=1)
    assert found.problems == []
    assert found.packed > 50
    assert "compressed-tensors" in found.decoder
    broken = tmp_path / "broken"
    shutil.copytree(result, broken)
    victim = next(shard for shard in plan.shards if any(task.kind == "routed_experts" for task in shard.tasks))
    data = bytearray((broken / victim.file).read_bytes())
    data[-9] ^= 0x10
    (broken / victim.file).write_bytes(data)
    (broken / plan.shards[0].file).unlink()
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"]["ignore"].remove(r"re:(.*\.)?layers\.\d+\.mlp\.gate$")
    (broken / "config.json").write_text(json.dumps(config))
    problems = verify(checkpoint, plan, broken, workers=1).problems
    assert any(f"{plan.shards[0].file} is missing" in problem for problem in problems)
    assert any(f"{victim.file} has another sha256" in problem for problem in problems)
    assert any("does not ignore model.layers.1.mlp.gate" in problem for problem in problems)


def test_law_4_wrong_numbers_are_found_even_when_the_digest_agrees(source: Path, result: Path, tmp_path: Path) -> None:
    checkpoint, plan = planned(source)
    broken = tmp_path / "broken"
    shutil.copytree(result, broken)
    report = json.loads((broken / "report.json").read_text())
    report["tensors"][0]["relative_error"] *= 1.01
    (broken / "report.json").write_text(json.dumps(report))
    (problem,) = verify(checkpoint, plan, broken, workers=1).problems
    assert report["tensors"][0]["tensor"] in problem
    assert "the report says" in problem
