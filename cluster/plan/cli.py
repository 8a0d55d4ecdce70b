"""`pageferry plan`: what fits, how fast it will be, what it costs, before any GPU is bought."""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from cluster.json_output import print_json
from cluster.plan import render
from cluster.plan.architecture import architecture
from cluster.plan.arguments import parse
from cluster.plan.calibrate import calibrate, read_points
from cluster.plan.checkpoint import stored
from cluster.plan.compare import compare_status
from cluster.plan.facts import (
    CPU,
    Gpu,
    PlanError,
    gpu,
    known_models,
    model_config,
    model_notes,
    native_weights,
)
from cluster.plan.fits import nearest_that_fits
from cluster.plan.formats import kv_format, weight_format
from cluster.plan.from_spec import plan_spec
from cluster.plan.memory import (
    PoolPlan,
    PoolSettings,
    plan_pool,
)
from cluster.plan.pages import check_pair
from cluster.plan.published import Ordering, Published, cost_changes, orderings, published_rows
from cluster.plan.report import calibration_report, fits_report, pool_report, service_report
from cluster.plan.roofline import Constants, Roofline, constants_for
from cluster.plan.service import ServicePlan, Workload
from cluster.plan.sharding import Parallel
from cluster.spec import ClusterSpec, SpecError

STATUS_TIMEOUT_S = 10.0


def main(argv: list[str] | None = None) -> int:
    """0: planned and it fits (or the check agrees). 1: it does not. 2: the arguments are wrong."""
    try:
        args = parse(__doc__ or "", argv)
        if args.published:
            return _published(args)
        if args.topology:
            return _topology(args)
        if not args.model:
            raise PlanError(f"name a model: {', '.join(known_models())}, or the path of a Hugging Face config")
        return _model(args)
    except (PlanError, SpecError) as error:
        print(f"pageferry plan: {error}", file=sys.stderr)
        return 2


def _published(args: argparse.Namespace) -> int:
    rows, orders, costs = published_rows(), orderings(), cost_changes()
    if args.json:
        print_json({name: [asdict(row) for row in part] for name, part in _named(rows, orders, costs)})
    else:
        for table in (
            render.published_table(rows),
            render.orderings_table("who is ahead: ratio of rates", orders),
            render.orderings_table("an FP8 cache over a BF16 one: ratio of costs", costs),
        ):
            render.console().print(table)
    return 0


def _named(
    rows: list[Published], orders: list[Ordering], costs: list[Ordering]
) -> list[tuple[str, Sequence[Published | Ordering]]]:
    return [("figures", rows), ("orderings", orders), ("costs", costs)]


def _topology(args: argparse.Namespace) -> int:
    spec = ClusterSpec.load(args.topology)
    device = _device(args, args.gpu) if args.gpu else None
    weights = {"decode": args.weights, "prefill": args.prefill_weights or args.weights}
    plans = plan_spec(spec, device, args.model, weights)
    if not plans:
        raise PlanError(f"{args.topology}: no pool has a known memory; set kv_cache_gib on CPU pools")
    if args.check:
        return _check(args, plans)
    return _show(args, plans, None, [])


def _model(args: argparse.Namespace) -> int:
    decode, notes = _pool(args, args.gpu, args.tp, args.pp, args.weights, args.kv, args.count)
    prefill, more = _pool(
        args,
        args.prefill_gpu or args.gpu,
        args.tp if args.prefill_tp is None else args.prefill_tp,
        args.pp if args.prefill_pp is None else args.prefill_pp,
        args.prefill_weights or args.weights,
        args.prefill_kv,
        None,
    )
    # Prompts leave a prefill replica once sealed; only one has to fit.
    prefill = plan_pool(prefill.arch, replace(prefill.settings, concurrency=1))
    notes += [note for note in more if note not in notes]
    check_pair(prefill, decode)
    plans = {"prefill": prefill, "decode": decode}
    if args.check:
        return _check(args, plans)
    if args.calibrate:
        return _calibrate(args, prefill, decode)
    return _show(args, plans, _service(args, prefill, decode, notes), notes)


def _calibrate(args: argparse.Namespace, prefill: PoolPlan, decode: PoolPlan) -> int:
    lines = [Roofline.of(p.arch, p.settings, _constants(args, p.settings.gpu)) for p in (decode, prefill)]
    made = calibrate(read_points(Path(args.calibrate), args.arm), *lines)
    if args.json:
        print_json(calibration_report(made))
    else:
        render.console().print(render.calibration_table(made))
        for name, values in calibration_report(made)["settings"].items():
            print(f"{name}: {' '.join(f'--set {key}={value}' for key, value in values.items())}")
    return 0


def _device(args: argparse.Namespace, name: str | None) -> Gpu:
    return gpu(name or "H200", args.gpu_hbm_gib, args.gpu_tb_s, args.gpu_tflops)


def _pool(
    args: argparse.Namespace, device: str | None, tp: int, pp: int, weights: str, kv: str, count: int | None
) -> tuple[PoolPlan, list[str]]:
    name, config, folder = model_config(args.model)
    arch = architecture(config, name)
    notes = model_notes(name)
    if isinstance(config.get("vision_config"), dict):
        notes.append("vision tower not counted: text serving; add it with --extra-weights-gib")
    disk = stored(folder) if folder else None
    if disk and arch.mtp_layers and not disk.has_layer(arch.layers):
        arch = disk.without_mtp(arch)
    parallel = Parallel(tp, pp, args.dp_attention, args.ep)
    gpus = parallel.gpus if count is None else count
    if gpus < 1 or parallel.gpus < 1 or gpus % parallel.gpus:
        raise PlanError(
            f"count {gpus} GPUs is not a multiple of the {parallel.gpus} of a replica ({parallel.describe()})"
        )
    chosen = _device(args, device)
    settings = PoolSettings(
        gpu=chosen,
        weights=weight_format(
            weights,
            arch,
            config,
            group=args.int4_group,
            int4_modules=args.int4_modules,
            rest=args.int4_rest,
            native=native_weights(name),
        ),
        kv=kv_format(kv, arch),
        parallel=parallel,
        replicas=gpus // parallel.gpus,
        block_tokens=args.block_tokens,
        context=args.context or min(args.input + args.output, arch.context),
        concurrency=args.concurrency,
        utilization=args.utilization,
        activation_gib=args.activation_gib,
        runtime_gib=args.runtime_gib,
        kv_space_gib=args.kv_space_gib,
        batched_tokens=args.batched_tokens,
        sequences=args.sequences,
        mtp=args.mtp,
        extra_weights_gib=args.extra_weights_gib,
    )
    plan = plan_pool(arch, settings)
    if disk and settings.weights == weight_format("auto", arch, config, native=native_weights(name)):
        notes.append(disk.describe(plan.checkpoint_bytes))
    if settings.kv == "fp8_ds_mla" and kv.lower() != "fp8_ds_mla":
        notes.append("kv fp8 of sparse MLA is stored as fp8_ds_mla, 656 B a row; fp8_uniform is 576 B")
    if chosen.name == CPU:
        notes.append("CPU rates are rough unless gpu_tb_s, gpu_tflops and the constants of --set are measured ones")
    return plan, notes


def _service(args: argparse.Namespace, prefill: PoolPlan, decode: PoolPlan, notes: list[str]) -> ServicePlan | None:
    """The pair under the workload. What cannot be served becomes a note: the memory tables are still of use."""
    constants = [_constants(args, plan.settings.gpu) for plan in (prefill, decode)]
    work = Workload(
        input_tokens=args.input,
        output_tokens=args.output,
        tpot_ms=args.tpot_ms,
        link_gb_s=args.link_gb_s,
        gpu_price=args.gpu_price,
        prefix_hit=args.prefix_hit,
        failed=args.failed,
        retried=args.retried,
    )
    try:
        return ServicePlan(prefill, decode, work, *constants)
    except PlanError as error:
        notes.append(f"no rates: {error}")
        return None


def _constants(args: argparse.Namespace, device: Gpu) -> Constants:
    names = [field.name for field in fields(Constants)]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(constants_for(device), **given)


def _show(args: argparse.Namespace, plans: dict[str, PoolPlan], service: ServicePlan | None, notes: list[str]) -> int:
    if args.json:
        tree: dict[str, Any] = pool_report(plans.get("decode") or next(iter(plans.values())))
        tree["pools"] = {name: pool_report(plan) for name, plan in plans.items()}
        tree |= service_report(service) if service else dict.fromkeys(("workload", "roofline", "transfer", "cost"))
        tree["nearest_that_fits"] = {name: fits_report(plan) for name, plan in plans.items() if not plan.fits}
        tree["notes"] = notes
        print_json(tree)
    else:
        _print_tables(plans, service, notes)
    return 0 if all(plan.fits for plan in plans.values()) else 1


def _print_tables(plans: dict[str, PoolPlan], service: ServicePlan | None, notes: list[str]) -> None:
    console = render.console()
    console.print(render.pools_table(plans))
    for line in render.bar_lines(plans):
        console.print(line)
    if service:
        for table in render.service_tables(service_report(service)):
            console.print(table)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    for name, plan in plans.items():
        if not plan.fits:
            console.print(f"[red]{name} does not fit[/]: {'; '.join(plan.problems)}")
            for line in render.alternatives_lines(nearest_that_fits(plan)):
                console.print(line)


def _check(args: argparse.Namespace, plans: dict[str, PoolPlan]) -> int:
    rows = compare_status(_status(args.check), plans, args.tolerance)
    if args.json:
        print_json(
            [
                {"where": r.where, "what": r.what, "planned": r.planned, "real": r.real, "off": r.off, "ok": r.ok}
                for r in rows
            ]
        )
    else:
        render.console().print(render.check_table(rows))
    return 0 if all(row.ok for row in rows) else 1


def _status(where: str) -> dict[str, Any]:
    """The `/status` document of a service address, or of a file that holds one."""
    try:
        if where.startswith(("http://", "https://")):
            url = where if where.rstrip("/").endswith("/status") else where.rstrip("/") + "/status"
            with urllib.request.urlopen(url, timeout=STATUS_TIMEOUT_S) as answer:
                text = answer.read()
        else:
            text = Path(where).read_bytes()
        tree = json.loads(text)
    except (OSError, urllib.error.URLError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise PlanError(f"no status from {where}: {error}") from None
    if not isinstance(tree, dict):
        raise PlanError(f"the status from {where} is {type(tree).__name__}, not an object")
    return tree


if __name__ == "__main__":
    sys.exit(main())
