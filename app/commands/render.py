"""`pageferry render`: a topology as a Serve config, a RayService, or a folder for kustomize."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from app import rendering
from cluster.models import ModelsSpec
from cluster.spec import ClusterSpec, SpecError, parse_overrides


def parser() -> argparse.ArgumentParser:
    make = argparse.ArgumentParser(
        prog="pageferry render",
        description="Writes a topology as YAML: `serve` for `serve deploy`, `rayservice` for KubeRay, `kustomize` as a "
        "folder with a RayService and a PodMonitor.",
    )
    make.add_argument("form", choices=["serve", "rayservice", "kustomize"])
    make.add_argument(
        "config", help="topology file, or a shipped one by name; `serve`: also a file that names several models"
    )
    make.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as pools.decode.replicas=2")
    make.add_argument("--name", default="pageferry", help="of the application; default: %(default)s")
    make.add_argument("--route-prefix", default="/")
    make.add_argument("--image", default="pageferry:latest", help="container image; see ops/container")
    make.add_argument("--gpus-per-node", type=int, default=8)
    make.add_argument("--memory-gib", type=float, help="of a worker; default: from the topology, on CPU")
    make.add_argument("--out", type=Path, help="file, or folder for kustomize; default: standard output")
    return make


def main(argv: list[str]) -> int:
    args = parser().parse_intermixed_args(argv)
    try:
        if ModelsSpec.is_one(args.config):
            return _models(args)
        spec = ClusterSpec.load(args.config, parse_overrides(args.overrides))
        target = rendering.Target(args.name, args.image, args.route_prefix, args.gpus_per_node, args.memory_gib)
        if args.form == "kustomize":
            return _folder(rendering.kustomization(spec, target), args.out)
        text = _yaml((rendering.serve_config if args.form == "serve" else rendering.rayservice)(spec, target))
    except SpecError as error:
        print(f"pageferry render: {error}", file=sys.stderr)
        return 2
    return _write(text, args.out)


def _models(args: argparse.Namespace) -> int:
    """Of a file that names several models."""
    if args.form != "serve" or args.overrides:
        raise SpecError(f"{args.config} names several models: it becomes a Serve config; settings stand in the file")
    return _write(_yaml(rendering.models_config(*ModelsSpec.load(args.config))), args.out)


def _write(text: str, out: Path | None) -> int:
    if out is None:
        print(text, end="")
    else:
        out.write_text(text)
    return 0


def _folder(files: dict[str, dict[str, Any]], folder: Path | None) -> int:
    if folder is None:
        print("pageferry render: kustomize writes several files: give a folder with --out", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    for name, document in files.items():
        (folder / name).write_text(_yaml(document))
    return 0


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as blocks, nothing by reference: as a person would write it."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(document: dict[str, Any]) -> str:
    return yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=120)
