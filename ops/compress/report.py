"""What became of every tensor: `report.json`, and the same in words. Figures of the result alone, so that
two runs of one plan write one report; what a run took in time and memory is printed, not stored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ops.compress.families import family_of
from ops.compress.plan import Plan
from ops.compress.source import Checkpoint

WORST = 10


def build_report(checkpoint: Checkpoint, plan: Plan, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`records`: the work folder's, in the order of shards. Relative error is ||w - w'|| / ||w|| over a tensor."""
    kinds: dict[str, dict[str, Any]] = {}
    tensors: list[dict[str, Any]] = []
    for record in records:
        for name, kind, action, bytes_in, bytes_out, relative, largest in record["tensors"]:
            row = kinds.setdefault(kind, {"tensors": 0, "packed": 0, "bytes_in": 0, "bytes_out": 0, "errors": []})
            row["tensors"] += 1
            row["packed"] += action == "pack"
            row["bytes_in"] += bytes_in
            row["bytes_out"] += bytes_out
            if relative is not None:
                row["errors"].append(relative)
                tensors.append({"tensor": name, "kind": kind, "relative_error": relative, "largest_error": largest})
    by_kind = {}
    for kind, row in sorted(kinds.items(), key=lambda item: -item[1]["bytes_in"]):
        errors = sorted(row.pop("errors"))
        by_kind[kind] = {**row, "relative_error": _spread(errors)}
    codes = [sum(record["codes"][code] for record in records) for code in range(16)]
    return {
        "source": {"fingerprint": checkpoint.fingerprint, "model_type": checkpoint.model_type,
                   "family": family_of(checkpoint.model_type).name},
        "options": {"group_size": plan.options.group_size, "symmetric": plan.options.symmetric,
                    "clip_grid": list(plan.options.clip_grid), "method": plan.options.method},
        "bytes_in": sum(row["bytes_in"] for row in by_kind.values()),
        "bytes_out": sum(row["bytes_out"] for row in by_kind.values()),
        "by_kind": by_kind,
        "relative_error": _spread(sorted(row["relative_error"] for row in tensors)),
        "worst": sorted(tensors, key=lambda row: (-row["relative_error"], row["tensor"]))[:WORST],
        "codes": codes,
        "files": [{"file": record["file"], "bytes": record["bytes"], "sha256": record["sha256"]} for record in records],
        "tensors": tensors,
    }  # fmt: skip


def _spread(ordered: Sequence[float]) -> dict[str, float] | None:
    if not ordered:
        return None
    last = len(ordered) - 1
    return {
        "mean": math.fsum(ordered) / len(ordered),
        "median": ordered[last // 2],
        "p99": ordered[math.ceil(last * 0.99)],
        "max": ordered[-1],
    }


def render_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    options, source = report["options"], report["source"]
    form = "symmetric" if options["symmetric"] else "asymmetric"
    lines = [
        "# INT4 checkpoint",
        "",
        f"{source['model_type']} (family {source['family']}), INT4 {form}, group {options['group_size']}, "
        f"{options['method']}. Quality: see quality.json; errors of weights say little about a model's answers.",
        "",
        f"{_gib(report['bytes_in'])} -> {_gib(report['bytes_out'])} GiB "
        f"({report['bytes_out'] / report['bytes_in']:.3f})",
        "",
        "| kind | tensors | packed | GiB before | GiB after | relative error: median | p99 | max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind, row in report["by_kind"].items():
        error = row["relative_error"]
        unsaid = "rescaled by calibration | | " if row["packed"] else "as it was | | "
        figures = " | ".join(f"{error[key]:.4f}" for key in ("median", "p99", "max")) if error else unsaid
        lines.append(
            f"| {kind} | {row['tensors']} | {row['packed']} | {_gib(row['bytes_in'])} | {_gib(row['bytes_out'])} "
            f"| {figures} |"
        )
    lines += ["", "Worst ten tensors:", "", "| tensor | relative error | largest error |", "|---|---|---|"]
    lines += [
        f"| {row['tensor']} | {row['relative_error']:.4f} | {row['largest_error']:.4g} |" for row in report["worst"]
    ]
    return "\n".join(lines) + "\n"


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3f}"
