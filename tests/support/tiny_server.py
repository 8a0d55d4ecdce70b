"""A small real OpenAI server as a process: streams `max_tokens` tokens, one every STEP seconds, after FIRST seconds.

    python tests/support/tiny_server.py PORT FIRST STEP [FAULT]

The tokens follow from the prompt alone. FAULT: `usage` (miscounts), `random` (other tokens every time), `refuse` (429
to every other request).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

PORT, FIRST_S, STEP_S = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
FAULT = sys.argv[4] if len(sys.argv) > 4 else ""
asked = count(1)


async def completions(request: Request) -> Response:
    body, number = await request.json(), next(asked)
    if FAULT == "refuse" and number % 2:
        return PlainTextResponse("full", 429, {"Retry-After": "0"})
    return StreamingResponse(stream(body, number), media_type="text/event-stream")


async def stream(body: dict[str, Any], number: int) -> AsyncIterator[str]:
    prompt, most = body["prompt"], body["max_tokens"]
    await asyncio.sleep(FIRST_S)
    for position in range(most):
        token = (sum(prompt) + position + (number if FAULT == "random" else 0)) % 1000
        reason = "length" if position == most - 1 else None
        choice = {"text": f" {token}", "token_ids": [token], "finish_reason": reason}
        yield f"data: {json.dumps({'choices': [choice]})}\n\n"
        await asyncio.sleep(STEP_S)
    usage = {"prompt_tokens": len(prompt) - (FAULT == "usage"), "completion_tokens": most}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n"


async def models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": "m"}]})


async def metrics(request: Request) -> Response:
    return PlainTextResponse(
        f'vllm:num_preemptions_total{{engine="0"}} {next(asked)}.0\nvllm:kv_cache_usage_perc{{engine="0"}} 0.25\n'
        'vllm:num_requests_running{engine="0"} 7.0\n'
    )


routes = [
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/models", models),
    Route("/health", models),
    Route("/metrics", metrics),
]
uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=PORT, log_level="error")
