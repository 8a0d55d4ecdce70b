"""Compiled CPU kernels are cached by numba per source file, blind to the file they take helpers from: give every
version of the sources its own cache, so that a test never runs yesterday's code."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

import numba

_SOURCES = sorted((Path(__file__).parents[2] / "kernels").glob("*.py"))
_VERSION = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
numba.config.CACHE_DIR = str(Path(tempfile.gettempdir()) / f"pageferry-numba-{_VERSION}")
