"""What a frontend and a replica say on the socket that stands between them: typed, bounded messages. Pure.

Calls to a replica and its tokens go this way; Ray carries the address, and its stream says how long the replica lives.
A frame is a big-endian 32-bit length and a MessagePack body; the length is checked before memory is taken for it, and
the body is decoded against the declared types. Who connects proves that it was invited: the replica sends random bytes,
and gets their HMAC under a secret that it gave out over Ray with its address, one for each invitation.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import struct
from typing import TypeVar

import msgspec

from actors.messages import HandOver, PrefillDone, Ticket

FRAME_BYTES_MAX = 256 << 20
GREETING_BYTES_MAX = 4096  # before the peer has proven who it is
UNREAD_BYTES_MAX = 256 << 20  # that a peer leaves unread before it is given up
NONCE_BYTES = SECRET_BYTES = 32
_LENGTH = struct.Struct(">I")
T = TypeVar("T")


class LinkError(Exception):
    """What no honest peer would send, or leave unread."""


class Address(msgspec.Struct, frozen=True):
    """Over Ray. `invitation`: a number of the replica's, whose `secret` the frontend proves to have."""

    host: str
    port: int
    invitation: int
    secret: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag=True):
    invitation: int
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """From here on calls are taken, and outputs of this frontend's requests are sent."""


class Prefill(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    ticket: Ticket
    frames: list[bytes]  # `EngineCoreRequest` in vLLM's own MessagePack


class Submit(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    ticket: Ticket
    hand_over: HandOver | None
    frames: list[bytes]


class Abort(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    request_ids: list[str]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The caller does not wait for that call any more."""

    call_id: int


class Answered(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    prefilled: PrefillDone | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    call_id: int
    error: str  # "Type: message"
    died: bool = False  # the engine has ended, with that request in it


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """`EngineCoreOutputs` of one engine step, in vLLM's own MessagePack: all of this frontend's requests in it."""

    frames: list[bytes]


class EngineEnded(msgspec.Struct, frozen=True, tag=True):
    """With all that was in it; the connection ends after this. One that ends without it says nothing of the engine."""


Call = Prefill | Submit | Abort
ToReplica = Call | Cancel
ToFrontend = Answered | Failed | Outputs | EngineEnded

_encoder = msgspec.msgpack.Encoder()
CHALLENGE = msgspec.msgpack.Decoder(Challenge)
HELLO = msgspec.msgpack.Decoder(Hello)
WELCOME = msgspec.msgpack.Decoder(Welcome)
TO_REPLICA: msgspec.msgpack.Decoder[ToReplica] = msgspec.msgpack.Decoder(ToReplica)
TO_FRONTEND: msgspec.msgpack.Decoder[ToFrontend] = msgspec.msgpack.Decoder(ToFrontend)


def proof(secret: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, nonce, hashlib.sha256)


def send(writer: asyncio.StreamWriter, message: msgspec.Struct) -> None:
    """Queues the message. Raises `LinkError` when it is too large, or when the peer leaves too much unread."""
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise LinkError(f"{type(message).__name__} has {len(body)} bytes; at most {FRAME_BYTES_MAX} are sent")
    if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
        raise LinkError(f"the peer has left more than {UNREAD_BYTES_MAX} bytes unread")
    writer.write(_LENGTH.pack(len(body)) + body)


async def receive(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T], most: int = FRAME_BYTES_MAX) -> T:
    """Raises `LinkError`, and `OSError` or `EOFError` when the connection has ended."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > most:
        raise LinkError(f"a frame of {length} bytes is announced; at most {most} are taken")
    try:
        return decoder.decode(await reader.readexactly(length))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LinkError(f"a message of {length} bytes is not understood: {error}") from None
