"""`frontend.host` and `frontend.port` hold, or are refused with both sides in the message."""

from __future__ import annotations

import pytest

from app.serve_http import OtherAddress, check_address
from cluster.spec import ClusterSpec


def test_what_the_topology_says_holds() -> None:
    spec = ClusterSpec.load("local-cpu")
    check_address(spec, "127.0.0.1", 8000)
    check_address(spec, "localhost", 8000)


@pytest.mark.parametrize(
    ("host", "port", "message"),
    [
        ("127.0.0.1", 8001, "frontend.port is 8000, but Serve listens on port 8001"),
        ("0.0.0.0", 8000, "frontend.host is 127.0.0.1, but Serve listens on 0.0.0.0: set frontend.host=0.0.0.0"),
    ],
)
def test_another_address_is_refused(host: str, port: int, message: str) -> None:
    with pytest.raises(OtherAddress, match=message):
        check_address(ClusterSpec.load("local-cpu"), host, port)
