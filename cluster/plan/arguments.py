"""The command line of `pageferry plan`: what is asked often has an option, the rest is `--set KEY=VALUE`."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cluster.plan.compare import TOLERANCE
from cluster.plan.facts import PlanError, known_gpus, known_models
from cluster.plan.formats import INT4_MODULES, KV, WEIGHTS
from cluster.plan.memory import BLOCK_TOKENS, RUNTIME_GIB, UTILIZATION


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


class Setting(NamedTuple):
    kind: Callable[[str], Any]
    default: Any
    help: str


SETTINGS = {
    "gpu_hbm_gib": Setting(float, None, "memory of one GPU as the driver shows it"),
    "gpu_tb_s": Setting(float, None, "memory bandwidth of one GPU, TB/s"),
    "gpu_tflops": Setting(float, None, "dense BF16 peak of one GPU, TFLOP/s"),
    "dp_attention": Setting(int, 1, "data-parallel attention ranks"),
    "int4_group": Setting(int, None, "inputs that share a scale (32 unless given)"),
    "int4_modules": Setting(str, None, f"{', '.join(INT4_MODULES)} (experts, or linear without any)"),
    "int4_rest": Setting(str, "bf16", "bf16 or fp8 for the other linear layers"),
    "activation_gib": Setting(float, None, "forward pass on a GPU (estimated unless given)"),
    "runtime_gib": Setting(float, RUNTIME_GIB, "CUDA, NCCL and graphs on a GPU"),
    "extra_weights_gib": Setting(float, 0.0, "on every GPU, beyond the config"),
    "block_tokens": Setting(int, BLOCK_TOKENS, "tokens of a page"),
    "batched_tokens": Setting(int, 8192, "tokens of a step at most"),
    "sequences": Setting(int, 256, "requests of a step at most"),
    "mtp": Setting(_flag, False, "load the multi-token-prediction layers"),
    "prefix_hit": Setting(float, 0.0, "share of a prompt that prefill has cached"),
    "tpot_ms": Setting(float, None, "slowest time a token that is acceptable"),
    "link_gb_s": Setting(float, 50.0, "between nodes, GB/s a GPU"),
    "failed": Setting(float, 0.0, "share of requests computed and not delivered"),
    "retried": Setting(float, 0.0, "share of requests computed twice"),
    "layer_overhead_us": Setting(float, None, "roofline: fixed time a layer and step"),
    "request_overhead_us": Setting(float, None, "roofline: time a layer, step and request"),
    "fp8_kv_us": Setting(float, None, "roofline: time a layer and step of an FP8 cache"),
    "fp8_experts_us": Setting(float, None, "roofline: least time a layer of FP8 experts"),
    "prefill_efficiency": Setting(float, None, "roofline: share of the BF16 peak"),
    "fp8_prefill_gain": Setting(float, None, "roofline: prefill with FP8 weights"),
    "memory_efficiency": Setting(float, None, "roofline: share of the bandwidth"),
    "tolerance": Setting(float, TOLERANCE, "of --check"),
}
PREFILL = {
    "gpu": Setting(str, None, "as --gpu"),
    "tp": Setting(int, None, "as --tp"),
    "pp": Setting(int, None, "as --pp"),
    "weights": Setting(str, None, "as --weights"),
    "kv": Setting(str, "bf16", "bf16"),
}


def parser(description: str) -> argparse.ArgumentParser:
    """All options with their defaults and units."""
    rows = [f"  {key:20} {entry.help} (now {entry.default})" for key, entry in SETTINGS.items()]
    p = argparse.ArgumentParser(
        prog="pageferry plan",
        description=description,
        epilog="keys of --set:\n" + "\n".join(rows),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("model", nargs="?", help=f"{', '.join(known_models())}, or a Hugging Face folder or config.json")
    p.add_argument(
        "--topology", metavar="FILE", help="plan the pools of a topology file; MODEL then stands in for its path"
    )
    p.add_argument("--published", action="store_true", help="the planner against published figures")
    p.add_argument("--gpu", help=f"{', '.join(known_gpus())} (default H200)")
    p.add_argument("--count", type=int, help="GPUs of the decode pool (default: one replica)")
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--pp", type=int, default=1)
    p.add_argument("--ep", action="store_true", help="whole experts on ranks, not slices of each")
    p.add_argument("--weights", default="auto", help=f"auto (as published), {', '.join(WEIGHTS)}")
    p.add_argument("--kv", default="bf16", help=f"of decode: {', '.join(KV)}")
    p.add_argument("--context", type=int, help="tokens of one request (default: --input + --output)")
    p.add_argument("--concurrency", type=int, default=1, help="requests that must fit at once")
    p.add_argument("--utilization", type=float, default=UTILIZATION, help="share of HBM the engine may use")
    p.add_argument("--kv-space-gib", type=float, help="KV space given outright (needed for --gpu CPU)")
    p.add_argument("--input", type=int, default=8192, help="prompt tokens a request")
    p.add_argument("--output", type=int, default=1000, help="answer tokens a request")
    p.add_argument("--gpu-price", type=float, help="per GPU and hour")
    p.add_argument(
        "--prefill", action="append", default=[], metavar="KEY=VALUE", help=f"of prefill: {', '.join(PREFILL)}"
    )
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a rarer setting, listed below")
    p.add_argument("--json", action="store_true")
    p.add_argument("--calibrate", metavar="BENCH.json", help="fit the roofline to a results file of `pageferry bench`")
    p.add_argument("--arm", help="of --calibrate (default: the file's first)")
    p.add_argument("--check", metavar="URL", help="compare a running service (or a saved /status) with the plan")
    return p


def values(option: str, given: Sequence[str], known: dict[str, Setting]) -> dict[str, Any]:
    """Every known key with its given or default value. PlanError for an unknown key (names the nearest) or value."""
    values = {key: entry.default for key, entry in known.items()}
    for pair in given:
        key, _, text = pair.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]!r}" if near else f"there are {', '.join(known)}"
            raise PlanError(f"--{option} {pair}: no key {key!r}; {hint}")
        try:
            values[key] = known[key].kind(text)
        except ValueError:
            raise PlanError(f"--{option} {key} is {text!r}, must be such as {known[key].default}") from None
    return values


def parse(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """Options, the keys of `--set` beside them, and those of `--prefill` as `prefill_KEY`."""
    args = parser(description).parse_args(argv)
    vars(args).update(values("set", args.set, SETTINGS))
    vars(args).update({f"prefill_{key}": value for key, value in values("prefill", args.prefill, PREFILL).items()})
    return args
