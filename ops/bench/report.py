"""`pageferry report`: results files as one page, in Markdown and as HTML with its plots inside; two commits compared.

A page is computed from raw requests. Where a gate is red, of a benchmark or of an accuracy run beside it, the page says
what is wrong and shows no speed.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt

from cluster.json_output import print_json
from cluster.quality import content_sha256
from ops.accuracy import gates
from ops.bench import drive, facts, figures, noise, picture, power, stats
from ops.bench.figures import FIGURES, Raw
from ops.bench.plan import BASELINE, Plan
from ops.bench.rounds import Visit, breaches
from ops.bench.systems import SystemSpec

FORMAT = "pageferry-bench-1"
EVAL_FORMAT = "pageferry-eval-1"
STORE = facts.ROOT / "ops" / "results" / "bench"
EFFECT = 0.02
PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.45 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1rem 0 }} td, th {{ border: 1px solid #ccc; padding: .2rem .6rem }}
code {{ background: #f3f3f3 }} svg {{ max-width: 100%; height: auto }}
</style></head><body>{body}</body></html>
"""


class ReportError(ValueError):
    """A results file that cannot be shown, and why."""


def read(file: Path) -> dict[str, Any]:
    try:
        tree = json.loads(file.read_text())
        kind = tree["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ReportError(f"{file} is not a results file: {error!r}") from None
    if kind not in (FORMAT, EVAL_FORMAT):
        raise ReportError(f"{file} has format {kind!r}; this version reads {FORMAT} and {EVAL_FORMAT}")
    return dict(tree)


def results(
    plan: Plan, known: Raw, specs: Sequence[SystemSpec], visits: Sequence[Visit], words: Sequence[int], model: str
) -> dict[str, Any]:
    """A results file: what was fixed, named by hashes, and every request."""
    prompts = [
        drive.digest(drive.sessions(load, words, plan.seed, f"round {number}", 4))
        for load in plan.loads
        for number in range(plan.rounds)
    ]
    tree: dict[str, Any] = {
        "format": FORMAT,
        "name": plan.name,
        "question": plan.question,
        "facts": known,
        "plan": plan.model_dump(mode="json"),
        "plan_sha256": plan.digest(),
        "model_sha256": content_sha256(Path(model)) if (Path(model) / "config.json").is_file() else model,
        "prompts_sha256": hashlib.sha256("".join(prompts).encode()).hexdigest()[:16],
        "arms": {s.name: {"title": s.title, "argv": list(s.argv), "environment": s.environment} for s in specs},
        "loads": {name: load.model_dump(mode="json") for load in plan.loads for name in load.names},
        "breaches": breaches(visits),
        "visits": [asdict(visit) for visit in visits],
    }
    return tree | {"calibration": [] if tree["breaches"] else figures.calibration(tree)}


def red_gates(files: Sequence[Raw]) -> list[str]:
    """Every breach of a correctness gate and every accuracy gate that did not pass."""
    found: list[str] = []
    for raw in files:
        found += raw["breaches"] if raw["format"] == FORMAT else []
        found += [f"accuracy, {g['name']}: {g['reason']}" for g in raw.get("gates", ()) if not g["passed"]]
    return found


def markdown(files: Sequence[Raw], plots: Sequence[str] = ()) -> str:
    """The page; `plots[n]` stands where the n-th benchmark's picture goes."""
    red = red_gates(files)
    lines = ["# Report", ""]
    if red:
        lines += ["**A gate is red, so no speed is shown.**", "", *(f"- {text}" for text in red[:40])]
        lines += [f"- ... and {len(red) - 40} more"] if len(red) > 40 else []
    for number, raw in enumerate(files):
        lines += ["", *_header(raw)]
        if raw["format"] == EVAL_FORMAT:
            lines += _accuracy(raw)
        elif not red:
            lines += benchmark(raw, plots[number] if plots else "")
    return "\n".join(lines) + "\n"


def _header(raw: Raw) -> list[str]:
    known = raw["facts"]
    return [f"## {raw['name']}", "", f"{raw['question']}", "", f"`{known['command']}`", "", facts.one_line(known), ""]


def benchmark(raw: Raw, plot: str = "") -> list[str]:
    """One plan: what was fixed, figures, ratios, the published row beside ours, and what could have been seen."""
    made, plan = figures.build(raw), raw["plan"]
    order = "all arms up, taking turns" if plan["together"] else "each arm started anew in each round"
    num = len({visit["round"] for visit in raw["visits"]})
    lines = [
        f"{num} of {plan['rounds']} rounds in rotated order, {order}; warm-up of {plan['warm_up_requests']} requests",
        f"cut; seed {plan['seed']}.",
        f"Plan {raw['plan_sha256']}, model {raw['model_sha256'][:16]}, prompts {raw['prompts_sha256']}.",
        "Gate green: every answer complete, usage exact, repeated greedy answers equal.",
        "",
        *figures.table(raw, made),
        "",
        *([plot, ""] if plot else []),
    ]
    if made["ratios"]:
        lines += [
            *figures.ratio_table(made),
            "",
            f"Ratios are geometric means over {num} paired rounds, intervals Student's t on log ratios,",
            f"each 95 % by itself. Equal: the interval lies within {plan['margin']:.0%}.",
            "",
        ]
    lines += _published(raw, made) + _counts(raw, made) + _detectable(raw, made)
    foreign = max(row["foreign_cpu"] for visit in raw["visits"] for row in visit["loads"].values())
    return [*lines, "", noise.warning(foreign)]


def _published(raw: Raw, made: Raw) -> list[str]:
    plan = raw["plan"]
    if not plan["published"]:
        return []
    lines = ["| published | there | here |", "|---|---:|---:|"]
    for row in plan["published"]:
        here = next(
            (
                stats.Interval(r["value"], r["low"], r["high"], r["num"]).text(3)
                for r in made["ratios"]
                if (r["arm"], r["load"], r["figure"]) == (row["arm"], row["load"], row["figure"])
            ),
            "not measured",
        )
        lines.append(f"| {row['what']} | {row['ratio']:.3f} | {here} |")
    return [*lines, "", f"Shown here: {plan['shows']}", "", f"Not shown here: {plan['cannot_show']}", ""]


def _counts(raw: Raw, made: Raw) -> list[str]:
    shown = [figure for figure in FIGURES if figure.higher_is_better is None]
    lines = [
        f"| load | arm | {' | '.join(f'{f.title} {f.unit}'.strip() for f in shown)} | cost of a million output tokens |"
    ]
    lines.append("|---|---|" + "---:|" * (len(shown) + 1))
    for load in raw["loads"]:
        for arm in raw["arms"]:
            row = made["arms"][arm][load]
            cells = ["" if row[f.key] is None else f"{row[f.key] * f.scale:.4g}" for f in shown]
            cost = row["cost_per_million_output"]
            lines.append(f"| {load} | {arm} | {' | '.join(cells)} | {'' if cost is None else f'{cost:.3f}'} |")
    same = [f"{arm} {share:.1%}" for arm, share in made["same_answers"].items()]
    return [*lines, "", *([f"Greedy answers equal to the baseline's: {', '.join(same)}.", ""] if same else [])]


def _detectable(raw: Raw, made: Raw) -> list[str]:
    arm = figures.spread_arm(raw)
    if not arm:
        return ["One arm alone, so the smallest difference that this plan can find is not known."]
    lines = [
        f"| load | tok/s: smallest difference found in 80 % of runs, by the spread of {arm} / baseline "
        "| A/A and a planted 2 %, resampled from it |",
        "|---|---:|---|",
    ]
    speed = next(figure for figure in FIGURES if figure.key == "tokens_per_s")
    for load in raw["loads"]:
        least = made["detectable"][load]["tokens_per_s"]
        logs = _centred(figures.log_ratios(raw, arm, BASELINE, load, speed))
        said = power.run(logs, EFFECT).text() if len(logs) >= 4 else "fewer than 4 rounds"
        lines.append(f"| {load} | {'' if least is None else f'{least:.1%}'} | {said} |")
    return lines


def _centred(logs: list[float]) -> list[float]:
    """Without their mean: what is left is how rounds differ."""
    mean = statistics.fmean(logs) if logs else 0.0
    return [log - mean for log in logs]


def _accuracy(raw: Raw) -> list[str]:
    if "items" in raw:
        return gates.tables(raw, raw["margins"]).splitlines()
    lines = ["| gate | value, 95 % interval | margin | passed | command |", "|---|---:|---:|---|---|"]
    for g in raw["gates"]:
        cells = (
            f"{g['value']:.4g} [{g['low']:.4g}, {g['high']:.4g}] | {g['margin']:g} | {'yes' if g['passed'] else 'NO'}"
        )
        lines.append(f"| {g['name']} | {cells} | `{raw['facts']['command']}` |")
    return lines


def html(files: Sequence[Raw]) -> str:
    """One file with everything inside: no script, no address elsewhere."""
    marks = [f"@@PLOT {number}@@" for number in range(len(files))]
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(markdown(files, marks))
    for mark, raw in zip(marks, files):
        if f"<p>{mark}</p>" in body:
            body = body.replace(f"<p>{mark}</p>", plot(raw))
    return PAGE.format(title="pageferry report", body=body)


def plot(raw: Raw) -> str:
    """Each ratio of throughput and first token with its interval, as SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made = figures.build(raw)
    rows = [row for row in made["ratios"] if row["figure"] in ("tokens_per_s", "ttft_p50", "tpot_p50")]
    if not rows:
        return ""
    figure, axis = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.2))
    for at, row in enumerate(rows):
        low, high = max(row["low"], 0.05), min(row["high"], 20.0)
        axis.plot([low, high], [at, at], color="#4c72b0")
        axis.plot([row["value"]], [at], "o", color="#4c72b0")
    axis.set_yticks(range(len(rows)), [f"{r['arm']}, {r['load']}: {r['figure']}" for r in rows], fontsize=7)
    axis.axvline(1.0, color="black", lw=0.8)
    axis.set_xscale("log")
    axis.set_xlabel("ratio to the baseline, 95 % interval")
    axis.invert_yaxis()
    figure.tight_layout()
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    pyplot.close(figure)
    return out.getvalue()[out.getvalue().index("<svg") :]


def pictures(files: Sequence[Raw], out: Path) -> list[str]:
    """Draws each benchmark's figures beside the page `out`, and returns what the page says in their place."""
    names = []
    for number, raw in enumerate(files):
        name = f"{out.stem}{f'-{number + 1}' if number else ''}.png"
        if raw["format"] == FORMAT:
            picture.plan(raw, out.with_name(name))
        names.append(f"![{raw['name']}]({name})")
    return names


def find(store: Path, what: str) -> Path:
    """A file, or the newest result in the store whose commit begins with `what`."""
    if Path(what).is_file():
        return Path(what)
    known = sorted(store.glob("*.json"), key=lambda file: file.stat().st_mtime)
    mine = [file for file in known if read(file)["facts"]["commit"].startswith(what)]
    if not mine:
        raise ReportError(f"{what} is no file, and no result in {store} is of such a commit")
    return mine[-1]


def compare(a: Raw, b: Raw) -> dict[str, Any]:
    """a / b of every arm, load and figure that both have. Rounds of two commits were not measured beside each other, so
    intervals are unpaired and the machine's own drift is part of them. ReportError when the plans differ."""
    if a["plan_sha256"] != b["plan_sha256"]:
        raise ReportError(
            f"the plans differ ({a['plan_sha256']}, {b['plan_sha256']}): their figures are not comparable"
        )
    if red := red_gates([a, b]):
        raise ReportError(f"a gate is red, so no speed is compared: {red[0]}")
    rows = []
    for arm in a["arms"]:
        for load in a["loads"]:
            for figure in figures.COMPARED:
                both = [figures.rounds_of(raw, arm, load, figure) for raw in (a, b)]
                if all(both) and all(value for values in both for value in values):
                    found = stats.unpaired_ratio(*[[float(x or 0) for x in values] for values in both])
                    said = figures.words_for(found, figure, a["plan"]["margin"])
                    rows.append({"arm": arm, "load": load, "figure": figure.key, "says": said, "ratio": found})
    return {"a": a["facts"]["commit"], "b": b["facts"]["commit"], "rows": rows}


def comparison_table(made: Mapping[str, Any]) -> str:
    lines = [
        f"{made['a']} / {made['b']}",
        "",
        "| arm | load | figure | ratio, 95 % | shows |",
        "|---|---|---|---:|---|",
    ]
    for row in made["rows"]:
        if row["figure"] in figures.HEADLINE:
            lines += [f"| {row['arm']} | {row['load']} | {row['figure']} | {row['ratio'].text(3)} | {row['says']} |"]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pageferry report", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="results of `pageferry bench` and `pageferry eval`")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="two results files, or commits in the store")
    parser.add_argument("--store", type=Path, default=STORE, help="folder of results (default: ops/results/bench)")
    parser.add_argument("--out", type=Path, help="also write OUT.md and OUT.html")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    try:
        if args.compare:
            made = compare(*(read(find(args.store, what)) for what in args.compare))
            rows = [{**row, "ratio": asdict(row["ratio"])} for row in made["rows"]]
            print_json({**made, "rows": rows}) if args.json else print(comparison_table(made))
            return 0
        files = [read(file) for file in args.files or sorted(args.store.glob("*.json"))]
        if not files:
            raise ReportError(f"no results file was named, and {args.store} has none")
    except ReportError as error:
        print(f"pageferry report: {error}", file=sys.stderr)
        return 2
    text = markdown(files)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".md").write_text(markdown(files, [] if red_gates(files) else pictures(files, args.out)))
        args.out.with_suffix(".html").write_text(html(files))
    if args.json:
        shown = [] if red_gates(files) else [figures.build(raw) for raw in files if raw["format"] == FORMAT]
        print_json({"red": red_gates(files), "figures": shown})
    else:
        print(text)
    return 1 if red_gates(files) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
