"""One process that writes output files inside a hard limit of memory.

The parent sends a `Shard`, the worker answers with `Progress` values and one `Done` (or `Failed`).
"""

from __future__ import annotations

import ctypes
import resource
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from ops.compress import codec
from ops.compress.plan import Options
from ops.compress.shard import ROW_MULTIPLE, ShardWriter
from ops.compress.source import open_checkpoint

CHUNK_WEIGHTS_MAX = 16 << 20  # more only costs memory
SLACK_BYTES = 48 << 20  # allocator, hashing and message buffers beside the rows in work
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Setup:
    """What a worker is started with. `share_bytes`: resident memory it may come to; `widest_row`: columns of the
    widest weight; `calibrated`: a checkpoint whose codes are taken over instead of made."""

    source: Path
    folder: Path
    options: Options
    share_bytes: int
    widest_row: int
    calibrated: Path | None = None


@dataclass(frozen=True)
class Ready:
    base_bytes: int
    chunk_weights: int


@dataclass(frozen=True)
class Progress:
    bytes_in: int


@dataclass(frozen=True)
class Done:
    record: dict[str, Any]
    peak_bytes: int


@dataclass(frozen=True)
class Failed:
    message: str


def status_bytes(key: str, pid: int | str = "self") -> int:
    """A memory figure of /proc/PID/status: VmHWM (largest resident so far), VmRSS, VmData."""
    with open(f"/proc/{pid}/status") as file:
        for line in file:
            if line.startswith(key + ":"):
                return int(line.split()[1]) << 10
    raise ValueError(f"/proc/{pid}/status has no {key}")


def _limit_memory(setup: Setup) -> Ready:
    """Warms every kernel, then forbids the process to grow past its share. ValueError when the share is too small."""
    options = setup.options
    warm = torch.ones(ROW_MULTIPLE, 128)
    for rows in (codec.plain_rows(warm), codec.Rows(warm.to(torch.float8_e4m3fn), torch.ones(1, 1))):
        packed = codec.pack_rows(rows, options.group_size, options.symmetric, options.clip_grid)
        codec.row_errors(rows, packed, options.group_size)
    base = status_bytes("VmRSS")
    free = setup.share_bytes - base - SLACK_BYTES
    least = codec.WORKING_BYTES_PER_WEIGHT * setup.widest_row * ROW_MULTIPLE
    if free < least:
        raise ValueError(
            f"--max-memory leaves {max(0, setup.share_bytes) >> 20} MiB a worker, but it needs "
            f"{(base + SLACK_BYTES + least >> 20) + 1} MiB ({base >> 20} MiB of it libraries); "
            "raise --max-memory or lower --workers"
        )
    limit = status_bytes("VmData") + free + SLACK_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return Ready(base, min(free // codec.WORKING_BYTES_PER_WEIGHT, CHUNK_WEIGHTS_MAX))


def main(setup: Setup, pipe: Connection) -> None:
    """The process's body: `Ready`, then a `Done` for every `Shard`, until the pipe ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a killed parent leaves no writer behind
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the group; the parent decides
    torch.set_num_threads(1)  # processes share the cores, not threads
    try:
        calibrated = open_checkpoint(setup.calibrated) if setup.calibrated else None
        ready = _limit_memory(setup)
        writer = ShardWriter(
            setup.source, setup.folder, setup.options, calibrated, ready.chunk_weights,
            lambda nbytes: pipe.send(Progress(nbytes)),
        )  # fmt: skip
        pipe.send(ready)
        while True:
            shard = pipe.recv()
            pipe.send(Done(writer.write(shard), status_bytes("VmHWM")))
    except EOFError:
        return
    except Exception as error:  # whatever it is, the parent must hear of it
        pipe.send(Failed(f"{type(error).__name__}: {error}"))
