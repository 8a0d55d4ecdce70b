"""Whether a request that comes now will be served, from what the controller says of the pools. Pure."""

from __future__ import annotations

from typing import Any

from cluster.spec import ClusterSpec

OTHER_TOKENIZER = (
    "the checkpoint in pools.decode.weights has another tokenizer than the one in model.path: use a checkpoint of the "
    "same model, or set model.tokenizer to the one that both were made for"
)
TAKES_TICKETS = ("starting", "ready", "stale")  # states of a joined replica; a stale one is only late


def cannot_serve(status: dict[str, Any], spec: ClusterSpec, generation: str, tokenizer: str) -> str:
    """Why no request can be served; "" when one can, now or by waking a pool that is at zero.

    `generation` and `tokenizer` are this frontend's. A prefill pool is not needed: decode computes prompts itself.
    """
    decode = status["pools"]["decode"]
    there = [replica for replica in decode["replicas"] if replica["state"] in TAKES_TICKETS]
    for replica in there:
        if replica["generation"] == generation and replica["tokenizer"] != tokenizer:
            return OTHER_TOKENIZER
    if there:
        return ""
    if spec.pools.decode.bounds[0] > 0:
        return f"no decode replica has joined: {decode['scaling']}"
    if decode["target"] == 0 and decode["wanted"] in (None, 0) and spec.scaling.mode == "off":
        return "decode is scaled to zero and scaling.mode is off: `pageferry scale decode 1` starts a replica"
    return ""
