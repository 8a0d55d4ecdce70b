"""Ray's own `ray.serve.llm` prefill/decode application on CPU, as a process of its own: a peer to be measured.

Started by `pageferry bench` with the peers' package overlay on PYTHONPATH. Settings come as one JSON argument; SIGTERM
ends the application and its Ray cluster. Nothing of the product is imported here, and the product imports nothing of
`ray.llm`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import Any

# What vLLM reads from the environment, handed on to the replicas.
ENGINE_ENVIRONMENT = (
    "HF_HUB_OFFLINE",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PAGEFERRY_QUEUE_BUSY_LOOP_S",
    "PYTHONPATH",
    "VLLM_CPU_KVCACHE_SPACE",
    "VLLM_CPU_OMP_THREADS_BIND",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NO_USAGE_STATS",
)


def engine_config(settings: dict[str, Any], role: str) -> Any:
    from ray.serve.llm import LLMConfig

    return LLMConfig(
        model_loading_config={"model_id": settings["served_name"], "model_source": settings["model"]},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        engine_kwargs={**settings["engine"], **settings["engine_by_role"][role], "kv_transfer_config": settings["kv"]},
        deployment_config={"num_replicas": 1, "ray_actor_options": {"num_cpus": 1}},
        runtime_env={"env_vars": {name: os.environ[name] for name in ENGINE_ENVIRONMENT if name in os.environ}},
    )


def main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    import ray
    from ray import serve
    from ray.serve.llm import build_pd_openai_app

    ray.init(
        num_cpus=8,  # in Ray's books only: five deployments on two cores
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=settings["temp_dir"],
        object_store_memory=256 << 20,
        log_to_driver=True,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": settings["port"]})
    app = build_pd_openai_app(
        {
            "prefill_config": engine_config(settings, "prefill"),
            "decode_config": engine_config(settings, "decode"),
            "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.1}},
        }
    )
    serve.run(app, name="llm", route_prefix="/", blocking=False)
    print("peer: ray.serve.llm is running", flush=True)
    while not stop.wait(0.5):
        pass
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
