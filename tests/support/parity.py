"""OpenAI parity: every request form sent to a plain vLLM server and to the service, compared field by field.

The plain server has decode's settings (KV dtype, block size, limits). With BF16 pages on prefill the service computes
a prompt's attention over BF16 and a single FP8 engine over FP8, so greedy text may differ there; for exactness both
pools get one dtype here (`SETTINGS`). Random identifiers, times and host names are left out; log probabilities and
scores are compared to a tolerance, because a matrix product's rounding depends on how many rows are computed
together.

Every form is asked twice and the second answers are compared. A single FP8 engine itself answers a prompt that it
sees for the first time from keys and values that are not rounded yet, and the next time from its FP8 pages: log
probabilities move by a few hundredths between the two. Decode always reads pages, also for the tail of a prompt that
a warm single engine computes anew, so a seeded draw or a tie that lies within that rounding can still fall the other
way.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai_forms import Form

from actors.engine.config import engine_kwargs
from actors.messages import Role
from cluster.spec import ClusterSpec

# Random or of one process: not part of what a request form means.
VOLATILE = frozenset(
    {"id", "created", "created_at", "completed_at", "system_fingerprint", "request_id", "item_id", "metrics"}
)
RANDOM_ID = re.compile(r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|chatcmpl-tool|generate-tokens)[-_][0-9A-Za-z-]{6,}")
# One KV dtype, and every part of the server that a form may ask for.
SETTINGS: dict[str, Any] = {
    "pools.prefill.kv_dtype": "fp8_e4m3",
    "frontend.tool_call_parser": "hermes",
    "frontend.enable_auto_tool_choice": True,
    "frontend.server_args.enable_scale_out": True,
    "frontend.server_args.enable_prompt_tokens_details": True,
}
ENGINE_ONLY = ("kv_transfer_config", "worker_extension_cls")


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: Any
    headers: dict[str, str]


# -- sending


def send(url: str, form: Form, model: str, timeout_s: float = 120.0) -> Answer:
    body = dict(form.body)
    if (form.raw is None and form.method == "POST" and not form.path.endswith("tokenize")) or "messages" in body:
        body.setdefault("model", model)
    data = form.raw if form.raw is not None else json.dumps(body).encode() if form.method == "POST" else None
    request = urllib.request.Request(
        url + form.path, data=data, method=form.method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return _read(answer.status, answer.read(), dict(answer.headers))
    except urllib.error.HTTPError as error:
        return _read(error.code, error.read(), dict(error.headers))
    except OSError as error:
        return Answer(0, f"no answer: {error}", {})


def _read(status: int, raw: bytes, headers: dict[str, str]) -> Answer:
    kept = {name.lower(): value for name, value in headers.items() if name.lower() in ("content-type", "retry-after")}
    if kept.get("content-type", "").startswith("text/event-stream"):
        return Answer(status, assemble(raw.decode()), kept)
    try:
        return Answer(status, json.loads(raw), kept)
    except ValueError:
        return Answer(status, raw.decode(errors="replace"), kept)


def assemble(text: str) -> dict[str, Any]:
    """An event stream as one value: how tokens were grouped into events is timing, all else is kept.

    Text and lists of a choice are joined in order; of every other field the last value that is not null counts.
    """
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    whole: dict[str, Any] = {"choices": {}, "last": events[-1] if events[-1:] == ["[DONE]"] else None, "types": []}
    for event in events:
        if event == "[DONE]":
            continue
        chunk = json.loads(event)
        kind = chunk.get("type")
        if kind is not None and kind not in whole["types"]:
            whole["types"].append(kind)
        for choice in chunk.pop("choices", None) or ():
            _join(whole["choices"].setdefault(str(choice.get("index", 0)), {}), choice)
        if isinstance(chunk.get("delta"), str):
            whole["text"] = whole.get("text", "") + chunk.pop("delta")
            chunk.pop("logprobs", None)
        chunk.pop("sequence_number", None)
        whole |= {name: value for name, value in chunk.items() if value is not None}
    return whole


def _join(total: Any, part: Any) -> None:
    for name, value in part.items():
        if isinstance(value, str) and isinstance(total.get(name), str) and name in ("content", "text", "arguments"):
            total[name] += value
        elif isinstance(value, list) and name == "tool_calls":
            calls = total.setdefault(name, {})
            for call in value:
                _join(calls.setdefault(str(call.get("index", 0)), {}), call)
        elif isinstance(value, list) and isinstance(total.get(name), list):
            total[name] = total[name] + value
        elif isinstance(value, dict):
            _join(
                total.setdefault(name, {})
                if total.get(name) is not None
                else total.__setitem__(name, {}) or total[name],
                value,
            )
        elif value is not None or name not in total:
            total[name] = value


# -- comparing


def differences(form: Form, plain: Answer, ours: Answer, tolerance: float) -> list[str]:
    """Every field in which the answers differ, but for those that may."""
    left = {"status": plain.status, "headers": plain.headers, "body": plain.body}
    right = {"status": ours.status, "headers": ours.headers, "body": ours.body}
    return list(_differences(left, right, "", tolerance, VOLATILE | form.may_differ))


def _differences(plain: Any, ours: Any, path: str, tolerance: float, volatile: frozenset[str]) -> Iterator[str]:
    if (
        isinstance(plain, float | int)
        and isinstance(ours, float | int)
        and (isinstance(plain, float) or isinstance(ours, float))
    ):
        if abs(plain - ours) > tolerance:
            yield f"{path}: {plain} != {ours}"
    elif isinstance(plain, dict) and isinstance(ours, dict):
        for name in sorted(plain.keys() | ours.keys()):
            if name in volatile:
                continue
            if name not in plain or name not in ours:
                yield f"{path}.{name}: only in {'ours' if name in ours else 'plain'}"
            else:
                yield from _differences(plain[name], ours[name], f"{path}.{name}", tolerance, volatile)
    elif isinstance(plain, list) and isinstance(ours, list):
        if len(plain) != len(ours):
            yield f"{path}: {len(plain)} items != {len(ours)}"
        for index, (one, other) in enumerate(zip(plain, ours)):
            yield from _differences(one, other, f"{path}[{index}]", tolerance, volatile)
    elif _anonymous(plain) != _anonymous(ours):
        yield f"{path}: {plain!r} != {ours!r}"[:300]


def _anonymous(value: Any) -> Any:
    return RANDOM_ID.sub(r"\1-*", value) if isinstance(value, str) else value


# -- servers


def plain_command(spec: ClusterSpec, port: int) -> list[str]:
    """vLLM's own API server with the settings of a decode replica, and no connector."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    settings = {k: v for k, v in engine_kwargs(spec, Role.DECODE, "", "").items() if k not in ENGINE_ONLY}
    frontend = spec.frontend
    settings |= {"tool_call_parser": frontend.tool_call_parser, "reasoning_parser": frontend.reasoning_parser}
    settings |= {"enable_auto_tool_choice": frontend.enable_auto_tool_choice, "chat_template": spec.model.chat_template}
    settings |= frontend.server_args
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            command.append(flag)
        elif isinstance(value, dict):
            command += [flag, json.dumps(value)]
        elif isinstance(value, list):
            command += [flag, *map(str, value)]
        else:
            command += [flag, str(value)]
    return command


def environment(spec: ClusterSpec) -> dict[str, str]:
    from actors.engine.config import set_environment

    before = dict(os.environ)
    try:
        set_environment(spec, Role.DECODE)
        return dict(os.environ)
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def running(command: list[str], env: dict[str, str], url: str, timeout_s: float = 600.0) -> Iterator[str]:
    """A server process while the block runs; it is healthy when the block begins, and gone after it."""
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        until = time.monotonic() + timeout_s
        while not healthy(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(
                    f"{' '.join(command[:4])} did not become healthy; end of its log {log.name}:\n{_tail(log.name)}"
                )
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _tail(path: str) -> str:
    return "\n".join(Path(path).read_text(errors="replace").splitlines()[-30:])


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def second_answer(url: str, form: Form, model: str) -> Answer:
    send(url, form, model)
    return send(url, form, model)
