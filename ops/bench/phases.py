"""Where the time to first token goes, out of the service's own metrics: sums and counts, read before and after."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

from ops.bench.systems import Running

COUNTS = {"ray_pageferry_hand_over_seconds_count", "ray_pageferry_ttft_seconds_count"}
SECONDS = "ray_pageferry_phase_seconds_total"
FIRST_TOKEN = "first_token"
EXPORT_EVERY_S = 11.0  # Ray exports metrics every ten seconds
LABELS = {
    "admit": "admit: ticket from the controller",
    "call": "call to prefill and back",
    "prefill_replica": "prefill replica: lease, compute the prompt and seal its pages",
}
AFTER = {
    "hand_over": "hand_over: wait for the proof",
    "submit": "submit: call to decode, staging opened for reading, request in the engine",
    "second_token": "decode: pages opened, one step, the token to the client",
}
AFTER_FIRST = "(after the first token) "

Reading = dict[str, tuple[float, float]]  # phase -> seconds, count


def parse(text: str) -> Reading:
    """Seconds and counts by phase, over all processes that export them."""
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in text.splitlines():
        made = re.match(r"(\w+)\{(.*)\} (\S+)$", line)
        if made is None or made[1] not in {*COUNTS, SECONDS}:
            continue
        phase = re.search(r'phase="([^"]*)"', made[2])
        found[phase[1] if phase else FIRST_TOKEN][made[1] in COUNTS] += float(made[3])
    return {phase: (seconds, count) for phase, (seconds, count) in found.items()}


def _targets(running: Running) -> list[str]:
    """Where the Ray cluster of this system exports metrics; Ray writes that into its temporary folder."""
    for words in running.command_lines():
        for word in words:
            if word.startswith("--temp-dir="):
                file = Path(word.partition("=")[2]) / "prom_metrics_service_discovery.json"
                if file.exists():
                    return [target for group in json.loads(file.read_text()) for target in group["targets"]]
    return []


async def read(running: Running, first_tokens: int) -> Reading:
    """Once so many first tokens have been exported. Empty: they were not within half a minute."""
    for _ in range(4):
        now = await _scrape(running)
        if now.get(FIRST_TOKEN, (0.0, 0.0))[1] >= first_tokens:
            return now
        await asyncio.sleep(EXPORT_EVERY_S)
    return {}


async def _scrape(running: Running) -> Reading:
    total: Reading = {}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        for target in _targets(running):
            try:
                async with session.get(f"http://{target}/metrics") as answer:
                    for key, (value, count) in parse(await answer.text()).items():
                        before = total.get(key, (0.0, 0.0))
                        total[key] = (before[0] + value, before[1] + count)
            except (aiohttp.ClientError, TimeoutError):
                continue
    return total


def difference(before: Reading, after: Reading) -> dict[str, float]:
    """Mean seconds a request of each phase; nothing when one of the readings is."""
    means: dict[str, float] = {}
    if not before:
        return means
    for phase, (seconds, count) in after.items():
        old_seconds, old_count = before.get(phase, (0.0, 0.0))
        if count > old_count:
            means[phase] = (seconds - old_seconds) / (count - old_count)
    return means


def rows(means: dict[str, float], ttft_mean_s: float, gap_mean_s: float = 0.0) -> list[dict[str, Any]]:
    """The phases in their order; what is left on either side is named.

    The first add up to `ttft_mean_s`, those after the first token to `gap_mean_s`, the client's time between the first
    and the second.
    """
    if FIRST_TOKEN not in means or "prefill" not in means:
        return []
    means = {**means, "call": means["prefill"] - means["prefill_replica"]}
    known = [(label, means[phase]) for phase, label in LABELS.items()]
    known.append(("the frontend", means[FIRST_TOKEN] - sum(seconds for _, seconds in known)))
    known.append(("HTTP, tokenizing, detokenizing, client", ttft_mean_s - means[FIRST_TOKEN]))
    if gap_mean_s and {"hand_over", "submit"} <= means.keys():
        means["second_token"] = gap_mean_s - means["hand_over"] - means["submit"]
    known += [(AFTER_FIRST + label, means[phase]) for phase, label in AFTER.items() if phase in means]
    return [{"phase": label, "mean_s": seconds} for label, seconds in known]
