"""Every kernel against its torch reference, byte for byte (`ops.kernels.checks`)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from ops.gpu_check.plan import Options, Row
from ops.kernels.checks import CHECKS, Bench

# Whole in the interpreter they take half a minute; tests/kernels runs all of them.
QUICK = ("strides", "far_blocks", "tags")


def run(options: Options) -> Iterator[Row]:
    bench = Bench(torch.device(options.device), small=options.dry)
    for name in QUICK if options.dry else CHECKS:
        began = time.perf_counter()
        try:
            CHECKS[name](bench)
            verdict: Row = {"ok": True}
        except AssertionError as error:
            verdict = {"ok": False, "error": str(error)}
        yield {"check": name, **verdict, "seconds": round(time.perf_counter() - began, 2)}
