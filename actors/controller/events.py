"""What goes into the controller's machine beside the messages of others (`actors.messages`), and what comes out.

A message is answered with exactly one `Reply`, at once or in a later step. Times are nanoseconds on the controller's
own clock.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from actors.messages import FrontendCommand, Request

CallId = int


class IncompatibleReplica(ValueError):
    """A replica that cannot exchange pages with this cluster; the message shows both sides, field by field."""


class StepFailed(RuntimeError):
    """The controller could not handle a message; what the step had changed is undone. Its log has the reason."""


# -- inputs


class FrontendGone(msgspec.Struct, frozen=True):
    """The platform says that this frontend's process is gone: no client waits for its requests any more."""

    frontend_id: str


class NodesDraining(msgspec.Struct, frozen=True):
    """The platform says which nodes are about to be taken away, and in how many seconds (None: it does not say)."""

    seconds_left: dict[str, float | None]  # by node id


class Withdraw(msgspec.Struct, frozen=True):
    """The caller that waited for this call is gone (client disconnected, process died)."""

    call_id: CallId


class Tick(msgspec.Struct, frozen=True):
    """Time passes: deadlines, silence, fencing, drains, scaling. A few times a second."""


Event = Request[Any] | Withdraw | FrontendGone | NodesDraining | Tick


# -- effects


class Reply(msgspec.Struct, frozen=True):
    """The answer to a call; an exception as `value` is raised at the caller."""

    call_id: CallId
    value: Any


class ToFrontend(msgspec.Struct, frozen=True):
    frontend_id: str
    order: FrontendCommand


class Replace(msgspec.Struct, frozen=True):
    """End this process, it hangs and may hold a GPU; the platform makes another one."""

    kind: Literal["replica", "transfer"]
    name: str  # replica id, node id


class Log(msgspec.Struct, frozen=True):
    text: str
    is_error: bool = False


Effect = Reply | ToFrontend | Replace | Log
