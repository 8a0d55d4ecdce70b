"""One real service for the whole session: Ray, Serve, two frontends, one prefill and two decode engines.

Both pools keep FP8 pages, so that a plain vLLM server with the same settings computes the same numbers. Each test ends
with `quiet`: nothing of its requests is left anywhere, and no law of the controller is broken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from live_service import free_port, wait_quiet
from parity import SETTINGS

from app.client import Client
from app.commands.serve import Service
from cluster.spec import ClusterSpec

BLOCKS = 320  # pages a replica: 10,240 tokens
MAX_LEN = 2048


def service_spec() -> ClusterSpec:
    return ClusterSpec.load(
        "local-cpu",
        {
            "model.max_model_len": MAX_LEN,
            **SETTINGS,
            "pools.prefill.max_num_batched_tokens": 256,
            "pools.decode.replicas": 2,
            "pools.prefill.engine_args.num_gpu_blocks_override": BLOCKS,
            "pools.decode.engine_args.num_gpu_blocks_override": BLOCKS,
            "admission.queue_wait_s": 300.0,  # a slow machine waits; what is refused is refused by `queue_max`
            "admission.queue_max": 12,
            "admission.local_prefill_max_tokens": 0,  # short prompts are handed over too
            "transfer.staging_bytes_max": 64 << 20,
            "frontend.replicas": 2,
            "frontend.port": free_port(),
        },
    )


@pytest.fixture(scope="session")
def spec() -> ClusterSpec:
    return service_spec()


@pytest.fixture(scope="session")
def service(spec: ClusterSpec) -> Iterator[Service]:
    before = dict(os.environ)
    made = Service(spec, None, dashboard_port=free_port())
    try:
        made.start()
        made.wait_healthy(240)
        print(made.welcome())
        yield made
    finally:
        made.stop()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with Client(service.url) as made:
        yield made


@pytest.fixture
def quiet(service: Service) -> Iterator[Callable[[], None]]:
    """Checks before and after the test that the service holds nothing; the value checks it in between."""

    def check() -> None:
        wait_quiet(service.url)

    check()
    yield check
    check()
