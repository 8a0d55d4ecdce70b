"""What is asked in an evaluation: passages, conversations, needles and tool calls, drawn from a text by seed. Pure.

All but tool calls are teacher-forced: a needle is found where each token of the answer is the most likely one, which
is what a greedy answer would then be.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

EDGES = (32, 256, 1024, 2048, 3600)  # prompt lengths, tokens: as many passages between each two
NEEDLE_LENGTHS = (256, 512, 1024, 1900)
NEEDLE_DEPTHS = (0.1, 0.5, 0.9)
CITIES = ("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Dakar", "Perth", "Quito", "Riga", "Turin", "Accra", "Hanoi")
TOOLS: dict[str, dict[str, type]] = {
    "get_temperature": {"city": str, "unit": str},
    "set_alarm": {"hour": int, "minute": int},
    "send_message": {"to": str, "text": str},
    "convert": {"amount": int, "unit": str},
}
PEOPLE = ("Anna", "Bilal", "Chen", "Dora", "Emil", "Fatma", "Goran", "Hana")
WORDS = ("the train is late", "dinner is at eight", "the keys are on the table", "please call back", "all is well")


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt and the tokens that are forced after it. Items of a group are one cluster, and asked in order."""

    task: str  # text, turns, needle
    group: str
    prompt: list[int]
    forced: list[int]
    where: dict[str, float] = field(default_factory=dict)  # context, turn, depth


@dataclass(frozen=True, slots=True)
class ToolCase:
    prompt: list[int]
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked. `longest`: prompt, tokens. `passages`: between each two of `EDGES`. `needles`: of each length
    and depth. `controls`: passages that planted faults are looked for in."""

    longest: int = EDGES[-1]
    passages: int = 10
    continuation: int = 32
    conversations: int = 8
    turns: int = 6
    answer: int = 16
    needles: int = 4
    tool_calls: int = 48
    controls: int = 12

    @classmethod
    def small(cls) -> Size:
        return cls(longest=256, passages=8, continuation=8, turns=2, answer=6, needles=2, tool_calls=4, controls=8)


def passages(ids: Sequence[int], size: Size, rng: random.Random, longest: int) -> list[Item]:
    """Lengths are drawn between the edges; each passage has its own place in the text. ValueError: text too short."""
    edges = [edge for edge in EDGES if edge <= min(longest - size.continuation, size.longest)]
    made = []
    for low, high in itertools.pairwise(edges):
        for number in range(size.passages):
            length = rng.randint(low, high - 1)
            at = _place(ids, length + size.continuation, rng)
            cut = ids[at : at + length + size.continuation]
            group = f"text-{low}-{number}"
            made.append(Item("text", group, list(cut[:length]), list(cut[length:]), {"context": float(length)}))
    return made


def _place(ids: Sequence[int], length: int, rng: random.Random) -> int:
    if length > len(ids):
        raise ValueError(f"the text has {len(ids)} tokens, and one passage needs {length}: take a longer text")
    return rng.randrange(len(ids) - length + 1)


def conversations(tokenizer: Any, ids: Sequence[int], size: Size, rng: random.Random) -> list[Item]:
    """Chats whose every answer is forced; each turn sends all before it."""
    made = []
    for number in range(size.conversations):
        messages: list[dict[str, str]] = []
        for turn in range(size.turns):
            said = rng.randint(24, 120)
            at = _place(ids, said + size.answer, rng)
            messages.append({"role": "user", "content": tokenizer.decode(ids[at : at + said])})
            prompt = chat(tokenizer, messages)
            answer = tokenizer.decode(ids[at + said : at + said + size.answer])
            messages.append({"role": "assistant", "content": answer})
            forced = tokenizer.encode(answer, add_special_tokens=False)
            where = {"turn": float(turn + 1), "context": float(len(prompt))}
            made.append(Item("turns", f"turns-{number}", prompt, forced, where))
    return made


def chat(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    found: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return found


def needles(tokenizer: Any, ids: Sequence[int], size: Size, rng: random.Random, longest: int) -> list[Item]:
    """A number stands once in a long text, and is asked for at its end."""
    made = []
    for length in (each for each in NEEDLE_LENGTHS if each <= min(longest - 64, size.longest)):
        for depth in NEEDLE_DEPTHS:
            for number in range(size.needles):
                city, value = rng.choice(CITIES), rng.randint(10000, 99999)
                needle = tokenizer.encode(f"\n\nThe secret number of {city} is {value}.\n\n", add_special_tokens=False)
                question = tokenizer.encode(f"\n\nThe secret number of {city} is", add_special_tokens=False)
                rest = length - len(needle) - len(question)
                at, cut = _place(ids, rest, rng), int(rest * depth)
                hay = list(ids[at : at + rest])
                forced = tokenizer.encode(f" {value}", add_special_tokens=False)
                prompt = [*hay[:cut], *needle, *hay[cut:], *question]
                where = {"context": float(length), "depth": depth}
                made.append(Item("needle", f"needle-{length}-{depth:g}-{number}", prompt, forced, where))
    return made


def tool_cases(tokenizer: Any, size: Size, rng: random.Random) -> list[ToolCase]:
    """Requests that one of four functions answers, after three worked examples."""
    schema = [{"name": n, "parameters": {k: t.__name__ for k, t in p.items()}} for n, p in TOOLS.items()]
    system = f"Functions:\n{json.dumps(schema)}\nAnswer with one JSON object: the function's name and its arguments."
    made = []
    for _ in range(size.tool_calls):
        messages = [{"role": "system", "content": system}]
        asked = [_request(rng) for _ in range(4)]
        for text, name, arguments in asked[:-1]:
            call = json.dumps({"name": name, "arguments": arguments})
            messages += [{"role": "user", "content": text}, {"role": "assistant", "content": call}]
        text, name, arguments = asked[-1]
        messages.append({"role": "user", "content": text})
        made.append(ToolCase(chat(tokenizer, messages), name, arguments))
    return made


def _request(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    kind, city, person = rng.choice(list(TOOLS)), rng.choice(CITIES), rng.choice(PEOPLE)
    if kind == "get_temperature":
        unit = rng.choice(("celsius", "fahrenheit"))
        return f"How warm is it in {city}, in {unit}?", kind, {"city": city, "unit": unit}
    if kind == "set_alarm":
        hour, minute = rng.randrange(24), rng.randrange(60)
        return f"Wake me at {hour}:{minute:02}.", kind, {"hour": hour, "minute": minute}
    if kind == "send_message":
        words = rng.choice(WORDS)
        return f"Tell {person} that {words}.", kind, {"to": person, "text": words}
    amount, unit = rng.randint(2, 900), rng.choice(("miles", "pounds", "gallons"))
    return f"How much are {amount} {unit}?", kind, {"amount": amount, "unit": unit}


def judge_call(text: str, case: ToolCase) -> tuple[bool, bool]:
    """(valid, right): valid is a JSON object that names a function with exactly its arguments, of their types."""
    start = text.find("{")
    try:
        found, _ = json.JSONDecoder().raw_decode(text[max(0, start) :])
    except ValueError:
        return False, False
    if not isinstance(found, dict) or not isinstance(found.get("arguments"), dict):
        return False, False
    wanted, given = TOOLS.get(found.get("name", "")), found["arguments"]
    if wanted is None or set(given) != set(wanted) or not all(type(given[k]) is t for k, t in wanted.items()):
        return False, False
    return True, found["name"] == case.name and given == case.arguments
