"""The command line of `pageferry plan`."""

from __future__ import annotations

import argparse
from pathlib import Path

from cluster.planning.compare import TOLERANCE
from cluster.planning.facts import known_gpus, known_models
from cluster.planning.formats import INT4_MODULES, KV, WEIGHTS
from cluster.planning.memory import BLOCK_TOKENS, RUNTIME_GIB, UTILIZATION


def parser(description: str) -> argparse.ArgumentParser:
    """All options with their defaults and units."""
    p = argparse.ArgumentParser(prog="pageferry plan", description=description)
    p.add_argument("model", nargs="?", help=f"{', '.join(known_models())}, or a Hugging Face folder or config.json")
    p.add_argument(
        "--topology", metavar="FILE", help="plan the pools of a topology file; MODEL then stands in for its path"
    )
    p.add_argument("--published", action="store_true", help="the planner against published figures")
    pool = p.add_argument_group("decode pool (and prefill, unless given below)")
    pool.add_argument("--gpu", default=None, help=f"{', '.join(known_gpus())} (default H200)")
    pool.add_argument("--gpu-hbm-gib", type=float, help="memory of one GPU as the driver shows it")
    pool.add_argument("--gpu-tb-s", type=float, help="memory bandwidth of one GPU, TB/s")
    pool.add_argument("--gpu-tflops", type=float, help="dense BF16 peak of one GPU, TFLOP/s")
    pool.add_argument("--count", type=int, help="GPUs of the pool (default: one replica)")
    pool.add_argument("--tp", type=int, default=1)
    pool.add_argument("--pp", type=int, default=1)
    pool.add_argument("--dp-attention", type=int, default=1, metavar="N", help="data-parallel attention ranks")
    pool.add_argument("--ep", action="store_true", help="whole experts on ranks, not slices of each")
    pool.add_argument("--weights", default="auto", help=f"auto (as published), {', '.join(WEIGHTS)}")
    pool.add_argument("--kv", default="bf16", help=", ".join(KV))
    pool.add_argument("--int4-group", type=int, help="inputs that share a scale (default 32)")
    pool.add_argument("--int4-modules", help=f"{', '.join(INT4_MODULES)} (default: experts, or linear without any)")
    pool.add_argument("--int4-rest", default="bf16", help="bf16 or fp8 for the other linear layers")
    pool.add_argument("--context", type=int, help="tokens of one request (default: --input + --output)")
    pool.add_argument("--concurrency", type=int, default=1, help="requests that must fit at once")
    pool.add_argument("--utilization", type=float, default=UTILIZATION, help="share of HBM the engine may use")
    pool.add_argument("--activation-gib", type=float, help="forward pass on a GPU (default: estimated)")
    pool.add_argument("--runtime-gib", type=float, default=RUNTIME_GIB, help="CUDA, NCCL and graphs on a GPU")
    pool.add_argument("--kv-space-gib", type=float, help="KV space given outright (needed for --gpu CPU)")
    pool.add_argument("--extra-weights-gib", type=float, default=0.0, help="on every GPU, beyond the config")
    pool.add_argument("--block-tokens", type=int, default=BLOCK_TOKENS)
    pool.add_argument("--batched-tokens", type=int, default=8192)
    pool.add_argument("--sequences", type=int, default=256)
    pool.add_argument("--mtp", action="store_true", help="load the multi-token-prediction layers")
    pre = p.add_argument_group("prefill pool")
    pre.add_argument("--prefill-gpu")
    pre.add_argument("--prefill-tp", type=int)
    pre.add_argument("--prefill-pp", type=int)
    pre.add_argument("--prefill-weights", help="default: as --weights")
    pre.add_argument("--prefill-kv", default="bf16")
    work = p.add_argument_group("workload")
    work.add_argument("--input", type=int, default=8192, help="prompt tokens a request")
    work.add_argument("--output", type=int, default=1000, help="answer tokens a request")
    work.add_argument("--prefix-hit", type=float, default=0.0, help="share of a prompt that prefill has cached")
    work.add_argument("--rate", type=float, help="requests a second (default: what the GPUs do)")
    work.add_argument("--tpot-ms", type=float, help="slowest time a token that is acceptable")
    work.add_argument("--total-gpus", type=int, help="GPUs to split between prefill and decode")
    work.add_argument("--gpu-price", type=float, help="per GPU and hour")
    work.add_argument("--link-gb-s", type=float, default=50.0, help="between nodes, GB/s a GPU")
    work.add_argument("--lease-s", type=float, default=60.0)
    const = p.add_argument_group("constants of the roofline (see --explain)")
    const.add_argument("--layer-overhead-us", type=float, help="fixed time a layer and step")
    const.add_argument("--prefill-efficiency", type=float, help="share of the BF16 peak")
    const.add_argument("--memory-efficiency", type=float, help="share of the bandwidth")
    out = p.add_argument_group("output")
    out.add_argument("--json", action="store_true")
    out.add_argument("--explain", action="store_true", help="the formula of every figure, numbers put in")
    out.add_argument("--picture", type=Path, metavar="FILE.png")
    out.add_argument("--implied-by", type=int, metavar="TOKENS", help="the reserve that a known KV capacity implies")
    out.add_argument("--check", metavar="URL", help="compare a running service (or a saved /status) with the plan")
    out.add_argument("--tolerance", type=float, default=TOLERANCE)
    return p
