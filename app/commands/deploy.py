"""`pageferry deploy`: a topology, or a file of several models, onto a running Ray cluster; again: a rolling update."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from app import rendering
from cluster.json_output import print_json
from cluster.models import ModelsSpec
from cluster.spec import ClusterSpec, SpecError, parse_overrides

POLL_S = 0.5


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry deploy",
        description="Brings a topology, or a file that names several models, to a running Ray cluster by Serve's own "
        "declarative deployment. What runs already under the same name is replaced step by step: new replicas start, "
        "take new requests, and old ones leave when theirs have ended. Other applications stay as they are.",
    )
    make.add_argument("config", help="topology file, a shipped one by name, or a file that names several models")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as admission.queue_max=100")
    make.add_argument("--name", default="pageferry", help="of the application; default: %(default)s")
    make.add_argument("--route-prefix", default="/")
    make.add_argument(
        "--dashboard",
        default=os.environ.get("RAY_DASHBOARD_ADDRESS", "http://127.0.0.1:8265"),
        help="of the Ray cluster; default: RAY_DASHBOARD_ADDRESS, or %(default)s",
    )
    make.add_argument("--no-wait", action="store_true", help="do not wait until the new replicas serve")
    make.add_argument("--timeout", type=float, default=1_800.0, help="seconds to wait")
    make.add_argument("--json", action="store_true")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_intermixed_args(argv)
    try:
        config = _config(args)
    except SpecError as error:
        print(f"pageferry deploy: {error}", file=sys.stderr)
        return 2
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    began = time.monotonic()
    try:
        client = ServeSubmissionClient(args.dashboard)
        details = client.get_serve_details()
        client.deploy_applications(with_others(config, details))
        names = [application["name"] for application in config["applications"]]
        before = {name: deployed_at(details["applications"].get(name)) for name in names}
        found = {} if args.no_wait else _wait(client, before, args.timeout)
    except (ConnectionError, RuntimeError, TimeoutError) as error:
        print(f"pageferry deploy: {error}", file=sys.stderr)
        return 1
    seconds = round(time.monotonic() - began, 1)
    if args.json:
        print_json({"applications": names, "status": found, "seconds": seconds})
    else:
        print(f"{', '.join(names)}: {'handed to Serve' if args.no_wait else 'deployed'} after {seconds:.0f} s")
    return 0


def _config(args: argparse.Namespace) -> dict[str, Any]:
    if ModelsSpec.is_one(args.config):
        if args.overrides:
            raise SpecError(f"{args.config} names several models: settings stand in the file")
        return rendering.models_config(*ModelsSpec.load(args.config))
    spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
    return rendering.serve_config(spec, rendering.Target(name=args.name, route_prefix=args.route_prefix))


def with_others(config: dict[str, Any], details: dict[str, Any]) -> dict[str, Any]:
    """The config with what else was deployed by one: Serve takes away what a new config does not name."""
    mine = {application["name"] for application in config["applications"]}
    others = [
        application["deployed_app_config"]
        for name, application in details.get("applications", {}).items()
        if name not in mine and application.get("source") == "declarative" and application.get("deployed_app_config")
    ]
    return {**config, "applications": [*others, *config["applications"]]}


def deployed_at(application: dict[str, Any] | None) -> float:
    """When Serve, by its own clock, was last asked to deploy it; 0: never."""
    return 0.0 if application is None else float(application["last_deployed_time_s"])


def _wait(client: Any, before: dict[str, float], timeout_s: float) -> dict[str, str]:
    """Until Serve says that these run as deployed after `before`. Raises RuntimeError when it gives up."""
    shown, began = "", time.monotonic()
    while True:
        applications = client.get_serve_details()["applications"]
        states = {name: _state(applications.get(name), at) for name, at in before.items()}
        failed = [f"{name}: {text}" for name, (state, text) in states.items() if state == "DEPLOY_FAILED"]
        if failed:
            raise RuntimeError("; ".join(failed))
        line = ", ".join(text for state, text in states.values() if state != "RUNNING")
        if not line:
            return {name: state for name, (state, _) in states.items()}
        if line != shown:
            print(f"pageferry deploy: {line}", file=sys.stderr, flush=True)
            shown = line
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not deployed after {timeout_s:.0f} s: {line}")
        time.sleep(POLL_S)


def _state(application: dict[str, Any] | None, before: float) -> tuple[str, str]:
    """Serve's status of an application, and what is still to come in words."""
    if application is None or deployed_at(application) <= before:
        return "DEPLOYING", "Serve has not begun"
    status = str(application["status"])
    if status == "DEPLOY_FAILED":
        why = [f"{name}: {each['message']}" for name, each in application["deployments"].items() if each["message"]]
        return status, "\n".join([str(application["message"]), *why])
    waiting = []
    for name, deployment in application["deployments"].items():
        counts: dict[str, int] = {}
        for replica in deployment["replicas"]:
            counts[replica["state"]] = counts.get(replica["state"], 0) + 1
        others = ", ".join(f"{count} {state.lower()}" for state, count in sorted(counts.items()) if state != "RUNNING")
        if deployment["status"] != "HEALTHY":
            waiting.append(
                f"{name} {counts.get('RUNNING', 0)} of {deployment['target_num_replicas']} running, {others}"
            )
    if status == "RUNNING" and not waiting:
        return status, ""
    return "DEPLOYING", "; ".join(waiting).rstrip(", ") or f"{application['name']} {status.lower()}"
