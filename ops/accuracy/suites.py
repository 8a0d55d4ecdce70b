"""`pageferry eval suites`: generative suites through lm-evaluation-harness, at the service and at one BF16 engine.

    pageferry eval suites local-cpu --data gsm8k=cases.jsonl --data mmlu=mmlu.jsonl --limit 60 --lm-eval FOLDER

Both are started here, one after the other, with the same settings, or named by `--url` and `--against`. Every prompt is
handed over (`admission.local_prefill_max_tokens=0`); that is why answers are generated, not ranked: log-probabilities
of prompts are served by decode alone. Answers are paired by question, and a suite's gate is the share of right answers
that got lost. A data file has one JSON object a line: `question` or `prompt` or `ctx`; and `expected` or `answer`, or
`choices` or `endings` or `options` with `expected_index`, or `answer_a` ... with `correct_answer`.

lm-evaluation-harness is no dependency: `pip install --target FOLDER --no-deps lm-eval datasets evaluate ...`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from cluster.json_output import print_json
from cluster.spec import ClusterSpec, SpecError, parse_overrides
from ops.accuracy import gates

LETTERS = "ABCDEFGHIJ"
SHOTS = 3
MARGIN = 0.10  # of right answers lost; as for needles and tool calls
HANDED_OVER = "admission.local_prefill_max_tokens=0"


def question(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """(question, worked answer, short answer) of one row of a data file. ValueError names what is missing."""
    text = next((str(row[key]) for key in ("question", "prompt", "ctx") if row.get(key)), None)
    choices = next((row[key] for key in ("choices", "endings", "options") if row.get(key)), None)
    if choices is None and "answer_a" in row:
        choices = [row[f"answer_{letter}"] for letter in "abcd"]
    if text is None:
        raise ValueError(f"a row needs question, prompt or ctx; it has {', '.join(row)}")
    if choices is None:
        short = next((str(row[key]) for key in ("expected", "answer") if key in row), None)
        if short is None:
            raise ValueError(f"a row needs expected or answer, or choices; it has {', '.join(row)}")
        short = short.rpartition("####")[2].strip()
        worked = str(row.get("upstream_answer") or row.get("answer") or short)
        return f"Question: {text}\nAnswer:", f" {worked}", short
    right = row["correct_answer"] if "correct_answer" in row else LETTERS[int(row["expected_index"])]
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices))
    return f"Question: {text}\n{listed}\nAnswer:", f" {right}", str(right)


def prompts(file: Path, limit: int, seed: int) -> list[dict[str, str]]:
    """`limit` rows drawn by seed, behind worked examples that are not asked themselves. ValueError names the file."""
    try:
        rows = [question(json.loads(line)) for line in file.read_text().splitlines() if line.strip()]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from None
    if len(rows) < SHOTS + 8:
        raise ValueError(f"{file} has {len(rows)} rows; {SHOTS} examples and 8 questions are needed at least")
    drawn = random.Random(seed).sample(rows, min(len(rows), limit + SHOTS))
    shots = "".join(f"{asked}{worked}\n\n" for asked, worked, _ in drawn[:SHOTS])
    return [{"prompt": shots + asked, "answer": short} for asked, _, short in drawn[SHOTS:]]


def task(name: str, data: Path, letters: bool) -> dict[str, Any]:
    """A task of lm-evaluation-harness over a file that `prompts` made."""
    pattern = "([A-J])" if letters else r"(?:####\s*)?(-?[0-9][0-9.,]*[0-9]|-?[0-9])"
    picked = {"function": "regex", "regex_pattern": pattern, "group_select": 0 if letters else -1}
    return {
        "task": f"pageferry_{name}",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {
            "until": ["\n\n", "Question:"],
            "max_gen_toks": 4 if letters else 128,
            "temperature": 0.0,
            "do_sample": False,
        },
        "filter_list": [{"name": "answer", "filter": [picked, {"function": "take_first"}]}],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def ask(folder: Path, names: Sequence[str], url: str, model: str, tokenizer: str, lm_eval: str) -> dict[str, Any]:
    """Runs all tasks in `folder` against an endpoint: by suite and question, the answer that was read and if right."""
    settings = {
        "base_url": f"{url}/v1/completions",
        "model": model,
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "tokenized_requests": False,
        "num_concurrent": 4,
        "max_retries": 1,
    }
    out = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{key}={value}" for key, value in settings.items())]
    command += ["--tasks", ",".join(f"pageferry_{name}" for name in names), "--include_path", str(folder)]
    command += ["--output_path", str(out), "--log_samples", "--batch_size", "1"]
    offline = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    environment = os.environ | offline | {"OPENAI_API_KEY": "none", "PYTHONPATH": lm_eval}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"lm_eval failed ({done.returncode}):\n{done.stderr[-3000:]}")
    found: dict[str, Any] = {}
    for name in names:
        file = next(out.rglob(f"samples_pageferry_{name}_*.jsonl"))
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found[name] = {
            str(row["doc_id"]): {"answer": row["filtered_resps"][0], "right": bool(row["exact_match"])} for row in rows
        }
    return found


def judge(reference: Mapping[str, Any], ours: Mapping[str, Any], margin: float) -> list[gates.Gate]:
    """One gate a suite: right answers lost, paired by question."""
    made = []
    for name, answers in reference.items():
        before = [answers[key]["right"] for key in answers]
        after = [ours[name][key]["right"] for key in answers]
        made.append(gates.share_lost(f"{name}: right answers lost", before, after, margin))
    return made


def table(tree: Mapping[str, Any]) -> str:
    lines = ["| suite | questions | right, BF16 engine | right, service | same answer | lost, 95 % | margin | passed |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|---|")
    for (name, answers), g in zip(tree["answers"]["bf16"].items(), tree["gates"], strict=True):
        ours = tree["answers"]["service"][name]
        same = sum(answers[key]["answer"] == ours[key]["answer"] for key in answers)
        right = [sum(row["right"] for row in side.values()) for side in (answers, ours)]
        cells = (
            f"{len(answers)} | {right[0]} | {right[1]} | {same} | {g['value']:.3f} [{g['low']:.3f}, {g['high']:.3f}]"
        )
        lines.append(f"| {name} | {cells} | {g['margin']:g} | {'yes' if g['passed'] else 'NO: ' + g['reason']} |")
    return "\n".join(lines)


async def both(args: argparse.Namespace, spec: ClusterSpec, folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """The answers of the BF16 engine and of the service, which are started here where no address is given."""
    from ops.bench import systems

    tokenizer = str(Path(spec.model.tokenizer or spec.model.path).resolve())
    say = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    plain = systems.plain_vllm(spec, args.port, "bfloat16", 1)
    service = systems.ours(spec, args.config, [HANDED_OVER, *args.overrides], args.port + 1, 1)
    answers = {}
    for name, url, system in (("bf16", args.against, plain), ("service", args.url, service)):
        asked = (spec.model.served_name, tokenizer, args.lm_eval)
        if url:
            answers[name] = await asyncio.to_thread(ask, folder, names, url, *asked)
            continue
        async with systems.Running(system, say, folder / f"{name}.log"):
            answers[name] = await asyncio.to_thread(ask, folder, names, system.url, *asked)
    return answers


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry eval suites", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    make.add_argument("config", nargs="?", default="local-cpu", help="topology file or name")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    make.add_argument("--data", action="append", required=True, metavar="SUITE=FILE", help="JSON lines")
    make.add_argument("--limit", type=int, default=100, help="questions a suite")
    make.add_argument("--seed", type=int, default=1, help="draws questions and worked examples")
    make.add_argument("--lm-eval", default="", metavar="FOLDER", help="where lm-evaluation-harness was installed to")
    make.add_argument("--url", help="a running service, instead of starting one")
    make.add_argument("--against", help="a running BF16 engine, instead of starting one")
    make.add_argument("--port", type=int, default=8830, help="first of two ports")
    make.add_argument("--margin", type=float, default=MARGIN, help="share of right answers that may be lost")
    make.add_argument("--out", type=Path, help="file for the answers, JSON")
    make.add_argument("--json", action="store_true")
    return make


def main(argv: list[str]) -> int:
    from ops.bench import facts
    from ops.bench.report import EVAL_FORMAT

    args = parser().parse_args(argv)
    known = facts.gather(argv)
    known["command"] = known["command"].replace("pageferry bench", "pageferry eval suites", 1)
    with tempfile.TemporaryDirectory(prefix="pageferry-suites-") as name:
        folder = Path(name)
        try:
            spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
            files = {suite: Path(file) for suite, _, file in (text.partition("=") for text in args.data)}
            for suite, file in files.items():
                rows, data = prompts(file, args.limit, args.seed), folder / f"{suite}.jsonl"
                data.write_text("".join(json.dumps(row) + "\n" for row in rows))
                letters = all(row["answer"] in LETTERS for row in rows)
                (folder / f"{suite}.yaml").write_text(yaml.safe_dump(task(suite, data, letters)))
            answers = asyncio.run(both(args, spec, folder, list(files)))
        except (SpecError, ValueError, RuntimeError) as error:
            print(f"pageferry eval suites: {error}", file=sys.stderr)
            return 2
    found = judge(answers["bf16"], answers["service"], args.margin)
    tree = {
        "format": EVAL_FORMAT,
        "name": f"suites, seed {args.seed}",
        "question": "Does the service answer questions as one engine with BF16 pages does?",
        "facts": known,
        "gates": [asdict(each) for each in found],
        "answers": answers,
    }
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(tree) + "\n")
    print_json(tree) if args.json else print(table(tree))
    return 0 if all(each.passed for each in found) else 1
