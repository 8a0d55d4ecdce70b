"""Where the time to first token goes, out of the service's own metrics: sums and counts, read before and after."""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp

from ops.measure.systems import Running

PHASE = "ray_pageferry_hand_over_seconds"
FIRST_TOKEN = "ray_pageferry_ttft_seconds"
EXPORT_EVERY_S = 11.0  # Ray exports metrics every ten seconds
LABELS = {
    "admit": "admit: ticket from the controller",
    "prefill": "prefill: call, compute and seal the prompt, answer",
    "hand_over": "hand_over: wait for the proof after that",
    "submit": "submit: call to decode, staging opened for reading, request in the engine",
}

Reading = dict[tuple[str, str], tuple[float, float]]  # (metric, phase) -> sum, count


def parse(text: str) -> Reading:
    """Sums and counts of the histograms, over all processes that export them."""
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for line in text.splitlines():
        made = re.match(rf"({PHASE}|{FIRST_TOKEN})_(sum|count)\{{(.*)\}} (\S+)$", line)
        if made is None:
            continue
        metric, kind, labels, value = made.groups()
        phase = re.search(r'phase="([^"]*)"', labels)
        found[metric, phase[1] if phase else ""][kind == "count"] += float(value)
    return {key: (total, count) for key, (total, count) in found.items()}


def _targets(running: Running) -> list[str]:
    """Where the Ray cluster of this system exports metrics; Ray writes that into its temporary folder."""
    for words in running.command_lines():
        for word in words:
            if word.startswith("--temp-dir="):
                file = Path(word.partition("=")[2]) / "prom_metrics_service_discovery.json"
                if file.exists():
                    return [target for group in json.loads(file.read_text()) for target in group["targets"]]
    return []


async def read(running: Running) -> Reading:
    """Waits until every process has exported what it counted up to now, then reads. Empty: it exports nothing."""
    previous: Reading | None = None
    for _ in range(4):
        await asyncio.sleep(EXPORT_EVERY_S)
        now = await _scrape(running)
        if now == previous:
            break
        previous = now
    return now


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
    """Mean seconds a request of each phase, and of the first token as the frontend saw it ("")."""
    means = {}
    for (_, phase), (total, count) in after.items():
        metric = PHASE if phase else FIRST_TOKEN
        old_total, old_count = before.get((metric, phase), (0.0, 0.0))
        if count > old_count:
            means[phase] = (total - old_total) / (count - old_count)
    return means


def rows(means: dict[str, float], ttft_mean_s: float) -> list[dict[str, Any]]:
    """The phases in their order; what is left on either side is named."""
    if "" not in means:
        return []
    known = [(label, means[phase]) for phase, label in LABELS.items() if phase in means]
    inside = means[""] - sum(seconds for _, seconds in known)
    known.append(("open, first decode step, output to the frontend", inside))
    known.append(("HTTP, tokenizing, detokenizing, client", ttft_mean_s - means[""]))
    return [{"phase": label, "mean_s": seconds} for label, seconds in known]
