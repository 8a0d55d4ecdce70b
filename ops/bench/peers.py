"""Packages that only a peer needs, in an overlay folder beside the environment: installed on demand, never imported.

`ray.serve.llm` with vLLM's NIXL connector wants a few packages that the product does not use. They go into `.peers/`
(`pip install --no-deps --target`), which is on PYTHONPATH of that peer's processes alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ops.bench.facts import ROOT

OVERLAY = ROOT / ".peers"
RAY_LLM = ("pyarrow==26.0.1", "jsonref==1.1.0", "nixl==1.5.1", "nixl-cu12==1.5.1")


class PeerError(RuntimeError):
    """A peer that cannot be run here, and why."""


def missing(packages: tuple[str, ...], overlay: Path = OVERLAY) -> list[str]:
    """Those whose exact version is not in the overlay."""

    def there(package: str) -> bool:
        name, _, version = package.partition("==")
        return (overlay / f"{name.replace('-', '_')}-{version}.dist-info").is_dir()

    return [package for package in packages if not there(package)]


def ensure(packages: tuple[str, ...], say: Callable[[str], None], overlay: Path = OVERLAY) -> Path:
    """Installs what is missing and returns the overlay. Raises PeerError with pip's last words."""
    wanted = missing(packages, overlay)
    if wanted:
        say(f"installing {', '.join(wanted)} into {overlay.name}/ (about 410 MB, for the peer only)")
        command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-deps", "--upgrade"]
        made = subprocess.run([*command, "--target", str(overlay), *wanted], capture_output=True, text=True)
        if made.returncode:
            words = (made.stderr or made.stdout).strip().splitlines()[-1:]
            raise PeerError(f"cannot install {', '.join(wanted)}: {' '.join(words)}")
    return overlay
