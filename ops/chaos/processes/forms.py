"""The requests of a run: every form that a lost replica may not change, and what a complete answer to each is."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ops.bench.prompts import WORDS

TOPICS = ("a lighthouse keeper", "two rivers", "the harbour at night", "an old clock", "a letter", "the winter market")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3},
    },
    "required": ["name", "colour", "sizes"],
    "additionalProperties": False,
}


class Recovery(StrEnum):
    """What may become of a request whose decode replica is lost after its first token."""

    ALWAYS = "always"  # it goes on
    UNLESS_IT_FORKS = "unless it forks"  # replayed; a clear error when another replica computes other tokens
    ERROR = "error"  # cannot be continued exactly: a clear error


@dataclass(frozen=True, slots=True)
class Form:
    name: str
    recovery: Recovery
    max_tokens: int
    prompt_words: int = 12
    path: str = "/v1/completions"
    stream: bool = True
    greedy: bool = True
    num_choices: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Each token is the likeliest one after what is before it, and nothing ends the answer early."""
        return self.greedy and not self.options

    def body(self, model: str, rng: random.Random) -> dict[str, Any]:
        # Not the same sentence again and again: there an FP8 and a BF16 prefill differ by nats on what comes next.
        words = " ".join(rng.choice(WORDS) for _ in range(self.prompt_words))
        text = f"Note {rng.randrange(1_000_000)}: {words}. Tell a story about {rng.choice(TOPICS)}."
        asked: dict[str, Any] = {"model": model, "max_tokens": self.max_tokens, "return_token_ids": True}
        if self.path.endswith("chat/completions"):
            asked["messages"] = [{"role": "user", "content": text}]
        else:
            asked["prompt"] = text
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.num_choices > 1:
            asked["n"] = self.num_choices
        asked |= {"temperature": 0.0} if self.greedy else {"temperature": 0.8, "top_p": 0.95}
        if "seed" in self.options:
            asked["seed"] = rng.randrange(1 << 30)
        return {**asked, "ignore_eos": True, **{key: value for key, value in self.options.items() if key != "seed"}}


STRUCTURED = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}},
    "ignore_eos": False,
}
FORMS = (
    Form("greedy", Recovery.ALWAYS, 64),
    Form("greedy, long prompt", Recovery.ALWAYS, 24, prompt_words=900),
    Form("greedy, very long prompt", Recovery.ALWAYS, 8, prompt_words=1400),
    Form("greedy, not streamed", Recovery.ALWAYS, 40, stream=False),
    Form("greedy chat", Recovery.ALWAYS, 40, path="/v1/chat/completions"),
    Form("sampled", Recovery.ALWAYS, 48, greedy=False),
    Form("sampled, seed", Recovery.UNLESS_IT_FORKS, 40, greedy=False, options={"seed": True}),
    Form("n = 2, seed", Recovery.UNLESS_IT_FORKS, 32, greedy=False, num_choices=2, options={"seed": True}),
    Form("repetition penalty", Recovery.ALWAYS, 40, options={"repetition_penalty": 1.3}),
    Form("penalties", Recovery.UNLESS_IT_FORKS, 40, options={"presence_penalty": 0.6, "frequency_penalty": 0.4}),
    Form("sampled, penalty, no seed", Recovery.ERROR, 40, greedy=False, options={"presence_penalty": 0.6}),
    Form("stop string", Recovery.ALWAYS, 64, options={"stop": [" who", " which", " when"]}),
    Form("JSON schema", Recovery.UNLESS_IT_FORKS, 96, options=STRUCTURED),
)


def problems_of(form: Form, text: str, num_tokens: int, finish: str) -> list[str]:
    """What is wrong with a complete answer's choice; empty when it is as it should be."""
    found = []
    stops = form.options.get("stop", [])
    if any(stop in text for stop in stops):
        found.append("the stop string is in the text")
    if finish == "stop":
        if not stops and "response_format" not in form.options:
            found.append("finish_reason is stop, and nothing asked for it")
        if "response_format" in form.options:
            found += _json_problems(text)
    elif finish != "length":
        found.append(f"finish_reason is {finish!r}")
    elif num_tokens != form.max_tokens:
        found.append(f"finish_reason is length after {num_tokens} tokens of {form.max_tokens}")
    return found


def _json_problems(text: str) -> list[str]:
    try:
        tree = json.loads(text)
    except ValueError:
        return [f"not JSON: {text[:120]!r}"]
    whole = isinstance(tree, dict) and set(tree) == {"name", "colour", "sizes"} and len(tree["sizes"]) == 3
    return [] if whole else [f"not what the schema says: {text[:120]!r}"]
