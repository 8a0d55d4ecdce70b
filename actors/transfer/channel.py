"""How an engine's worker half and its node's transfer actor talk: typed, bounded messages over a local socket. Pure.

The bytes of the pages never pass here; they lie in shared memory that both have mapped. A frame is a big-endian
32-bit length and a MessagePack body; the length is checked before memory is taken for it, and the body is decoded
against the declared types.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from actors.messages import Opened, Role

FRAME_BYTES_MAX = 8 << 20
_LENGTH = struct.Struct(">I")


class ChannelError(ValueError):
    """What no honest peer would send."""


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    engine: str  # "<replica id>#<rank>": who may touch leases
    role: Role
    pid: int


class PagesSealed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Pages `first_page ...` of a ticket are in staging; `digests[i]` is the digest of page `first_page + i`."""

    ticket_id: int
    attempt: int
    shard: int
    num_shards: int
    first_page: int
    digests: list[int]
    layout_fingerprint: str
    num_tokens: int  # of the whole prompt
    last: bool


class WriterDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine will not write for the ticket any more, sealed or not."""

    ticket_id: int
    attempt: int


class PagesOpened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine has read what it wanted of the ticket's bytes and will not touch them again."""

    opened: Opened
    shard: int = 0
    num_shards: int = 1


class StagingMapped(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to an `Offer`: this engine has that memory mapped, and touches the bytes of `dropped` no more."""

    segment: str
    dropped: list[tuple[int, int]] = []


class Goodbye(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This engine ends, and touches no bytes any more."""


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """From the transfer actor, with the staging memory's descriptor. What came before under another name is void.

    `revoked`: (ticket_id, attempt) whose bytes this engine may have held before this link, and must not touch again.
    """

    segment: str
    num_bytes: int
    revoked: list[tuple[int, int]] = []


WorkerMessage = Hello | PagesSealed | WriterDone | PagesOpened | StagingMapped | Goodbye

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(WorkerMessage)
_offer_decoder = msgspec.msgpack.Decoder(Offer)


def encode_frame(message: WorkerMessage | Offer) -> bytes:
    body = _encoder.encode(message)
    if len(body) > FRAME_BYTES_MAX:
        raise ChannelError(f"{type(message).__name__} of {len(body)} bytes; the most is {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    length: int = _LENGTH.unpack(head)[0]
    if length > FRAME_BYTES_MAX:
        raise ChannelError(f"frame of {length} bytes announced; the most is {FRAME_BYTES_MAX}")
    return length


def decode_body(body: bytes) -> WorkerMessage:
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ChannelError(f"message of {len(body)} bytes is not understood: {error}") from None


def decode_offer(body: bytes) -> Offer:
    try:
        return _offer_decoder.decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ChannelError(f"message of {len(body)} bytes is not understood: {error}") from None


class Frames:
    """Bytes in as they come, whole bodies out."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while len(self._data) >= _LENGTH.size:
            end = _LENGTH.size + frame_length(bytes(self._data[: _LENGTH.size]))
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield body
