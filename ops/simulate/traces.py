"""Arrivals and lengths: Poisson, bursts, a production-shaped length distribution, replay from a file. Seeded."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.simulate.world import SECOND


@dataclass(frozen=True, slots=True)
class Arrival:
    at_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    session: str = ""
    tenant: str = ""
    prefix_hashes: tuple[int, ...] = ()
    num_sequences: int = 1  # n of the API
    recovery: str = "resume"  # resume, replay, none: how it survives the loss of its decode replica
    ending: str = "eos"  # eos: the model ends it; length: max_tokens does; stop: a stop string, found by the frontend

    def length_of(self, sequence: int) -> int:
        """Output tokens of that sequence when nothing goes wrong."""
        return max(1, self.output_tokens - sequence * (self.output_tokens // 4))

    def limit_of(self, sequence: int) -> int:
        """The sequence's max_tokens."""
        return self.length_of(sequence) if self.ending == "length" else max(self.max_tokens, self.output_tokens + 8)


class TraceError(ValueError):
    """A trace that cannot be read or made; the message is for the person who asked for it."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal token counts with a heavy tail, cut to a range: the shape that production logs show."""

    prompt_median: float = 1_000
    prompt_sigma: float = 1.0
    output_median: float = 200
    output_sigma: float = 0.8
    prompt_max: int = 32_768
    output_max: int = 4_096

    def draw(self, dice: random.Random) -> tuple[int, int]:
        prompt = min(
            max(1, round(dice.lognormvariate(math.log(self.prompt_median), self.prompt_sigma))), self.prompt_max
        )
        output = min(
            max(1, round(dice.lognormvariate(math.log(self.output_median), self.output_sigma))), self.output_max
        )
        return prompt, output


def poisson(
    dice: random.Random, rate_per_s: float, seconds: float, lengths: Lengths, page_tokens: int = 32
) -> list[Arrival]:
    return list(_arrive(dice, lambda _: rate_per_s, rate_per_s, seconds, lengths, page_tokens))


def bursts(
    dice: random.Random,
    quiet_per_s: float,
    burst_per_s: float,
    every_s: float,
    burst_s: float,
    seconds: float,
    lengths: Lengths,
    page_tokens: int = 32,
) -> list[Arrival]:
    """Poisson at `quiet_per_s`, and for `burst_s` of every `every_s` at `burst_per_s`, beginning with quiet."""

    def rate(now_s: float) -> float:
        return burst_per_s if now_s % every_s >= every_s - burst_s else quiet_per_s

    return list(_arrive(dice, rate, max(quiet_per_s, burst_per_s), seconds, lengths, page_tokens))


def _arrive(
    dice: random.Random, rate: Any, most: float, seconds: float, lengths: Lengths, page_tokens: int
) -> Iterator[Arrival]:
    """Thinning of a Poisson process at `most` a second."""
    now_s = 0.0
    while True:
        now_s += dice.expovariate(most)
        if now_s >= seconds:
            return
        if dice.random() * most > rate(now_s):
            continue
        prompt, output = lengths.draw(dice)
        yield Arrival(
            at_ns=int(now_s * SECOND),
            prompt_tokens=prompt,
            output_tokens=output,
            max_tokens=max(output, 2 ** math.ceil(math.log2(output + 1))),
            session=f"s{dice.randrange(50)}" if dice.random() < 0.5 else "",
            tenant=f"t{dice.randrange(3)}",
            prefix_hashes=_hashes(dice, prompt // page_tokens),
        )


def _hashes(dice: random.Random, pages: int) -> tuple[int, ...]:
    """Some prompts begin like others do: a few well-known beginnings, then something of their own."""
    family = dice.randrange(8)
    common = min(pages, dice.choice((0, 0, 4, 16, 64)))
    own = dice.getrandbits(48)
    return tuple([(family << 32) + page for page in range(common)] + [own + page for page in range(pages - common)])


def replay(path: str | Path) -> list[Arrival]:
    """JSON lines: `{"at_s": 0.5, "prompt_tokens": 900, "output_tokens": 120}`; further fields as in `Arrival`."""
    found = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            output = int(row["output_tokens"])
            arrival = Arrival(
                at_ns=int(float(row["at_s"]) * SECOND),
                prompt_tokens=int(row["prompt_tokens"]),
                output_tokens=output,
                max_tokens=int(row.get("max_tokens", output)),
                session=str(row.get("session", "")),
                tenant=str(row.get("tenant", "")),
                prefix_hashes=tuple(int(value) for value in row.get("prefix_hashes", ())),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{path} line {number}: {error!r}; each line needs at_s, prompt_tokens, output_tokens"
            ) from None
        if arrival.prompt_tokens < 1 or arrival.output_tokens < 1:
            raise TraceError(f"{path} line {number}: prompt_tokens and output_tokens must be at least 1")
        found.append(arrival)
    return sorted(found, key=lambda arrival: arrival.at_ns)
