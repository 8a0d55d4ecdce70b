"""What the parts of one application are called in Ray and in the file system. Pure.

Every name begins with the Serve application's, so that two applications in one Ray cluster share nothing.
"""

from __future__ import annotations

import hashlib
import re

NAMESPACE = "pageferry"  # Ray's, of all actors that are not Serve's
TAG_LENGTH = 20


def controller_actor(application: str) -> str:
    return f"{application}:controller"


def transfer_actor(application: str, node_id: str) -> str:
    return f"{application}:transfer:{node_id[:12]}"


def is_of(application: str, actor_name: str) -> bool:
    """Whether an actor in `NAMESPACE` belongs to this application."""
    return actor_name == controller_actor(application) or actor_name.startswith(transfer_actor(application, ""))


def file_tag(application: str) -> str:
    """Short and harmless in a file name; differs between applications as their names do."""
    plain = re.sub(r"[^A-Za-z0-9_]", "_", application)
    if plain == application and len(plain) <= TAG_LENGTH:
        return plain
    digest = hashlib.blake2b(application.encode(), digest_size=4).hexdigest()
    return f"{plain[: TAG_LENGTH - 9]}_{digest}"
