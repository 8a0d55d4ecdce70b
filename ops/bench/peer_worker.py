"""What a worker of `ray.serve.llm` is given, so that it is compared at its best on two cores.

NIXL's progress thread takes a whole core even when nothing moves, and vLLM has no setting for it. vLLM imports a worker
extension before it opens its queue and before it loads its connector.
"""

from __future__ import annotations

import functools

from vllm.distributed import nixl_utils

from actors.engine.vllm_patches import ShortBusyLoop

if nixl_utils.nixl_agent_config is not None:
    nixl_utils.nixl_agent_config = functools.partial(nixl_utils.nixl_agent_config, enable_prog_thread=False)


class NoProgressThread(ShortBusyLoop):
    """A `worker_extension_cls` without methods."""
