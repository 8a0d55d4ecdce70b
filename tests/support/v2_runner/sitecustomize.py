"""Makes every Python process that has this folder on PYTHONPATH run vLLM as a GPU does, on a CPU.

Model runner V2 with the asynchronous scheduler; its small Triton kernels run in Triton's interpreter. vLLM takes Triton
for unusable without a backend for the device, and its CPU platform turns asynchronous scheduling off: both are undone
here, before anything imports vLLM. `$PAGEFERRY_V2_ON_CPU` must be set as well; with `$PAGEFERRY_RING_ON_CPU` prefill's
pages go to staging over the ring that they go over on a GPU.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

PLATFORM = "vllm.platforms.cpu"
WORKER_HALF = "actors.engine.worker_half"
CHANGED: set[str] = set()


class _Driver:
    @staticmethod
    def is_active() -> bool:
        return True


class _Backend:
    driver = _Driver


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "triton.backends":
            self.loader.exec_module(module)
            module.backends["cpu"] = _Backend
            return
        self.loader.exec_module(module)
        if module.__name__ == WORKER_HALF:
            start = module.FerryConnectorWorker.__init__
            start.__defaults__ = (*start.__defaults__[:-1], True)
            return
        platform = module.CpuPlatform
        check = platform.check_and_update_config.__func__

        def keep_async(cls: Any, config: Any) -> None:
            check(cls, config)
            config.scheduler_config.async_scheduling = True

        platform.check_and_update_config = classmethod(keep_async)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


if os.environ.get("PAGEFERRY_V2_ON_CPU"):
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    CHANGED |= {PLATFORM, "triton.backends"}
if os.environ.get("PAGEFERRY_RING_ON_CPU"):
    CHANGED.add(WORKER_HALF)
if CHANGED:
    sys.meta_path.insert(0, _Finder())
