"""How long an engine may take to start: by the bytes of its checkpoint."""

from __future__ import annotations

from pathlib import Path

from cluster.spec import ClusterSpec, PoolSpec

START_S = 600
"""vLLM's own limit: imports, compilation, graphs, profiling, and the load of a checkpoint that is not known here."""
LOAD_BYTES_S = 250_000_000
"""A slow case: a network disk that several engines read at once."""
SERVICE_S = 300
"""For Ray, the frontends and a second try of a replica."""


def engine_s(spec: ClusterSpec, pool: PoolSpec) -> int:
    """Seconds that vLLM waits for an engine of this pool."""
    files = Path(pool.weights or spec.model.path).glob("*.safetensors")
    return START_S + sum(file.stat().st_size for file in files) // LOAD_BYTES_S


def service_s(spec: ClusterSpec) -> int:
    """Seconds until a service of this topology must be healthy."""
    return SERVICE_S + max(engine_s(spec, pool) for pool in (spec.pools.prefill, spec.pools.decode))
