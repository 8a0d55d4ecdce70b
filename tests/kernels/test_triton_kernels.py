"""Triton kernels without a GPU: run by the interpreter against the reference, compiled for sm_90 and sm_100."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels import dispatch
from kernels.layout import LayoutError, PageDtype, PageLayout, PageOrder, SealBinding
from ops.kernels import aot, checks

ROOT = Path(__file__).parents[2]


def interpreted(*arguments: str) -> str:
    """Run python with Triton's interpreter in a process of its own: it is chosen when the kernels are imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_check_passes_in_the_interpreter() -> None:
    lines = interpreted("-m", "ops.kernels.checks", "--device", "cpu", "--small").splitlines()
    assert [re.fullmatch(r"check (\w+): ok \([\d.]+ s\)", line) is not None for line in lines] == [True] * len(lines)
    assert len(lines) == len(checks.CHECKS) == 10


def test_checks_can_fail() -> None:
    with pytest.raises(AssertionError, match="x: 1 bytes differ, first at"):
        checks.same("x", torch.tensor([1, 2], dtype=torch.uint8), torch.tensor([1, 3], dtype=torch.uint8))
    with pytest.raises(AssertionError, match="x: "):
        checks.same("x", torch.zeros(2), torch.zeros(3))


@pytest.mark.parametrize("arch", list(aot.ARCHS))
def test_ahead_of_time_compilation(arch: str) -> None:
    """One configuration of every kernel (all of them: `pageferry kernels --aot`)."""
    wanted = {
        "seal": "mla64-nearest",
        "digest": "mla64-e4m3",
        "scatter": "mla64-e4m3",
        "finish_seal": "mla64",
        "finish_digest": "all",
        "judge": "mla64",
        "seal_ds_mla": "native",
        "check_tags": "all",
        "pack": "g64-symmetric-bf16-1",
        "unpack": "g64-symmetric",
    }
    configs = [config for config in aot.configs() if wanted[config.kernel] == config.name]
    assert len(configs) == len(wanted)
    usages = {config.kernel: aot.compile_one(config, arch) for config in configs}
    assert {kernel for kernel, usage in usages.items() if usage.spills} == set()
    assert all(16 <= usage.registers <= 255 or kernel == "finish_digest" for kernel, usage in usages.items())
    # Memory is moved in whole 16-byte words, and the hardware does the conversion.
    assert usages["seal"].native_e4m3 and usages["seal_ds_mla"].native_e4m3
    assert (usages["seal"].load_bytes, usages["seal"].store_bytes) == (16, 16)
    assert (usages["scatter"].load_bytes, usages["scatter"].store_bytes) == (16, 16)
    assert (usages["digest"].load_bytes, usages["pack"].load_bytes) == (16, 16)


def test_every_configuration_has_a_name_of_its_own() -> None:
    names = [(config.kernel, config.name) for config in aot.configs()]
    assert len(set(names)) == len(names) >= 90


def test_a_cpu_page_is_refused_by_the_gpu_backend() -> None:
    src = PageLayout(1, 16, 1, 16, PageDtype.E4M3, PageOrder.CPU_VEC)
    caches, out = (
        [torch.zeros(src.cache_shape(1), dtype=torch.uint8)],
        torch.zeros(1, src.page_bytes, dtype=torch.uint8),
    )
    with dispatch.use_backend("triton"), pytest.raises(LayoutError, match="CPU attention backend"):
        dispatch.seal_pages(caches, src, src, [0], out, SealBinding(0, 0), 0)
