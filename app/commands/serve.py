"""`pageferry serve`: starts the service and ends everything that it started."""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.api.keys import KeyRing, KeysError
from app.commands.local_ray import free_port, repeated_every, set_environment, why_no_proxy
from app.commands.own_http import DIRECT
from app.commands.running import Note
from app.placement import cpus_asked
from app.processes import end_marked, sweep
from app.serve_http import refuse_other_address
from cluster.names import NAMESPACE, is_of
from cluster.plan.fits import DoesNotFit
from cluster.plan.preflight import refuse_unfit_cpu_pools
from cluster.quality import PoorQuality, check_quality
from cluster.spec import ClusterSpec, SpecError, parse_overrides
from cluster.start_up import service_s

APPLICATION = "pageferry"  # by default
POLL_S = 0.5


class Stop(Exception):
    """SIGINT or SIGTERM."""


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry serve",
        description="Starts prefill, decode and frontend replicas from a topology file and serves the OpenAI API.",
    )
    make.add_argument("config", nargs="?", default="local-cpu", help="topology file, or a shipped one by name")
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as pools.decode.replicas=2")
    make.add_argument("--port", type=int, help="HTTP port; default: frontend.port")
    make.add_argument("--address", help="a running Ray cluster; default: a new local one that ends with this command")
    make.add_argument("--dashboard-port", type=int, default=0, help="of the new local Ray cluster; default: a free one")
    make.add_argument(
        "--all-interfaces",
        action="store_true",
        help="Ray's own ports of the new local cluster too, so that other machines can join; default: loopback only",
    )
    make.add_argument("--name", default=APPLICATION, help="of the Serve application; default: %(default)s")
    make.add_argument("--route-prefix", default="/", help="of its HTTP routes; each application has its own")
    make.add_argument("--log-format", choices=("text", "json"), default="text", help="of all log files")
    make.add_argument(
        "--timeout", type=float, help="seconds to wait until the service is healthy; default: by the checkpoints' size"
    )
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_intermixed_args(argv)  # options may stand between settings
    try:
        overrides = parse_overrides(args.overrides)
        if args.port is not None:
            overrides["frontend.port"] = args.port
        spec = ClusterSpec.load(args.config, overrides)
        KeyRing(spec.frontend.keys_file, os.environ)
        refuse_unfit_cpu_pools(spec)  # before anything is started
        check_quality(spec, "prefill")
        check_quality(spec, "decode")
    except (SpecError, DoesNotFit, PoorQuality, KeysError) as error:
        print(f"pageferry serve: {error}", file=sys.stderr)
        return 2
    _catch_signals()
    note = None
    service = Service(spec, args.address, args.dashboard_port, args.name, args.route_prefix, args.log_format)
    service.all_interfaces = args.all_interfaces
    try:
        service.start(_catch_signals)
        note = Note(service.url)
        service.wait_healthy(args.timeout or service_s(spec))
        print(service.welcome(), flush=True)
        service.watch()
    except Stop as stop:
        say(f"{stop}: ending what was started")
    except (RuntimeError, TimeoutError, ValueError, OSError) as error:
        print(f"pageferry serve: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        service.stop()
        if note is not None:
            note.close()
    return 0


def _catch_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _raise_stop)


def _raise_stop(number: int, frame: Any) -> None:
    raise Stop(signal.Signals(number).name)


def say(text: str) -> None:
    print(f"pageferry: {text}", flush=True)


class Service:
    """One running application, and the Ray cluster under it when that is ours."""

    def __init__(
        self,
        spec: ClusterSpec,
        address: str | None,
        dashboard_port: int = 0,
        application: str = APPLICATION,
        route_prefix: str = "/",
        log_format: str = "text",
    ) -> None:
        self.spec = spec
        self.address = address
        self.dashboard_port = dashboard_port
        self.application = application
        self.route_prefix = route_prefix
        self.log_encoding = log_format.upper()
        self.all_interfaces = False  # Ray's own ports of a local cluster
        self._deployed = False
        self.dashboard_url = ""
        self._mark = uuid.uuid4().hex
        self._began = time.monotonic()
        self._temp_dir: Path | None = None

    @property
    def folder(self) -> Path | None:
        """Of a local service: Ray's own files, logs among them; gone when it is stopped."""
        return self._temp_dir

    @property
    def mark(self) -> str:
        """What every process of a local service has in its environment, see `app.processes`."""
        return self._mark

    @property
    def url(self) -> str:
        prefix = self.route_prefix.rstrip("/")
        scheme = "https" if os.environ.get("PAGEFERRY_TLS_PEM") else "http"
        return f"{scheme}://{self.spec.frontend.host}:{self.spec.frontend.port}{prefix}"

    # -- start

    def start(self, ray_is_up: Callable[[], None] = lambda: None) -> None:
        """`ray_is_up` is called once Ray runs: Ray takes SIGTERM for itself and would abort this process at it."""
        import ray

        sweep()  # of services that were killed
        if self.address is None:
            self._prepare_local()
        say("starting Ray" if self.address is None else f"joining Ray at {self.address}")
        context = ray.init(**self._ray_options())
        ray_is_up()
        self.dashboard_url = f"http://{context.dashboard_url}" if context.dashboard_url else ""
        if self.address is not None:
            self._refuse_taken_name()
        self._start_serve()
        self.deploy(self.spec)

    def _prepare_local(self) -> None:
        """Everything started from here on carries our mark, so that nothing of it can be left behind."""
        set_environment(self._mark, self.all_interfaces)
        # Paths of Unix sockets in it are limited to 107 characters.
        self._temp_dir = Path(tempfile.mkdtemp(prefix="pf-", dir="/tmp"))

    def _ray_options(self) -> dict[str, Any]:
        if self.address is not None:
            return {"address": self.address, "log_to_driver": False}
        return {
            "num_cpus": max(os.cpu_count() or 1, math.ceil(cpus_asked(self.spec))),
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": self.dashboard_port or free_port(),
            "object_store_memory": 256 << 20,  # requests and tokens; pages do not travel through it
            "log_to_driver": False,
            "configure_logging": False,
            "_node_ip_address": "127.0.0.1",
            "_temp_dir": str(self._temp_dir),
        }

    def _refuse_taken_name(self) -> None:
        """Deploying under it would replace the other's model, and Ctrl-C would then delete it."""
        from ray import serve

        running = serve.status().applications
        if self.application in running:
            raise RuntimeError(
                f"--name {self.application}: an application of this name is on the cluster already "
                f"({running[self.application].status}); choose another --name and --route-prefix, or delete it first "
                f"(serve.delete({self.application!r}))"
            )

    def _start_serve(self) -> None:
        from ray import serve
        from ray.exceptions import RayError
        from ray.serve.config import HTTPOptions

        frontend = self.spec.frontend
        say("starting Serve and its HTTP proxy")
        with repeated_every(say, "still starting Serve and its HTTP proxy"):
            try:
                serve.start(http_options=HTTPOptions(host=frontend.host, port=frontend.port))
            except (RayError, TimeoutError) as error:
                raise RuntimeError(why_no_proxy(error, self._temp_dir)) from None
        if self.address is not None:
            refuse_other_address(self.spec)

    def deploy(self, spec: ClusterSpec) -> None:
        """Again, with another spec: a rolling update that loses no request."""
        from ray import serve

        from app.main import application

        self.spec = spec
        self._deployed = True
        serve.api.run_many(
            [
                serve.RunTarget(
                    target=application(self.spec),
                    name=self.application,
                    route_prefix=self.route_prefix,
                    logging_config={"encoding": self.log_encoding},
                )
            ],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    # -- wait

    def wait_healthy(self, timeout_s: float) -> None:
        """Until `/health` is 200. Prints what it waits for whenever that changes; raises when Serve gives up."""
        until = self._began + timeout_s
        shown = ""
        while True:
            state = self._state()
            if state != shown:
                say(f"[{time.monotonic() - self._began:5.1f} s] {state}")
                shown = state
            if state.startswith("all replicas") and self._healthy():
                return
            if time.monotonic() > until:
                raise TimeoutError(f"not healthy after {timeout_s:.0f} s: {state}")
            time.sleep(POLL_S)

    def _state(self) -> str:
        from ray import serve

        application = serve.status().applications.get(self.application)
        if application is None:
            return "waiting for Serve"
        if application.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            details = [f"{name}: {each.message}" for name, each in application.deployments.items() if each.message]
            raise RuntimeError("\n".join([f"Serve says {application.status}: {application.message}", *details]))
        waiting = []
        for name in ("Prefill", "Decode", "Frontend"):
            deployment = application.deployments.get(name)
            if deployment is None:
                continue
            running, wanted = deployment.replica_states.get("RUNNING", 0), self._wanted(name)
            if running < wanted:
                what = "engine start-up" if name != "Frontend" else "loads tokenizer and API"
                waiting.append(f"{name} {running}/{wanted} ({what})")
        if not application.deployments:
            return "building the application"
        return "waiting for " + ", ".join(waiting) if waiting else "all replicas are running; waiting for /health"

    def _wanted(self, name: str) -> int:
        pools = {"Prefill": self.spec.pools.prefill.replicas, "Decode": self.spec.pools.decode.replicas}
        return pools.get(name, self.spec.frontend.replicas)

    def _healthy(self) -> bool:
        try:
            with DIRECT.open(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def welcome(self) -> str:
        messages = [{"role": "user", "content": "Hello!"}]
        body = json.dumps({"model": self.spec.model.served_name, "messages": messages})
        lines = [
            f"\nready after {time.monotonic() - self._began:.0f} s: {self.url}/v1",
            f"\n  curl {self.url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body}'\n",
            f"  pageferry status --url {self.url}",
        ]
        if self.dashboard_url:
            lines.append(f"  Ray dashboard: {self.dashboard_url}  (asks for a token: `ray get-auth-token`)")
        if self._temp_dir is not None:
            lines.append(f"  Prometheus targets: {self._temp_dir / 'prom_metrics_service_discovery.json'}")
        return "\n".join([*lines, "\nCtrl-C ends it.\n"])

    def watch(self) -> None:
        while True:
            time.sleep(3600)

    # -- stop

    def stop(self) -> None:
        """Idempotent. On a cluster that it did not start only the application and its actors are taken away."""
        import ray

        if self.address is None:
            self._end_processes()  # before Ray: a worker that it kills cannot end its engine any more
            _quietly("Ray", ray.shutdown)
            if self._temp_dir is not None:
                shutil.rmtree(self._temp_dir, ignore_errors=True)
            return
        if ray.is_initialized():
            if self._deployed:
                _quietly("the application", self._take_down)
            _quietly("Ray", ray.shutdown)

    def _take_down(self) -> None:
        import ray
        from ray import serve

        serve.delete(self.application)
        for found in ray.util.list_named_actors(all_namespaces=True):
            if found["namespace"] == NAMESPACE and is_of(self.application, found["name"]):
                ray.kill(ray.get_actor(found["name"], namespace=NAMESPACE))

    def _end_processes(self) -> None:
        left = end_marked(self._mark)
        if left:
            print(f"pageferry serve: could not end {left}", file=sys.stderr)
        sweep()


def _quietly(what: str, act: Callable[[], Any]) -> None:
    try:
        act()
    except Exception as error:
        print(f"pageferry serve: ending {what}: {error}", file=sys.stderr)
