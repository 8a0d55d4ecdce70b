"""`pageferry keys`: the file of API keys' hashes. A running service reads it again by itself."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.api.keys import KeyEntry, KeysError, new_key, read_file, write_file
from cluster.json_output import print_json

TENANT_MAX = 64  # characters


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry keys",
        description="Makes, lists and revokes API keys in the file that frontend.keys_file names. Only hashes are "
        "kept; a new key is shown once. A running service takes a change up within seconds.",
    )
    make.add_argument("action", choices=["add", "list", "revoke"])
    make.add_argument("name", nargs="?", help="add: the tenant; revoke: the key's id, as `list` shows it")
    make.add_argument("--file", type=Path, required=True, help="the keys file; add makes it")
    make.add_argument("--admin", action="store_true", help="add: the key also opens /status and administration")
    make.add_argument("--json", action="store_true")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    try:
        if args.action != "list" and not args.name:
            raise KeysError(f"{args.action} needs {'a tenant' if args.action == 'add' else 'the id of a key'}")
        entries = {} if args.action == "add" and not args.file.exists() else read_file(args.file)
        if args.action == "add":
            _add(args, entries)
        elif args.action == "revoke":
            _revoke(args, entries)
        else:
            _list(args, entries)
    except (KeysError, OSError) as error:
        print(f"pageferry keys: {error}", file=sys.stderr)
        return 2
    return 0


def _add(args: argparse.Namespace, entries: dict[str, KeyEntry]) -> None:
    tenant = args.name
    if len(tenant) > TENANT_MAX or not tenant.isprintable() or tenant != tenant.strip():
        raise KeysError(
            f"tenant {tenant[:TENANT_MAX]!r}: at most {TENANT_MAX} printable characters, no space at its ends"
        )
    key, entry = new_key(tenant, args.admin, time.time())
    write_file(args.file, entries | {entry.id: entry})
    if args.json:
        print_json({"id": entry.id, "tenant": tenant, "admin": args.admin, "key": key})
        return
    print(key)
    print(f"key {entry.id} of {tenant}; it is shown this once, the file has its hash only", file=sys.stderr)


def _revoke(args: argparse.Namespace, entries: dict[str, KeyEntry]) -> None:
    if args.name not in entries:
        raise KeysError(f"no key {args.name!r} in {args.file}; `pageferry keys list --file {args.file}` shows them")
    write_file(args.file, {name: entry for name, entry in entries.items() if name != args.name})
    if args.json:
        print_json({"revoked": args.name})
    else:
        print(f"key {args.name} of {entries[args.name].tenant} is revoked")


def _list(args: argparse.Namespace, entries: dict[str, KeyEntry]) -> None:
    if args.json:
        rows = [{"id": e.id, "tenant": e.tenant, "admin": e.admin, "made": e.made} for e in entries.values()]
        print_json({"keys": rows})
        return
    table = Table("id", "tenant", "for", "made (UTC)", box=None, pad_edge=False)
    for entry in entries.values():
        made = time.strftime("%Y-%m-%d %H:%M", time.gmtime(entry.made))
        table.add_row(entry.id, entry.tenant, "administration" if entry.admin else "clients", made)
    Console().print(table)
