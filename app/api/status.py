"""Every law of the service, checked on demand: the controller's registry, and each engine's page ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

ENGINE_S = 4.0  # an engine answers between two steps

AskEngine = Callable[[str, str], Awaitable[dict[str, Any]]]


async def whole_audit(controller: Callable[[], Awaitable[dict[str, Any]]], engine: AskEngine) -> dict[str, Any]:
    """The controller's audit with every engine's beside it; `engine(pool, replica_id)` asks one.

    `breaches` has everything that is broken now, in words; `engines` also what was broken and mended before. An engine
    that does not answer is in `silent`: it breaks no law, but its own were not checked.
    """
    found = dict(await controller())
    asked = {name: each["pool"] for name, each in found["replicas"].items() if each["state"] != "fenced"}
    answers = await asyncio.gather(*(_ask(engine, pool, name) for name, pool in asked.items()))
    found["engines"] = {name: answer for name, answer in zip(asked, answers) if "silent" not in answer}
    found["silent"] = {name: answer["silent"] for name, answer in zip(asked, answers) if "silent" in answer}
    laws = [
        f"{name}: {law}" for name, each in found["engines"].items() for law in each["integrity"].get("laws_broken", ())
    ]
    found["breaches"] = [*found["breaches"], *laws]
    found["clean"] = not found["breaches"]
    return found


async def _ask(engine: AskEngine, pool: str, replica_id: str) -> dict[str, Any]:
    try:
        return await asyncio.wait_for(engine(pool, replica_id), ENGINE_S)
    except TimeoutError:
        return {"silent": f"no answer within {ENGINE_S:g} s"}
    except Exception as error:  # it died, or is just starting: the controller knows more
        return {"silent": f"{type(error).__name__}: {error}".splitlines()[0]}
