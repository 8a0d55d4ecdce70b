"""Bugs that the simulator's checkers must see: one-line changes of shipped code, planted one at a time.

    python tests/support/planted_bugs.py --scan 500        for each bug the first seed of 0 .. 499 that finds it
    python tests/support/planted_bugs.py --known           each bug with the seed noted here first, then 0 .. 24

Every bug runs in a process of its own, forked before any module of the product is imported; there the module that the
bug is in is compiled from its changed source. A seed and a bug's faults are those of `pageferry simulate`.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 500
KNOWN_MORE = 25  # seeds that are tried when the noted one finds nothing any more


@dataclass(frozen=True)
class Bug:
    """`old` stands exactly once in `file`, and `new` takes its place.

    `faults` and `seed`: a run of `pageferry simulate` that finds it.
    """

    what: str
    file: str
    old: str
    new: str
    faults: str = "all"
    seed: int = 0


BUGS = (
    # -- one request
    Bug(
        "a resumed request is sent as it was at first: its tokens come twice",
        "app/request/driver.py",
        "if self.tokens and self._state.recovery is state.Recovery.RESUME:",
        "if False:",
        "crash_decode",
    ),
    Bug(
        "a replayed request's tokens are not taken off again: they come twice",
        "app/request/emitted.py",
        "self._to_replay = len(self.tokens) if replays else 0",
        "self._to_replay = 0",
        "crash_decode",
    ),
    Bug(
        "a resumed request may put out as many tokens as at first",
        "app/request/eligibility.py",
        "rest.max_tokens = params.max_tokens - len(tokens)",
        "rest.max_tokens = params.max_tokens",
        "none",
    ),
    Bug(
        "random sampling is continued on another replica",
        "app/request/state.py",
        "if event.num_output_tokens and state.recovery is Recovery.NONE:",
        "if False:",
        "crash_decode",
    ),
    Bug(
        "the tokens so far are left out of a resumed request's prompt",
        "app/request/eligibility.py",
        "prompt = [*request.prompt_token_ids, *tokens]",
        "prompt = [*request.prompt_token_ids]",
        "none",
    ),
    Bug(
        "outputs of an attempt that was given up are still taken",
        "app/request/decode_stream.py",
        "self._receivers.pop(engine_id, None)",
        "pass",
        "hang_decode",
        102,
    ),
    Bug(
        "news of an older attempt move a sequence that has the new one",
        "app/request/driver.py",
        "if ticket is not None and ticket.attempt <= attempt:",
        "if ticket is not None:",
        "crash_decode",
    ),
    Bug(
        "a ticket is not ended when its requests are",
        "app/request/group.py",
        "await self._controller.call(Ended(",
        "await asyncio.sleep(0) or (lambda _: None)(Ended(",
        "none",
    ),
    Bug(
        "a controller that has come back does not hear of the live tickets",
        "app/rpc/controller_loops.py",
        "if not reply.known:",
        "if False:",
        "crash_controller, slow_decode",
        3,
    ),
    # -- the controller
    Bug(
        "a request that is asked for twice gets two tickets",
        "actors/controller/admission.py",
        "if (ticket_id := self.registry.by_request.get(key)) is not None:",
        "if (ticket_id := None) is not None:",
        "duplicate, drop",
        3,
    ),
    Bug(
        "a seal of an older attempt is accepted",
        "actors/controller/tickets.py",
        "if live is None or live.ticket.attempt != seal.attempt or live.state not in HOLDS_LEASE:",
        "if live is None or live.state not in HOLDS_LEASE:",
        "delay, drop, crash_prefill, crash_decode, break_link",
        11,
    ),
    Bug(
        "a new controller takes the tickets of the one before for dead",
        "actors/controller/state.py",
        "epoch_of(ticket_id) < self.epoch",
        "False",
        "crash_controller",
    ),
    Bug(
        "a retry keeps its attempt's number",
        "actors/controller/tickets.py",
        "attempt=live.ticket.attempt + 1, epoch=self.epoch",
        "attempt=live.ticket.attempt, epoch=self.epoch",
        "crash_decode",
    ),
    Bug(
        "a ticket that loses its place keeps its blocks reserved",
        "actors/controller/registry.py",
        "decode.reserved -= live.reserved",
        "decode.reserved -= 0",
        "none",
    ),
    # -- transfer
    Bug(
        "a lease is given back while an engine reads it",
        "actors/transfer/staging.py",
        "return bool(self.writers or self.readers)",
        "return bool(self.writers)",
        "hang_decode, slow_decode",
    ),
    Bug(
        "a lease is given back while an engine writes it",
        "actors/transfer/staging.py",
        "return bool(self.writers or self.readers)",
        "return bool(self.readers)",
        "hang_prefill, slow_prefill",
    ),
    Bug(
        "a fetch from another node writes on when its bytes have been given back",
        "actors/transfer/machine.py",
        "self.staging.open_writer(waiting.key, fetch_name(fetch.fetch_id))",
        "pass",
        "hang_decode, cancel",
    ),
    Bug(
        "an engine that has opened its pages stays a reader",
        "actors/transfer/machine.py",
        "        self.staging.reader_done(key, engine)\n        if (whole :=",
        "        if (whole :=",
        "none",
    ),
    Bug(
        "an engine that has died keeps its bytes",
        "actors/transfer/machine.py",
        "self.staging.peer_gone(engine)",
        "pass",
        "crash_prefill, slow_prefill",
        1,
    ),
    Bug(
        "an engine that has sealed its last page stays a writer",
        "actors/transfer/machine.py",
        "if message.last:",
        "if False:",
        "none",
    ),
    Bug(
        "a lease that was taken back before it was asked for is granted",
        "actors/transfer/machine.py",
        "if key in self.ended or self.engines.any_gone(event.engines):",
        "if self.engines.any_gone(event.engines):",
        "hang_transfer, cancel",
        66,
    ),
    Bug(
        "a ticket that has ended keeps waiting for bytes",
        "actors/transfer/machine.py",
        "self.queue.leave(waiting)\n            for call in waiting.calls:",
        "for call in waiting.calls:",
        "full_staging, cancel",
        3,
    ),
    Bug(
        "what is kept for the lease at the front is lent to those behind it",
        "actors/transfer/lease_queue.py",
        "now_ns + waiting.keep_ns, front and front[1:])",
        "now_ns + waiting.keep_ns, None)",
        "full_staging",
    ),
)


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles one module from changed source."""

    bug: Bug

    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text().replace(self.bug.old, self.bug.new)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug
        self._module = bug.file.removesuffix(".py").replace("/", ".")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        file = str(ROOT / self._bug.file)
        loader = _Loader(fullname, file)
        loader.bug = self._bug
        return importlib.util.spec_from_file_location(fullname, file, loader=loader)


def places(bug: Bug) -> int:
    """How often the line that the bug changes stands in its file; 1 when the list is up to date."""
    return (ROOT / bug.file).read_text().count(bug.old)


def find(bug: Bug | None, seeds: list[int]) -> tuple[int, str]:
    """The first seed that finds a violation, and the violation; (-1, "") when none does. In this process."""
    if bug is not None:
        sys.meta_path.insert(0, _Finder(bug))
    import logging

    logging.disable(logging.CRITICAL)
    from ops.simulate.cli import judge
    from ops.simulate.faults import parse_kinds
    from ops.simulate.scenario import random_scenario

    for seed in seeds:
        found, _ = judge(random_scenario(seed, parse_kinds(bug.faults if bug is not None else "all")))
        if not found.clean:
            return seed, found.violations[0]
    return -1, ""


def in_process(bug: Bug | None, seeds: list[int]) -> dict[str, Any]:
    """`find` in a forked process."""
    began = time.monotonic()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            seed, text = find(bug, seeds)
        except BaseException:
            seed, text = -2, traceback.format_exc()
        answer = {"seed": seed, "violation": text, "cpu_s": round(time.process_time(), 1)}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = json.loads(pipe.read() or '{"seed": -2, "violation": "the process died"}')
    os.waitpid(child, 0)
    name = bug.what if bug is not None else "no bug"
    return {"bug": name, "faults": bug.faults if bug else "all", **answer, "wall_s": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--scan", type=int, help="seeds from 0 on, for each bug")
    parser.add_argument("--known", action="store_true", help="the seed noted first, then 0 .. 24")
    parser.add_argument("--only", default="", help="bugs whose text has this in it")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import ray
    import vllm.v1.engine.async_llm  # noqa: F401  imported once for all processes; nothing of the product is

    assert ray and not [name for name in sys.modules if name.split(".")[0] in ("app", "actors", "cluster", "ops")]
    for bug in BUGS:
        if args.only in bug.what:
            seeds = list(range(args.scan or SEEDS))
            print(json.dumps(in_process(bug, [bug.seed, *seeds[:KNOWN_MORE]] if args.known else seeds)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
