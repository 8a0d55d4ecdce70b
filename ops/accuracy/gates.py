"""From an evaluation's raw figures to gates, each with its interval; pure, and the same from a stored file.

A gate passes only when the upper end of its 95 % interval is inside the margin; a figure that is too uncertain does
not pass. All gates must pass, so none is corrected for their number: that can only make a pass rarer. Intervals of
means are bootstrapped over prompts or whole conversations, as positions of one are not independent. A share that got
lost (needles, tool calls) has the exact binomial bound of the losses less that of the gains, each at half the error.

Margins rest on what is known without the hand-over, of seeds that are not reported:

- One BF16 engine against itself with other batches, seed 100, small size: KL 0.001 nats, no flip in 64 positions; in an
  earlier run of 2,304 positions 1.0 % flips. A margin below this floor would fail an engine against itself.
- One FP8 engine, which is what serves wherever FP8 pages are turned on, on the demo model (135M, from a 4-bit file,
  scales 1.0; vLLM's CPU writer cuts mantissas off): KL 0.028 [0.020, 0.040], in conversations up to 0.041 [0.031,
  0.050] (seed 100); flips 18 % [16, 21] and perplexity 1.030 [1.007, 1.057] times BF16's (the earlier run). The
  absolute margins are a quarter above the upper ends. The hand-over of seed 100 was seen then, and not used. They are
  the demo model's: another model needs its own (`--margin`); published FP8 caches of large models change perplexity by
  well under 1 %.
- Independent of the model: of the same format, the hand-over may be at most a tenth further from BF16 than the FP8
  engine of the same run, in mean KL, and at most a quarter in each range of context. A planted fault is found by this
  gate: where the whole interval of its ratio is beyond the tenth.
- Needles and tool calls: a tenth of the prompts, which 48 prompts can show where none is lost.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ops.accuracy.tasks import EDGES
from ops.bench import stats
from ops.bench.stats import Interval

Raw = Mapping[str, Any]
Where = Callable[[Raw], bool]  # of an item
NLL, KL, FLIP, HIT = range(4)
REFERENCE, FP8, HAND_OVER = ARMS = ("bf16", "fp8", "hand-over")
AGAIN = "bf16-again"  # a control: nothing is planted
MARGINS = {
    "kl": 0.05,
    "flips": 0.26,
    "perplexity": 1.07,
    "kl, many turns": 0.06,
    "perplexity, many turns": 1.07,
    "kl beyond one FP8 engine": 1.10,
    "kl beyond one FP8 engine, by context": 1.25,
    "needles lost": 0.10,
    "tool calls lost": 0.10,
}
ABLE = 0.5  # share that the reference must do itself, or a loss could not show


@dataclass(frozen=True, slots=True)
class Gate:
    name: str
    value: float
    low: float
    high: float
    margin: float
    passed: bool
    reason: str
    num: int  # prompts or conversations


def of(raw: Raw, task: str, arm: str, column: int, where: Where = lambda item: True) -> list[list[float]]:
    """The column's positions by cluster; the clusters of two arms stand in the same order."""
    found: dict[str, list[float]] = {}
    for item in raw["items"]:
        if item["task"] == task and where(item):
            found.setdefault(item["group"], []).extend(row[column] for row in item["positions"][arm])
    return list(found.values())


def minus(a: Iterable[Sequence[float]], b: Iterable[Sequence[float]]) -> list[list[float]]:
    return [[x - y for x, y in zip(one, other, strict=True)] for one, other in zip(a, b, strict=True)]


def exp(interval: Interval) -> Interval:
    return Interval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high), interval.num)


def ratio(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], seed: int = 0) -> Interval:
    """Ratio of the means of a and b over the same clusters, which are resampled. ValueError below 8 clusters."""
    sums = [(sum(x), sum(y)) for x, y in zip(a, b, strict=True)]
    if len(sums) < 8:
        raise ValueError(f"{len(sums)} prompts; a bootstrap interval needs 8 at least")

    def quotient(picked: Sequence[tuple[float, float]]) -> float:
        below = sum(y for _, y in picked)
        return sum(x for x, _ in picked) / below if below > 0 else math.inf

    rng = random.Random(seed)
    drawn = [quotient(rng.choices(sums, k=len(sums))) for _ in range(stats.RESAMPLES)]
    return Interval(quotient(sums), stats.quantile(drawn, stats.LOW), stats.quantile(drawn, stats.HIGH), len(sums))


def binomial_bound(count: int, num: int, error: float, upper: bool) -> float:
    """Clopper and Pearson's bound of a share that was seen `count` times in `num`; one-sided at `error`."""
    if count == (num if upper else 0):
        return 1.0 if upper else 0.0

    def tail(share: float) -> float:
        below = range(count + 1) if upper else range(count, num + 1)
        return sum(math.comb(num, k) * share**k * (1 - share) ** (num - k) for k in below)

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        inside = tail(middle) > error
        low, high = (middle, high) if inside == upper else (low, middle)
    return (low + high) / 2


def lost(before: Sequence[bool], after: Sequence[bool]) -> Interval:
    """Share of prompts that went from right to wrong, less those that went the other way; conservative 95 % bounds."""
    num = len(before)
    losses = sum(a and not b for a, b in zip(before, after, strict=True))
    gains = sum(b and not a for a, b in zip(before, after, strict=True))
    error = (1 - 0.95) / 4  # two sides of two shares
    low = binomial_bound(losses, num, error, False) - binomial_bound(gains, num, error, True)
    high = binomial_bound(losses, num, error, True) - binomial_bound(gains, num, error, False)
    return Interval((losses - gains) / num, low, high, num)


def gate(name: str, found: Interval, margin: float, refused: str = "") -> Gate:
    passed = not refused and found.high <= margin
    reason = refused or f"{found.text(4)} {'is inside' if passed else 'is not inside'} {margin:g}"
    return Gate(name, found.value, found.low, found.high, margin, passed, reason, found.num)


def found_needles(raw: Raw, arm: str) -> list[bool]:
    return [all(x > 0 for x in positions) for positions in of(raw, "needle", arm, HIT)]


def share_lost(name: str, before: Sequence[bool], after: Sequence[bool], margin: float) -> Gate:
    """Of what was right before. It does not pass where the reference itself does less than `ABLE`."""
    able = sum(before) / len(before)
    refused = "" if able >= ABLE else f"the BF16 engine itself does {able:.0%}: a loss could not show"
    return gate(name, lost(before, after), margin, refused)


def contexts(raw: Raw) -> list[tuple[str, Where]]:
    """The ranges of prompt length, and which items are in each."""

    def within(low: int, high: int) -> Where:
        return lambda item: bool(low <= item["where"]["context"] < high)

    texts = [item for item in raw["items"] if item["task"] == "text"]
    ranges = [(f"{low} to {high} tokens", within(low, high)) for low, high in itertools.pairwise(EDGES)]
    return [(name, inside) for name, inside in ranges if any(map(inside, texts))]


def build(raw: Raw, arm: str = HAND_OVER, margins: Mapping[str, float] = MARGINS) -> list[Gate]:
    """Every gate of one arm against the BF16 engine."""
    made = []
    for task, suffix in (("text", ""), ("turns", ", many turns")):
        made.append(gate(f"kl{suffix}", stats.cluster_bootstrap(of(raw, task, arm, KL)), margins[f"kl{suffix}"]))
        worse = minus(of(raw, task, arm, NLL), of(raw, task, REFERENCE, NLL))
        name = f"perplexity{suffix}"
        made.append(gate(name, exp(stats.cluster_bootstrap(worse)), margins[name]))
    made.append(gate("flips", stats.cluster_bootstrap(of(raw, "text", arm, FLIP)), margins["flips"]))
    name = "kl beyond one FP8 engine"
    made.append(gate(name, ratio(of(raw, "text", arm, KL), of(raw, "text", FP8, KL)), margins[name]))
    for where, inside in contexts(raw):
        found = ratio(of(raw, "text", arm, KL, inside), of(raw, "text", FP8, KL, inside))
        made.append(gate(f"{name}, {where}", found, margins[f"{name}, by context"]))
    made.append(
        share_lost("needles lost", found_needles(raw, REFERENCE), found_needles(raw, arm), margins["needles lost"])
    )
    if arm in raw["calls"]:
        before, after = ([bool(call["valid"]) for call in raw["calls"][name]] for name in (REFERENCE, arm))
        made.append(share_lost("tool calls lost", before, after, margins["tool calls lost"]))
    return made


def controls(raw: Raw, margins: Mapping[str, float] = MARGINS) -> list[dict[str, Any]]:
    """What each planted fault looks like, and the BF16 engine once more, beside the FP8 engine on the same passages."""
    single: dict[str, list[float]] = {
        item["group"]: [row[KL] for row in item["positions"][FP8]] for item in raw["items"] if item["task"] == "text"
    }
    made = []
    for fault, items in raw["controls"].items():
        kl = [[row[KL] for row in item["positions"]] for item in items]
        flips = stats.cluster_bootstrap([[row[FLIP] for row in item["positions"]] for item in items])
        times = ratio(kl, [single[item["group"]] for item in items])
        found = times.low > margins["kl beyond one FP8 engine"]
        figures = {"kl": asdict(stats.cluster_bootstrap(kl)), "flips": asdict(flips), "times": asdict(times)}
        made.append({"fault": fault, **figures, "found": found})
    return made


def sees(rows: Sequence[Raw]) -> bool:
    """Whether the evaluator finds every planted fault, and none where there is none."""
    return all(row["found"] == (row["fault"] != AGAIN) for row in rows)


def breakdown(raw: Raw) -> list[str]:
    """Markdown: each arm on texts by context, on conversations by turn, on needles by length and depth, on calls."""

    def clustered(groups: list[list[float]]) -> str:
        if len(groups) < 8:
            return f"{sum(map(sum, groups)) / sum(map(len, groups)):.4f}"
        return stats.cluster_bootstrap(groups).text(4)

    lines = ["| text | arm | perplexity | KL to BF16, nats | top token differs |", "|---|---|---:|---:|---:|"]
    turns = sorted({item["where"]["turn"] for item in raw["items"] if item["task"] == "turns"})
    rows = [("text", f"passages, {where}", inside) for where, inside in contexts(raw)]
    rows += [("turns", f"turn {turn:.0f}", lambda item, turn=turn: item["where"]["turn"] == turn) for turn in turns]
    for task, where, inside in rows:
        for arm in ARMS:
            nll = of(raw, task, arm, NLL, inside)
            cells = [f"{math.exp(sum(map(sum, nll)) / sum(map(len, nll))):.2f}"]
            cells += ["", ""] if arm == REFERENCE else [clustered(of(raw, task, arm, c, inside)) for c in (KL, FLIP)]
            lines.append(f"| {where} | {arm} | {' | '.join(cells)} |")
    lines += ["", f"| needle, tokens | depth | {' | '.join(ARMS)} |", "|---:|---:|---|---|---|"]
    places = sorted({(i["where"]["context"], i["where"]["depth"]) for i in raw["items"] if i["task"] == "needle"})
    for place in places:
        members = [
            i for i in raw["items"] if i["task"] == "needle" and (i["where"]["context"], i["where"]["depth"]) == place
        ]
        shares = [sum(all(row[HIT] for row in i["positions"][arm]) for i in members) for arm in ARMS]
        found = " | ".join(f"{share} of {len(members)}" for share in shares)
        lines.append(f"| {place[0]:.0f} | {place[1]:g} | {found} |")
    lines += ["", "| tool calls | valid | right |", "|---|---:|---:|"]
    for arm, calls in raw["calls"].items():
        lines.append(f"| {arm} | {sum(c['valid'] for c in calls)} of {len(calls)} | {sum(c['right'] for c in calls)} |")
    return lines


def tables(raw: Raw, margins: Mapping[str, float] = MARGINS) -> str:
    """The gates, what planted faults look like, and the arms in parts; as Markdown."""
    lines = ["| gate | value, 95 % interval | margin | passed |", "|---|---:|---:|---|"]
    for g in build(raw, margins=margins):
        interval = Interval(g.value, g.low, g.high, g.num).text(4)
        said = "yes" if g.passed else f"NO: {g.reason}"
        lines.append(f"| {g.name} | {interval} | {g.margin:g} | {said} |")
    lines += ["", "| planted | KL, nats | times one FP8 engine's | top token differs | found |"]
    lines.append("|---|---:|---:|---:|---|")
    for row in controls(raw, margins):
        figures = " | ".join(Interval(**row[key]).text(3) for key in ("kl", "times", "flips"))
        planted = "nothing, one BF16 engine again" if row["fault"] == AGAIN else row["fault"]
        lines.append(f"| {planted} | {figures} | {'yes' if row['found'] else 'no'} |")
    return "\n".join([*lines, "", *breakdown(raw)])
