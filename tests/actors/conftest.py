from __future__ import annotations

import pytest
from controller_driver import ControllerDriver


@pytest.fixture
def rig() -> ControllerDriver:
    rig = ControllerDriver()
    rig.decode("d1", "d2")
    rig.prefill("p1", "p2")
    return rig
