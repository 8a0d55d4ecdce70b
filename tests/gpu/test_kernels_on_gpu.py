"""The Triton kernels on a real device; the same checks as `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

from ops.kernels.checks import CHECKS, Bench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("name", list(CHECKS))
def test_against_the_reference(name: str) -> None:
    CHECKS[name](Bench(torch.device("cuda"), small=False))
