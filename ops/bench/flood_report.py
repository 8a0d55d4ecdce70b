"""The table and the picture of `ops.bench.flood`. matplotlib is imported only for a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    """Occupancy, target and replicas, queue, TTFT of one repeat over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(4, 1, figsize=(9, 9), sharex=True, layout="constrained")
    samples = row["samples"]
    seconds = [each["at_s"] for each in samples]
    for pool, colour in (("decode", "C0"), ("prefill", "C1")):
        held = [each[pool]["blocks_held"] / (each[pool]["blocks_total"] or 1) for each in samples]
        axes[0].plot(seconds, held, color=colour, label=pool)
        for name, style in (("target", ":"), ("ready", "-")):
            sizes = [each[pool][name] for each in samples]
            axes[1].step(seconds, sizes, style, where="post", color=colour, label=f"{pool}, {name}")
    axes[2].plot(seconds, [each["queue"] for each in samples], color="C2")
    good = [answer for answer in row["answers"] if not answer["error"]]
    for first, colour, label in ((False, "C3", "flood"), (True, "C4", "streams that go on")):
        mine = [answer for answer in good if (answer["index"] >= 1_000) is first]
        axes[3].scatter([a["start_s"] for a in mine], [a["ttft_s"] for a in mine], s=12, color=colour, label=label)
    for axis, name in zip(axes, ("KV occupancy", "replicas", "requests in the queue", "TTFT, s")):
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylim(0, 1)
    for axis in (axes[0], axes[1], axes[3]):
        axis.legend(fontsize=8)
    axes[3].set_xlabel("seconds since the flood began")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
