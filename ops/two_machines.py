"""Two raylets on this machine as on two: the second in a network namespace, joined by a veth pair of limited rate.

Where namespaces are not permitted, both raylets have an address of loopback: such a link has no rate and is never cut.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from app.commands.local_ray import free_port

RAY = str(Path(sys.executable).with_name("ray"))
STARTS_S = 120.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@dataclass
class Link:
    """`namespace` "": loopback. `cut` and `join` take the veth pair down and up again."""

    namespace: str = ""
    near: str = "127.0.0.1"
    far: str = "127.0.0.2"
    _device: str = ""

    def limit(self, mbit: int) -> None:
        """Megabits a second in each direction; 0: none."""
        if not self.namespace:
            return
        for inside, device in (((), f"{self._device}a"), (self.inside(), f"{self._device}b")):
            if not mbit:
                subprocess.run([*inside, "tc", "qdisc", "del", "dev", device, "root"], capture_output=True)
            else:
                rate = ("rate", f"{mbit}mbit", "burst", "256kb", "latency", "200ms")
                run(*inside, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rate)

    def cut(self) -> None:
        run("ip", "link", "set", f"{self._device}a", "down")

    def join(self) -> None:
        run("ip", "link", "set", f"{self._device}a", "up")

    def inside(self) -> tuple[str, ...]:
        """What a command begins with that runs on the second machine."""
        return ("ip", "netns", "exec", self.namespace) if self.namespace else ()


@contextlib.contextmanager
def joined_link() -> Iterator[Link]:
    number = os.getpid() % 200 + 20
    name, device = f"pf{os.getpid()}", f"pf{number}"
    made = Link(name, f"10.211.{number}.1", f"10.211.{number}.2", device)
    if shutil.which("ip") is None or os.geteuid() != 0:
        yield Link()
        return
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError:
        yield Link()
        return
    try:
        run("ip", "link", "add", f"{device}a", "type", "veth", "peer", "name", f"{device}b", "netns", name)
        run("ip", "addr", "add", f"{made.near}/24", "dev", f"{device}a")
        run("ip", "link", "set", f"{device}a", "up")
        for command in (f"addr add {made.far}/24 dev {device}b", f"link set {device}b up", "link set lo up"):
            run("ip", "-n", name, *command.split())
        yield made
    finally:
        subprocess.run(["ip", "link", "del", f"{device}a"], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@dataclass
class Raylets:
    link: Link
    address: str
    folder: str
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)


def _ray_start(made: Raylets, inside: tuple[str, ...], *options: str) -> None:
    command = [*inside, RAY, "start", "--block", "--disable-usage-stats", "--object-store-memory", str(100 << 20)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env |= {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": made.folder, "RAY_worker_niceness": "0"}
    env["PYTHONUNBUFFERED"] = "1"  # its log says when it runs
    log = (Path(made.folder) / f"node-{len(made.nodes)}.log").open("wb")
    made.nodes.append(subprocess.Popen([*command, *options], env=env, stdout=log, stderr=log, start_new_session=True))


@contextlib.contextmanager
def raylets() -> Iterator[Raylets]:
    """The head offers the resource `prefill_node`, the other one `decode_node`."""
    folder = tempfile.mkdtemp(prefix="pf-", dir="/tmp")
    with joined_link() as joined:
        port = free_port()
        made = Raylets(joined, f"{joined.near}:{port}", folder)
        head = ("--head", "--node-ip-address", joined.near, "--port", str(port), "--include-dashboard", "false")
        try:
            _ray_start(made, (), *head, "--num-cpus", "4", "--resources", '{"prefill_node": 4}', "--temp-dir", folder)
            _wait_for(made, 0)
            other = ("--address", made.address, "--node-ip-address", joined.far, "--num-cpus", "2")
            _ray_start(made, joined.inside(), *other, "--resources", '{"decode_node": 4}')
            _wait_for(made, 1)
            yield made
        finally:
            for node in reversed(made.nodes):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(node.pid, signal.SIGTERM)
            for node in made.nodes:
                try:
                    node.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(node.pid, signal.SIGKILL)
            shutil.rmtree(folder, ignore_errors=True)


def _wait_for(made: Raylets, index: int) -> None:
    """Until that raylet says that it runs."""
    log, until = Path(made.folder) / f"node-{index}.log", time.monotonic() + STARTS_S
    while "Ray runtime started" not in log.read_text():
        assert made.nodes[index].poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.2)


# Prefill on the first machine, decode on the second; small enough for both to be one machine with two cores.
LIGHT = (
    "pools.prefill.resources={prefill_node: 1}",
    "pools.decode.resources={decode_node: 1}",
    "admission.local_prefill_max_tokens=0",
    "transfer.staging_bytes_max=67108864",
    "transfer.hand_over_s=20",
    "model.max_model_len=2048",
)


@contextlib.contextmanager
def service(made: Raylets, *settings: str) -> Iterator[str]:
    """The URL of `pageferry serve` on both machines."""
    port = free_port()
    command = [sys.executable, "-m", "app.cli", "serve", "local-cpu", *LIGHT, *settings]
    command += ["--address", made.address, "--port", str(port)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["RAY_AUTH_MODE"] = "disabled"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as serve:
        try:
            assert serve.stdout is not None
            while "Ctrl-C ends it" not in (line := serve.stdout.readline()):
                assert line, f"it ended with status {serve.wait()}"
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                serve.communicate(timeout=90)
            serve.kill()
