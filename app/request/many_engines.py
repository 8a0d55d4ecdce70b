"""What vLLM's frontend takes for granted of the one engine behind it, and what stands here in its place.

Behind each of many frontends stand the same many engines, which come and go.

| vLLM's frontend assumes | with many frontends and engines | decision |
|---|---|---|
| LoRA adapters may be numbered in order of loading: the engine knows them by that number | every frontend counts
  anew, engines keep theirs: an adapter gets another one's weights | the number comes from name, path and state of the
  files, in every request that leaves (`with_shared_lora`) |
| an adapter that was loaded once is in the engine | a later replica has never seen it | each request carries name and
  path; engines load at first use |
| a multi-modal input that was sent once is in the engine's cache ("lru" mirrors it) | another replica does not have it:
  the request fails | frontends cache what their processor made, and always send it (`for_many_engines`) |
| sampling happens in the engine whose arguments the frontend has | prefill samples first tokens for decode |
  `cluster.engine_args.SAMPLING` of decode holds for both pools |
| stored and background responses are in this process | in none of the others, and any client with an id may read it |
  not offered: `store` is ignored, as vLLM does by default, and reading a response is 404 |
| administration (`reset_prefix_cache`, ...) reaches the engine | caches are in both pools | calls go to every live
  replica; what caches a prompt, on both pools |
| pausing, sleeping, changing weights, elastic expert parallelism | engines are replaced, not changed | not offered |
| `/metrics` is of the service | of one frontend, with its own requests | Ray's metrics have all processes; engines'
  own come with their heartbeats |
| tokens from streaming input sessions (`resumable`) go to the engine that has the session | it may leave | refused |
| a request's id names it in the engine | an engine may see the same request twice, before and after a loss | each
  submission has an id of its own |
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import msgspec
from vllm.lora.request import LoRARequest

LORA_NUMBER_BITS = 31  # vLLM's GPU runner keeps them as int32


def for_many_engines(config: Any) -> None:
    """Sets a frontend's VllmConfig so that its renderer keeps no mirror of an engine's multi-modal cache.

    vLLM does the same when several API servers share an engine.
    """
    config.parallel_config._api_process_count = 2


def shared_lora(lora: LoRARequest) -> LoRARequest:
    """The adapter under a number that every frontend gives it, and no other adapter has.

    Its name carries the number too: an engine's prefix cache tells adapters apart by name and path, and the files may
    change. Loaded again in place, a changed adapter is a new one to the engines.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (lora.lora_name, lora.lora_path, lora.base_model_name or "", _state_of(lora.lora_path)):
        digest.update(part.encode() + b"\0")
    number = int.from_bytes(digest.digest(), "little") % ((1 << LORA_NUMBER_BITS) - 1) + 1
    name = f"{lora.lora_name}@{number:x}"
    return msgspec.structs.replace(lora, lora_name=name, lora_int_id=number, load_inplace=False)


def _state_of(path: str) -> str:
    """Changes when the adapter's files do; "" for what is no folder here."""
    try:
        files = sorted((f.name, f.stat()) for f in Path(path).iterdir() if f.is_file())
    except OSError:
        return ""
    return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in files])
