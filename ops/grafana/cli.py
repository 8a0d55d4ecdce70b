"""`pageferry dashboards`: puts the dashboards into a Grafana, or writes files for its provisioning."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import requests

from cluster.json_output import print_json

PROMETHEUS = "http://localhost:9090"


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry dashboards",
        description="Creates or updates folder, data source and dashboards in a Grafana; what is equal is left.",
        epilog="examples:\n"
        "  pageferry dashboards --url http://grafana:3000 --token-file ~/.grafana-token --dry-run\n"
        "  pageferry dashboards --export /etc/grafana/provisioning --webhook https://example.org/hook",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    make.add_argument("--url", help="of Grafana, with its path prefix if it has one")
    make.add_argument("--token-file", type=Path, help="file with the token of a service account, role Editor or Admin")
    make.add_argument("--prometheus", default=PROMETHEUS, metavar="URL", help=f"as Grafana reaches it ({PROMETHEUS})")
    make.add_argument("--dry-run", action="store_true", help="ask Grafana, write nothing, say what would be done")
    make.add_argument("--insecure", action="store_true", help="do not verify Grafana's certificate")
    make.add_argument("--export", type=Path, metavar="DIR", help="write provisioning files (alert rules too) instead")
    make.add_argument("--webhook", default="http://localhost:9093/", help="of the contact point in exported files")
    make.add_argument("--runbooks", default="", metavar="URL", help="where ops/runbook can be read; before its path")
    make.add_argument("--json", action="store_true")
    return make


def main(argv: list[str]) -> int:
    make = parser()
    args = make.parse_args(argv)
    from grafana_api.grafana_api import GrafanaException

    from ops.grafana import provision, publish
    from ops.grafana.dashboards import DASHBOARDS

    if args.export is not None:
        files = provision.export(args.export, DASHBOARDS, args.prometheus, args.webhook, args.runbooks)
        _say(args.json, [{"file": str(file)} for file in files], [f"written: {file}" for file in files])
        return 0
    if args.url is None or args.token_file is None:
        make.error("--url and --token-file are needed, or --export DIR")
    try:
        token = args.token_file.read_text().strip()
        if not token or len(token.split()) != 1:
            raise ValueError(f"{args.token_file} must hold one token and nothing else")
        grafana = publish.connect(args.url, token, verify=not args.insecure)
        done = publish.publish(grafana, DASHBOARDS, args.prometheus, args.dry_run)
    except (ValueError, OSError, GrafanaException, requests.RequestException) as error:
        print(f"pageferry dashboards: {args.url}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    would = "would be " if args.dry_run else ""
    lines = [f"{what}: {'' if change == 'unchanged' else would}{change}" for what, change in done]
    _say(args.json, [{"what": what, "change": change} for what, change in done], lines)
    return 0


def _say(as_json: bool, tree: list[dict[str, str]], lines: list[str]) -> None:
    if as_json:
        print_json(tree)
    else:
        print("\n".join(lines))
