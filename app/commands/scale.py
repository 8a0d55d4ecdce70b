"""`pageferry scale`: the size of a pool by hand, in every scaling mode, inside the pool's bounds."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.request

from app.api.keys import ADMIN_KEY
from app.commands import running
from app.commands.own_http import opener
from cluster.json_output import print_json

UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """`90`, `90s`, `10m`, `2h`."""
    if (match := re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time such as 90s, 10m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry scale", description="Sets how many replicas a pool should have, inside its bounds."
    )
    make.add_argument("pool", choices=["prefill", "decode"])
    make.add_argument("replicas", type=int)
    make.add_argument("--hold", type=seconds, default=600.0, metavar="TIME", help="automatic scaling rests: 90s, 10m")
    make.add_argument("--url", help=running.HELP)
    make.add_argument("--api-key", default=os.environ.get(ADMIN_KEY), help=f"an administrator's; default: {ADMIN_KEY}")
    make.add_argument("--json", action="store_true")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        args.url = running.find(args.url)
    except running.SeveralServices as error:
        print(f"pageferry scale: {error}", file=sys.stderr)
        return 2
    body = {"pool": args.pool, "replicas": args.replicas, "hold_s": args.hold}
    headers = {"Content-Type": "application/json"}
    if args.api_key:
        headers["Authorization"] = f"Bearer {args.api_key}"
    request = urllib.request.Request(f"{args.url}/admin/scale", json.dumps(body).encode(), headers)
    try:
        with opener(args.url).open(request, timeout=15) as answer:
            done = json.load(answer)
    except urllib.error.HTTPError as error:
        print(f"pageferry scale: {_message(error)}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"pageferry scale: {args.url} does not answer: {error}; --url names another", file=sys.stderr)
        return 1
    if args.json:
        print_json(done)
    else:
        print(f"{args.pool}: {args.replicas} replicas asked for; `pageferry status` shows when they are there")
    return 0


def _message(error: urllib.error.HTTPError) -> str:
    text = error.read(2000).decode(errors="replace")
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"/admin/scale answered {error.code}: {text[:300]}"
