"""Where Serve listens, against what the topology says: the first application of a cluster decides for all of them."""

from __future__ import annotations

from cluster.spec import ClusterSpec

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class OtherAddress(RuntimeError):
    """Serve listens elsewhere than the topology says."""


def refuse_other_address(spec: ClusterSpec) -> None:
    """Raises `OtherAddress`. Needs a running Serve."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    options = client.http_config
    check_address(spec, str(options.host), int(options.port))


def check_address(spec: ClusterSpec, host: str, port: int) -> None:
    wanted = spec.frontend
    if port != wanted.port:
        raise OtherAddress(
            f"frontend.port is {wanted.port}, but Serve listens on port {port} already: set frontend.port={port}, or "
            f"start Serve first with `serve start --http-port {wanted.port}`"
        )
    if host != wanted.host and not (host in LOOPBACK and wanted.host in LOOPBACK):
        raise OtherAddress(
            f"frontend.host is {wanted.host}, but Serve listens on {host}: set frontend.host={host}, or start Serve "
            f"first with `serve start --http-host {wanted.host}`"
        )
