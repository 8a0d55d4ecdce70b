"""May this replica exchange pages with this cluster? A refusal shows both sides, field by field. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from actors.controller.events import IncompatibleReplica
from actors.messages import Announcement, Role
from kernels.layout import LayoutError, PageLayout, check_convertible


def _rows(name: str, mine: Any, theirs: Any) -> list[str]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        keys = dict.fromkeys([*theirs, *mine])
        return [
            row for key in keys for row in _rows(f"{name}.{key}", mine.get(key, "absent"), theirs.get(key, "absent"))
        ]
    return [] if mine == theirs else [f"{name}: {mine!r} here, {theirs!r} in the cluster"]


def check(new: Announcement, members: Iterable[Announcement]) -> None:
    """Raises `IncompatibleReplica` unless `new` has the members' geometry and tokenizer, and every prefill's pages can
    become every decode's pages. Several decode layouts may live side by side (a rolling change of the KV format): each
    ticket names the layout it is sealed for.
    """
    seen: set[str] = set()
    for member in members:
        problems = _rows("geometry", new.fingerprint.geometry, member.fingerprint.geometry)
        problems += _rows("tokenizer", new.fingerprint.tokenizer, member.fingerprint.tokenizer)
        if new.block_tokens != member.block_tokens:
            problems += _rows("block_tokens", new.block_tokens, member.block_tokens)
        if problems:
            raise IncompatibleReplica(
                f"{new.role} replica {new.replica_id} does not fit {member.role} replica {member.replica_id}: "
                + "; ".join(problems)
                + ". Start it with the cluster's model and tokenizer (model.tokenizer names one that speaks for both "
                "checkpoints), or start another application for this one"
            )
        key = repr(member.layout)
        if member.role is new.role or key in seen:
            continue
        seen.add(key)
        prefill, decode = (new, member) if new.role is Role.PREFILL else (member, new)
        try:
            check_convertible(PageLayout.from_dict(prefill.layout), PageLayout.from_dict(decode.layout))
        except LayoutError as error:
            raise IncompatibleReplica(
                f"{new.role} replica {new.replica_id} does not fit {member.role} replica {member.replica_id}: {error}"
            ) from None
