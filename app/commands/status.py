"""`pageferry status`: what a running service says of itself, as a table or as JSON."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.api.keys import ADMIN_KEY
from app.commands import running
from app.commands.own_http import opener
from app.commands.page_picture import picture
from cluster.json_output import print_json


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(prog="pageferry status", description="Pools, replicas, tickets, bytes of a service.")
    make.add_argument("--url", help=running.HELP)
    make.add_argument("--api-key", default=os.environ.get(ADMIN_KEY), help=f"an administrator's; default: {ADMIN_KEY}")
    make.add_argument("--json", action="store_true", help="the same as GET /status")
    make.add_argument("--watch", action="store_true", help="again every --every seconds until Ctrl-C")
    make.add_argument("--every", type=float, default=1.0, metavar="SECONDS")
    make.add_argument(
        "--audit", action="store_true", help="check the conservation laws; exit status 1 when one is broken"
    )
    make.add_argument(
        "--pages",
        nargs="?",
        const="",
        metavar="REPLICA",
        help="which request holds which page, as a picture; of one replica (the begin of its id), or of all",
    )
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        args.url = running.find(args.url)
    except running.SeveralServices as error:
        print(f"pageferry status: {error}", file=sys.stderr)
        return 2
    try:
        if args.audit:
            return _audit(fetch(args.url, "/status/audit", args.api_key), args.json)
        if args.pages is not None:
            return _pages(fetch(args.url, "/status/pages", args.api_key), args.pages, args.json)
        if args.json:
            print_json(fetch(args.url, "/status", args.api_key))
            return 0
        if args.watch:
            _watch(args)
        else:
            Console().print(table(fetch(args.url, "/status", args.api_key)))
    except BrokenPipeError:
        raise  # the reader of our output has left
    except OSError as error:
        print(f"pageferry status: {args.url} does not answer: {error}; --url names another", file=sys.stderr)
        return 1
    return 0


def fetch(url: str, path: str, api_key: str | None = None) -> dict[str, Any]:
    """Raises OSError when the service is not there or refuses."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        with opener(url).open(urllib.request.Request(url + path, headers=headers), timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        raise OSError(f"{path} answered {error.code}: {error.read(300).decode(errors='replace')}") from None


def _watch(args: argparse.Namespace) -> None:
    with Live(refresh_per_second=4) as live:
        try:
            while True:
                live.update(table(fetch(args.url, "/status", args.api_key)))
                time.sleep(args.every)
        except KeyboardInterrupt:
            return


def _pages(found: dict[str, Any], replica: str, as_json: bool) -> int:
    chosen = {name: each for name, each in found.items() if name.startswith(replica)}
    if not chosen:
        there = ", ".join(found) or "none"
        print(f"pageferry status: no replica's id begins with {replica!r}; there are: {there}", file=sys.stderr)
        return 1
    if as_json:
        print_json(chosen)
    else:
        width = max(16, min(128, shutil.get_terminal_size().columns - 10))
        print("\n\n".join("\n".join(picture(name, each, width)) for name, each in chosen.items()))
    return 0


def _audit(found: dict[str, Any], as_json: bool) -> int:
    breaches = found.get("breaches", [])
    if as_json:
        print_json(found)
    else:
        Console().print(audit_table(found))
        print("\n".join(audit_lines(found)))
    return 1 if breaches else 0


def audit_table(found: dict[str, Any]) -> Table:
    """One row a replica: the laws of its record in the controller's registry, and of its own page ledger."""
    rows = Table(title=_laws(found), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("pool", "replica", "state", "check", "registry", "ledger"):
        rows.add_column(name, no_wrap=True)
    for name in ("held", "doubt", "rows", "ended"):
        rows.add_column(name, justify="right", no_wrap=True)
    for replica_id, each in found.get("replicas", {}).items():
        rows.add_row(*_audit_row(replica_id, each, found.get("engines", {}).get(replica_id)))
    return rows


def audit_lines(found: dict[str, Any]) -> list[str]:
    """What is broken now, and what was: with the last events of each page."""
    lines = [f"broken now: {breach}" for breach in found.get("breaches", [])]
    lines += [f"not checked: {name} does not answer: {why}" for name, why in found.get("silent", {}).items()]
    for replica_id, engine in found.get("engines", {}).items():
        lines += _page_stories(replica_id, engine["integrity"])
    return lines


def _laws(found: dict[str, Any]) -> str:
    broken = len(found.get("breaches", []))
    laws = f"{broken} laws are broken" if broken else "all laws hold"
    return f"{laws}: {found.get('tickets_live', 0)} tickets live, {found.get('tickets_ended', 0)} ended"


def _audit_row(replica_id: str, each: dict[str, Any], engine: dict[str, Any] | None) -> list[str]:
    integrity = engine["integrity"] if engine else {}
    mode = integrity.get("mode", "?")
    ledger = "?" if engine is None else "-" if mode == "off" else _count(integrity["laws_broken"])
    counters = engine["scheduler"]["counters"] if engine else {}
    return [
        each["pool"],
        replica_id,
        each["state"],
        mode,
        _count(each["laws_broken"]),
        ledger,
        f"{each['blocks_held']:,}",
        f"{each['blocks_quarantined']:,}",
        f"{counters.get('integrity_rows_checked', 0):,}",
        f"{counters.get('integrity_requests_ended', 0):,}",
    ]


def _count(broken: list[str]) -> str:
    return f"{len(broken)} broken" if broken else "ok"


def _page_stories(replica_id: str, integrity: dict[str, Any]) -> list[str]:
    lines = []
    for breach in integrity.get("breaches", ()):
        lines.append(f"was broken: {replica_id}: {breach['law']}: page {breach['page']}: {breach['text']}")
        lines += [f"    {event}" for event in breach["history"]]
    for verdict in integrity.get("verdicts", ()):
        lines.append(f"tag mismatch: {replica_id}: request {verdict['request_id']}: {verdict['text']}")
        lines += [f"    {event}" for event in verdict["history"]]
    return lines


def table(status: dict[str, Any]) -> Group:
    replicas = Table(title=_title(status), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("pool", "replica", "state"):
        replicas.add_column(name, no_wrap=True)
    for name in ("pages held", "quarantined", "held", "run", "wait", "tok/s"):
        replicas.add_column(name, justify="right", no_wrap=True)
    for pool, found in status["pools"].items():
        for each in found["replicas"]:
            replicas.add_row(*_replica_row(pool, each))
        if not found["replicas"]:
            replicas.add_row(pool, "-", "no replica", *[""] * 6)
    return Group(replicas, Text("\n".join([*_pool_lines(status), *engine_lines(status), _summary(status)])))


def _pool_lines(status: dict[str, Any]) -> list[str]:
    """A line a pool: what Serve holds, what is on its way, and why."""
    lines = []
    for pool, found in status["pools"].items():
        target = "?" if found["target"] is None else str(found["target"])
        parts = [f"{len(found['replicas'])} of {target} replicas"]
        parts += [
            f"{found[name]} {word}"
            for name, word in (("starting", "starting"), ("unplaced", "without room"))
            if found[name]
        ]
        parts += [f"{found['wanted']} asked for"] if found["wanted"] is not None else []
        lines.append(f"{pool:<9} {', '.join(parts)}; {found['scaling']}")
    return lines


def engine_lines(status: dict[str, Any]) -> list[str]:
    """What the engines of each pool run on; a line for each kind where replicas differ."""
    lines = []
    for pool, found in status["pools"].items():
        kinds = Counter(_engine(each["engine"]) for each in found["replicas"] if each.get("engine"))
        for kind, count in kinds.items():
            lines.append(f"{pool:<9} {kind}" + (f" ({count} of {kinds.total()})" if len(kinds) > 1 else ""))
    return lines


def _engine(facts: dict[str, Any]) -> str:
    """In one line; what an engine of an older version has not said is left out."""
    graphs, overlap = facts.get("cuda_graphs"), facts.get("async_scheduling")
    pages = [str(facts[name]) for name in ("kv_dtype", "kv_cache_layout") if facts.get(name)]
    parts = [
        facts.get("device"),
        facts.get("attention_backend"),
        f"pages {' '.join(pages)}" if pages else "",
        f"runner {facts['model_runner']}" if facts.get("model_runner") else "",
        "" if graphs is None else "no graphs" if graphs == "NONE" else f"graphs {graphs}",
        "" if overlap is None else f"{'asynchronous' if overlap else 'synchronous'} scheduling",
    ]
    return ", ".join(part for part in parts if part)


def _title(status: dict[str, Any]) -> str:
    return f"{status.get('model', '')}, controller epoch {status.get('epoch', '?')}"


def _replica_row(pool: str, each: dict[str, Any]) -> list[str]:
    total, held = each["blocks_total"], each["blocks_held"]
    return [
        pool,
        each["replica_id"],
        each.get("state", ""),
        f"{held:,} / {total:,}",
        f"{each['blocks_quarantined']:,}",
        f"{held / total:.1%}" if total else "-",
        str(each["running"]),
        str(each["waiting"]),
        f"{each.get('tokens_per_s', 0.0):,.0f}",
    ]


def _summary(status: dict[str, Any]) -> str:
    tickets, staging, ferry = status["tickets"], status["staging"], status["ferry"]
    states = ", ".join(f"{count} {state}" for state, count in tickets["by_state"].items() if count)
    ended = ", ".join(f"{count:,} {outcome}" for outcome, count in tickets.get("ended", {}).items())
    return "\n".join(
        [
            f"tickets   {tickets['in_flight']} in flight"
            + (f" ({states})" if states else "")
            + (f"; ended: {ended}" if ended else ""),
            f"staging   {size(staging['bytes_held'])} of {size(staging['bytes_max'])} held",
            f"ferry     {size(ferry['bytes_moved'])} moved, {ferry['tokens_moved']:,} prompt tokens taken over, "
            f"{ferry['tokens_recomputed']:,} computed again by decode",
            *(_link(each) for each in status.get("links", ())),
        ]
    )


def _link(each: dict[str, Any]) -> str:
    rate = f"{size(each['bytes_per_s'])}/s" if each["bytes_per_s"] else "not measured"
    why = f" ({each['reason']})" if each["reason"] else ""
    return (
        f"link      {each['node_id'][:8]} to {each['to'][:8]}: {each['way'] or 'no way yet'}, {rate}, "
        f"{each['fetches']:,} fetches, {each['failed']:,} failed{why}"
    )


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")
