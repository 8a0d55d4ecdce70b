"""Tokens of a stream get the time of the read that brought their line's end, whatever HTTP frames it came in."""

from __future__ import annotations

import asyncio
import json

import pytest

from ops.bench import gaps
from ops.bench.gaps import Stream, stream


def event(*token_ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"token_ids": list(token_ids)}]}).encode() + b"\n\n"


def frame(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def answer(*writes: bytes) -> tuple[int, asyncio.Server]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for each in writes:
            writer.write(each)
            await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1], server


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
async def test_a_line_may_be_cut_by_a_chunks_frame(more: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n" + more + b"\r\n"
    first, second = event(1), event(2, 3)
    port, server = await answer(
        head + frame(first[:9]) + frame(first[9:]), frame(second[:20]), frame(second[20:]) + frame(b"")
    )
    seen = await stream(port, {})
    server.close()
    assert len(seen.tokens_s) == 3 and seen.events_a_read == [1, 1]
    assert seen.tokens_s[1] == seen.tokens_s[2] > seen.tokens_s[0]


async def test_what_is_no_stream_or_has_no_end_raises() -> None:
    port, server = await answer(b"HTTP/1.1 429 No\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(RuntimeError, match="429"):
        await stream(port, {})
    server.close()
    port, server = await answer(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + frame(event(1)))
    with pytest.raises(Exception, match="incomplete chunked read"):
        await stream(port, {})
    server.close()


def test_gaps_are_counted_over_all_streams() -> None:
    found = gaps.summary([Stream([0.1, 0.2, 0.4], [1, 1, 1]), Stream([0.1, 0.1, 0.5], [2, 1])])
    assert found["gap_ms_p50"] == pytest.approx(200) and found["gap_ms_max"] == pytest.approx(400)
    assert (found["tokens"], found["events_a_read_max"], found["tokens_per_s"]) == (6, 2, 12.0)
    row = {"arm": "now", "busy_loop_s": 0.003, **found, "cpu_s": 1.5, "idle_cores": 0.125, "foreign_cpu": 0.3}
    text = gaps.table([row])
    assert "| now | 0.003 | 200.0 | 400.0 | 400.0 | 400.0 | 2 | 12.0 | 1.5 | 0.12 |" in text and "**Noisy:**" in text
