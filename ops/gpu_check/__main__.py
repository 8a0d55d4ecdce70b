"""Everything that needs a GPU, in one command of less than 15 minutes.

    make gpu-check                                   or: python -m ops.gpu_check [--stages NAMES] [--out FOLDER]
    make gpu-check DRY=1                             the same code on a CPU: small, without figures

Stages have time limits of their own, and what they find is in FOLDER/results.jsonl when it is found (`plan.py`). Where
a command may take ten minutes: `STAGES="environment kernels writers copies tag_check worker_halves rates"`, then
`STAGES=engines`. Exit status 0: all passed; 1: one did not, or was skipped; 2: no CUDA device.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from ops.gpu_check import plan, run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m ops.gpu_check", description=__doc__.split("\n")[0])
    parser.add_argument("--dry", action="store_true", help="small and on the CPU, in Triton's interpreter")
    parser.add_argument("--stages", default="", help="names, default: all")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-check"), help="folder of the results")
    parser.add_argument("--writers", type=Path, help="vLLM's _C_stable_libtorch extension, where vLLM is not installed")
    args = parser.parse_args(argv)
    try:
        stages = plan.chosen(args.stages)
    except ValueError as error:
        parser.error(str(error))
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    elif not Path("/dev/nvidiactl").exists():
        print("gpu-check: this machine has no CUDA device; nothing was run (DRY=1 runs on the CPU)", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print("gpu-check: torch is not installed", file=sys.stderr)
        return 2
    options = plan.Options(args.out.resolve(), args.dry, args.writers)
    print(
        f"{len(stages)} stages, at most {sum(stage.seconds(args.dry) for stage in stages)} s; results in {args.out}",
        flush=True,
    )
    verdicts = run.run_all(stages, options, run.about(options))
    for line in (options.folder / "results.jsonl").read_text().splitlines():
        if json.loads(line).get("ok") is False:
            print(line)
    return 0 if set(verdicts.values()) == {"passed"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
