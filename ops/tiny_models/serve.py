"""Serves checkpoints of every family through the whole service, one service after the other, and measures it.

    python -m ops.tiny_models.serve [CASE ...] [--work DIR] [--json]

A case is a pair of checkpoints for prefill and decode: the tiny random ones of `ops.tiny_models.build`, and the demo
model, with decode's copy compressed to INT4 where the name says so. Each is served by `pageferry serve`; prompts with a
forced continuation go through a hand-over, and once more through decode alone, which is what a single engine of
decode's checkpoint does. Then the plan of the same topology is compared with the running service.

What must hold: every prompt token is moved and none computed again; with BF16 pages and one checkpoint both roads give
the same log probabilities but for rounding; with FP8 pages or another checkpoint on prefill they differ, but far less
than after another prompt; the plan is within 2 %; nothing is left afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from app.client import Client
from cluster.json_output import print_json
from cluster.json_output import run as run_json
from ops.tiny_models.build import build

ROOT = Path(__file__).parents[2]
DEMO = ROOT / ".models" / "smollm2-135m-instruct"
TEXT = ROOT / "LICENSE"
PAGE = 32
GROUP = 64  # divides the rows of all of them
PAGES = 256
# Round the page size, inside a page, more than one chunk of prefill (256 tokens).
PROMPT_LENGTHS = (33, 64, 97, 150, 257, 300)
CONTINUATION = 24
START_S = 240.0
# Of the mean, nats. A matrix product rounds by how many rows it has, and where that decides between two experts another
# one is chosen: a few positions may be far off, most are not.
EXACT = 0.05


@dataclass(frozen=True)
class Case:
    """`family`: of `ops.tiny_models.build`, or "" for the demo model. `int4`: which pools get the compressed copy."""

    family: str
    decode_kv: str
    int4: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()  # kinds of modules that stay BF16 in the copy

    @property
    def same_weights(self) -> bool:
        return len(self.int4) != 1

    @property
    def exact(self) -> bool:
        """Whether nothing is rounded between prefill's pages and what decode alone would hold."""
        return self.same_weights and self.decode_kv == "bfloat16"


# vLLM's CPU build has no FP8 cache for MLA, and runs INT4 experts only with AMX and softmax routing: DeepSeek and GLM,
# which route by sigmoids, keep theirs in BF16 here.
CASES = {
    "smollm2-int4": Case("", "fp8_e4m3", ("decode",)),
    "smollm2-int4-both": Case("", "fp8_e4m3", ("prefill", "decode")),
    "deepseek-v3": Case("deepseek-v3", "bfloat16"),
    "glm4-moe": Case("glm4-moe", "fp8_e4m3"),
    "glm4-moe-lite": Case("glm4-moe-lite", "bfloat16"),
    "qwen3-moe": Case("qwen3-moe", "fp8_e4m3"),
    "deepseek-v3-int4": Case("deepseek-v3", "bfloat16", ("decode",), ("routed_experts",)),
    "glm4-moe-int4": Case("glm4-moe", "fp8_e4m3", ("decode",), ("routed_experts",)),
    "qwen3-moe-int4": Case("qwen3-moe", "fp8_e4m3", ("decode",)),
}


@dataclass(frozen=True)
class Result:
    """Log probabilities are of the forced tokens, in nats; differences are between hand-over and decode alone."""

    case: str
    start_s: float
    prompt_tokens: int
    tokens_moved: int
    tokens_recomputed: int
    bytes_moved: int
    positions: int
    mean_abs_difference: float
    median_abs_difference: float
    max_abs_difference: float
    control: float  # the same mean after another prompt
    nll_hand_over: float
    nll_alone: float
    plan: tuple[dict[str, Any], ...]
    warned: bool  # at start, of a checkpoint that nobody has judged
    problems: tuple[str, ...]


def topology(case: Case, original: Path, int4: Path | None) -> dict[str, Any]:
    """The case as a topology file's content."""
    engine = {"enforce_eager": True, "num_gpu_blocks_override": PAGES, "logits_processors": [FORCING]}
    pool = {"kv_cache_gib": 1, "block_tokens": PAGE, "max_num_seqs": 16, "engine_args": engine}
    pools: dict[str, Any] = {
        "prefill": {**pool, "kv_dtype": "bfloat16", "max_num_batched_tokens": 256},
        "decode": {**pool, "kv_dtype": case.decode_kv},
    }
    for name in case.int4:
        pools[name]["weights"] = str(int4)
    if case.int4 == ("prefill", "decode"):
        pools["prefill"]["kv_dtype"] = case.decode_kv
    return {
        "model": {"path": str(original), "name": "tiny", "max_model_len": 1024},
        "pools": pools,
        "transfer": {"staging_bytes_max": 64 << 20},
        "admission": {"local_prefill_max_tokens": 0},  # a model this small computes any prompt in less than a hand-over
    }


FORCING = "ops.accuracy.forcing:ForceTokens"


def checkpoints(case: Case, work: Path) -> tuple[Path, Path | None]:
    """The original and, for a case with INT4, its compressed copy; both are made once in `work`."""
    original = work / case.family if case.family else DEMO
    if not original.exists():
        build(case.family, original, DEMO)
    if not case.int4:
        return original, None
    int4 = work / f"{case.family or DEMO.name}-int4"
    if not int4.exists():
        from ops.compress.cli import main as compress

        arguments = [str(original), str(int4), "--group-size", str(GROUP), "--workers", "1", "--verify"]
        arguments += [word for kind in case.keep for word in ("--keep", kind)]
        with contextlib.redirect_stdout(sys.stderr):
            status = compress(arguments)
        if status:
            raise RuntimeError(f"pageferry compress {original} ended with {status}")
    return original, int4


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def served(file: Path, log: Path) -> Iterator[str]:
    """`pageferry serve file` while the block runs, as a process of its own; its address. RuntimeError with the end of
    its log when it does not become healthy."""
    port = _free_port()
    command = [sys.executable, "-m", "app.cli", "serve", str(file), "--port", str(port)]
    command += ["--dashboard-port", str(_free_port()), "--timeout", str(START_S)]
    # Nothing of a cluster that this process is connected to may leak into the service's own.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PAGEFERRY_"))}
    env |= {"PYTHONUNBUFFERED": "1", "VLLM_CPU_INT4_W4A8": env.get("VLLM_CPU_INT4_W4A8", "0")}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=ROOT)
    try:
        until = time.monotonic() + START_S
        while "Ctrl-C ends it" not in log.read_text():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the service did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _fetch(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=10) as answer:
        return json.load(answer)


def _quiet(url: str, timeout_s: float = 15.0) -> tuple[dict[str, Any], list[str]]:
    """The status once nothing is in flight, and what is then still held."""
    until = time.monotonic() + timeout_s
    while True:
        status, audit = _fetch(url, "/status"), _fetch(url, "/status/audit")
        left = list(audit["breaches"])
        if status["tickets"]["in_flight"]:
            left.append(f"tickets in flight: {status['tickets']['by_state']}")
        if status["staging"]["bytes_held"]:
            left.append(f"staging holds {status['staging']['bytes_held']} bytes")
        for pool, each in ((p, r) for p, q in status["pools"].items() for r in q["replicas"]):
            if each["blocks_held"] or each["blocks_quarantined"] or each["running"] or each["waiting"]:
                left.append(f"{pool} {each['replica_id']} holds pages or requests")
        if not left or time.monotonic() > until:
            return status, left
        time.sleep(0.2)


def _forced(client: Client, prompt: Sequence[int], continuation: list[int], salt: str, alone: bool) -> list[float]:
    """Log probability of each token of `continuation` after `prompt`. `alone`: by decode without a hand-over, since
    log probabilities of a prompt cannot be split. Another `salt` shares no cached page."""
    body: dict[str, Any] = {
        "model": client.model,
        "prompt": list(prompt),
        "max_tokens": len(continuation),
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 1,
        "cache_salt": salt,
        "vllm_xargs": {"pageferry_force_tokens": continuation},
    }
    if alone:
        body["prompt_logprobs"] = 0
    answer = client.request("POST", "/v1/completions", body)
    logprobs: list[float] = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(logprobs) != len(continuation):
        raise RuntimeError(f"{len(logprobs)} log probabilities for {len(continuation)} forced tokens")
    return logprobs


def _mean_abs(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    return statistics.fmean(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def ask(url: str, token_ids: Sequence[int], out: dict[str, Any]) -> None:
    """Sends every passage down both roads and puts what came back into `out`."""
    over, alone, control = [], [], []
    prompts, at = [], 0
    for length in PROMPT_LENGTHS:
        prompts.append((token_ids[at : at + length], list(token_ids[at + length : at + length + CONTINUATION])))
        at += length + CONTINUATION
    with Client(url) as client:
        before, _ = _quiet(url)
        for number, (prompt, continuation) in enumerate(prompts):
            over.append(_forced(client, prompt, continuation, f"over-{number}", alone=False))
        after, left = _quiet(url)
        for number, (prompt, continuation) in enumerate(prompts):
            alone.append(_forced(client, prompt, continuation, f"alone-{number}", alone=True))
            other = prompts[number - 1][0]
            control.append(_forced(client, other, continuation, f"control-{number}", alone=True))
        last, more = _quiet(url)
    moved = {name: after["ferry"][name] - before["ferry"][name] for name in after["ferry"]}
    flat = [abs(a - b) for x, y in zip(over, alone, strict=True) for a, b in zip(x, y, strict=True)]
    out |= {
        "prompt_tokens": sum(PROMPT_LENGTHS),
        "tokens_moved": moved["tokens_moved"],
        "tokens_recomputed": moved["tokens_recomputed"],
        "bytes_moved": moved["bytes_moved"],
        "moved_when_alone": last["ferry"]["tokens_moved"] - after["ferry"]["tokens_moved"],
        "positions": len(flat),
        "mean_abs_difference": statistics.fmean(flat),
        "median_abs_difference": statistics.median(flat),
        "max_abs_difference": max(flat),
        "control": _mean_abs(control, alone),
        "nll_hand_over": -statistics.fmean(value for row in over for value in row),
        "nll_alone": -statistics.fmean(value for row in alone for value in row),
        "left": [*left, *more],
    }


def _problems(case: Case, found: dict[str, Any]) -> tuple[str, ...]:
    said = [f"left over: {item}" for item in found["left"]]
    if found["tokens_moved"] != found["prompt_tokens"] or found["tokens_recomputed"]:
        said.append(
            f"{found['tokens_moved']} of {found['prompt_tokens']} prompt tokens were moved, "
            f"{found['tokens_recomputed']} computed again"
        )
    if found["moved_when_alone"]:
        said.append(f"{found['moved_when_alone']} tokens were moved for requests that decode serves alone")
    if case.exact and found["mean_abs_difference"] > EXACT:
        said.append(f"the two roads differ by {found['mean_abs_difference']:.3f} nats; nothing is rounded between them")
    if found["mean_abs_difference"] > 0.5 * found["control"]:
        said.append(
            f"the two roads differ by {found['mean_abs_difference']:.3f} nats on average, "
            f"another prompt by {found['control']:.3f}"
        )
    said += [f"plan: {row['where']} {row['what']} {row['real']} planned {row['planned']}" for row in found["plan"]
             if not row["ok"]]  # fmt: skip
    if not any(row["what"] == "weights bytes" for row in found["plan"]):
        said.append("the plan was not compared with the weights that the engines loaded")
    if bool(case.int4) != found["warned"]:
        said.append("the checkpoint that nobody judged was " + ("not warned of" if case.int4 else "warned of, wrongly"))
    return tuple(said)


def _plan_rows(file: Path, url: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "app.cli", "plan", "--topology", str(file), "--check", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pageferry plan --check failed: {done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def run(name: str, work: Path) -> Result:
    """One case: checkpoints, service, requests, plan. RuntimeError when something does not even start."""
    from transformers import AutoTokenizer

    case = CASES[name]
    original, int4 = checkpoints(case, work)
    file, log = work / f"{name}.yaml", work / f"{name}.log"
    file.write_text(yaml.safe_dump(topology(case, original, int4)))
    token_ids = AutoTokenizer.from_pretrained(str(DEMO)).encode(TEXT.read_text())
    found: dict[str, Any] = {}
    began = time.monotonic()
    with served(file, log) as url:
        found["start_s"] = round(time.monotonic() - began, 1)
        ask(url, token_ids, found)
        found["plan"] = _plan_rows(file, url)
    found["warned"] = "has not been compared with its original" in log.read_text()
    problems = _problems(case, found)
    kept = {key: value for key, value in found.items() if key not in ("left", "moved_when_alone", "plan")}
    return Result(case=name, **kept, plan=tuple(found["plan"]), problems=problems)


def table(results: Sequence[Result]) -> str:
    """One line a case."""
    lines = [
        "| case | start s | tokens moved | MB moved | mean abs difference | median | largest | another prompt "
        "| nll over / alone | weights, real over planned | result |",
        "|---" * 11 + "|",
    ]
    for r in results:
        off = [f"{row['off']:+.2%}" for row in r.plan if row["what"] == "weights bytes"]
        ended = "; ".join(r.problems) or "as it must be"
        lines.append(
            f"| {r.case} | {r.start_s:.0f} | {r.tokens_moved} of {r.prompt_tokens} | {r.bytes_moved / 1e6:.2f} "
            f"| {r.mean_abs_difference:.4f} | {r.median_abs_difference:.4f} | {r.max_abs_difference:.4f} "
            f"| {r.control:.3f} "
            f"| {r.nll_hand_over:.3f} / {r.nll_alone:.3f} | {', '.join(off)} | {ended} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.tiny_models.serve", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("case", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--work", type=Path, help="folder for checkpoints and logs (default: one that is deleted)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    unknown = [name for name in args.case if name not in CASES]
    if unknown:
        parser.error(f"no case {', '.join(unknown)}; known: {', '.join(CASES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # the service is ended on the way
    results, failed = [], []
    with tempfile.TemporaryDirectory(prefix="pageferry-tiny-") as scratch:
        work = args.work or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        for name in args.case or CASES:
            try:
                results.append(run(name, work))
            except RuntimeError as error:
                failed.append(f"{name}: {error}")
    if args.json:
        print_json([asdict(result) for result in results])
    else:
        print(table(results))
    for text in failed:
        print(text, file=sys.stderr)
    return 1 if failed or any(result.problems for result in results) else 0


if __name__ == "__main__":
    sys.exit(run_json(main, sys.argv[1:]))
