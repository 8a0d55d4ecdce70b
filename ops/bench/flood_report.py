"""The table and the picture of `ops.bench.flood`. matplotlib is imported only for a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

POOLS = {"decode": "C0", "prefill": "C1"}
HEAD = (
    "repeat",
    "seconds",
    "requests",
    "lost",
    "decode's target",
    "prefill's",
    "tickets on the leaving replica",
    "streams while it left",
    "of these cut",
    "TTFT p50 s",
    "longest s",
)


def table(record: list[dict[str, Any]]) -> str:
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---:|" * len(HEAD)]
    for row in record:
        waits = sorted(answer["ttft_s"] for answer in row["answers"] if not answer["error"])
        cells = [row["number"], row["seconds"], row["requests"], row["lost"]]
        cells += [" ".join(str(size) for size in row["targets"][pool]) for pool in ("decode", "prefill")]
        cells += [row["tickets_on_leaving"], row["streams_while_leaving"], row["streams_cut"]]
        cells += [f"{waits[len(waits) // 2]:.1f}", f"{waits[-1]:.1f}"] if waits else ["-", "-"]
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
        lines += [f"\nRepeat {row['number']}: {problem}\n" for problem in row["problems"]]
    names = ("requests", "lost", "scale_downs", "streams_while_leaving", "streams_cut")
    total = {name: sum(row[name] for row in record) for name in names}
    lines.append(
        f"\n{len(record)} repeats: {total['lost']} of {total['requests']} requests lost; {total['scale_downs']} "
        f"scale-downs, {total['streams_cut']} of {total['streams_while_leaving']} streams cut."
    )
    return "\n".join(lines) + "\n"


def draw(row: dict[str, Any], path: Path) -> None:
    """Occupancy, targets and replicas, queue, TTFT of one repeat over time, with every decision and its reason."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(11, 11), sharex=True, layout="constrained")
    samples, good = row["samples"], [answer for answer in row["answers"] if not answer["error"]]
    seconds = [each["at_s"] for each in samples]
    for pool, colour in POOLS.items():
        for name, line in (("held", {}), ("reserved", {"ls": ":", "alpha": 0.8})):
            share = [100 * each[pool][f"blocks_{name}"] / (each[pool]["blocks_total"] or 1) for each in samples]
            axes[0].plot(seconds, share, color=colour, label=f"{pool}, {name}", **line)
        for name, style in (("target", {"ls": "--"}), ("ready", {"lw": 2.5, "alpha": 0.6})):
            sizes = [float("nan") if each[pool][name] is None else each[pool][name] for each in samples]
            axes[1].step(seconds, sizes, where="post", color=colour, label=f"{pool}, {name}", **style)
    draining = [each["decode"]["draining"] for each in samples]
    axes[1].fill_between(seconds, draining, step="post", color="C0", alpha=0.15, label="decode, leaving")
    axes[2].fill_between(seconds, [each["queue"] for each in samples], step="post", color="C2", alpha=0.6)
    for first, colour, label in ((False, "C3", "flood"), (True, "C4", "streams that go on")):
        mine = [answer for answer in good if (answer["index"] >= 1_000) is first]
        came = [a["start_s"] + a["ttft_s"] for a in mine]
        axes[3].scatter(came, [a["ttft_s"] for a in mine], s=14, color=colour, label=label)
    names = ("KV pages, %", "replicas", "requests in the queue", "TTFT, s, where it ended")
    for axis, name in zip(axes, names):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
        axis.set_ylim(bottom=0)
    most = max(each[pool]["ready"] for each in samples for pool in POOLS)
    axes[0].set_ylim(0, 130)
    axes[0].set_yticks(range(0, 101, 20))
    axes[1].set_ylim(0, 1.5 * most)
    axes[1].set_yticks(range(1 + most))
    for axis in (axes[0], axes[1], axes[3]):
        axis.legend(fontsize=8, loc="upper right", ncols=3)
    axes[3].set_xlabel("\n".join(["seconds since the flood began", *_marked(axes, row["decisions"])]), fontsize=9)
    figure.suptitle(
        f"{row['requests']} requests, {row['lost']} lost; {row['scale_downs']} scale-downs of decode, "
        f"{row['streams_cut']} of {row['streams_while_leaving']} streams cut", fontsize=11,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _marked(axes: Any, decisions: list[dict[str, Any]]) -> list[str]:
    """A line in every panel at each decision; returns what each number stands for."""
    lines = []
    for number, each in enumerate(decisions, 1):
        for axis in axes:
            axis.axvline(each["at_s"], color="black", lw=0.8, ls=":")
        axes[0].text(each["at_s"], 103 if number % 2 else 116, str(number), ha="center", fontsize=9)
        what = f"{each['pool']} {each['current']} to {each['target']}"
        lines += textwrap.wrap(f"{number}: {each['at_s']:.0f} s, {what}: {each['reason']}", 125)
    return lines
