"""Request forms of the OpenAI API, as data: what the parity test sends. Every one is greedy, seeded or an error.

Prompts cross the page size (32 tokens) in both directions, so that short, exact and ragged last pages all occur.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from live_service import STORY

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
USER = [{"role": "user", "content": "Name three fruits and one river."}]
TURNS = [
    {"role": "system", "content": "You answer in one short sentence."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Italy?"},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
# To copy text leaves no near tie between two tokens: rounding cannot turn the answer.
PERSON = [{"role": "user", "content": 'Repeat exactly this JSON: {"name": "Ada", "age": 36}'}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True, slots=True)
class Form:
    """`compact` forms go in every run, the others in `make soak`. `method` GET has no body. `may_differ`: fields."""

    name: str
    path: str
    body: dict[str, Any] = field(default_factory=dict)
    compact: bool = False
    method: str = "POST"
    raw: bytes | None = None
    may_differ: frozenset[str] = frozenset()


def chat(name: str, *, compact: bool = False, **body: Any) -> Form:
    base = {"messages": USER, "max_tokens": 12, "temperature": 0}
    return Form(f"chat: {name}", CHAT, base | body, compact)


def completion(name: str, *, compact: bool = False, **body: Any) -> Form:
    base = {"prompt": STORY * 3, "max_tokens": 12, "temperature": 0}
    return Form(f"completions: {name}", COMPLETIONS, base | body, compact)


def response(name: str, *, compact: bool = False, **body: Any) -> Form:
    base = {"input": "Name a colour.", "max_output_tokens": 12, "temperature": 0, "store": False}
    return Form(f"responses: {name}", RESPONSES, base | body, compact)


def _json_schema(**more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, **more}}


FORMS: tuple[Form, ...] = (
    # chat
    chat("plain", compact=True),
    chat("system prompt and turns", messages=TURNS),
    chat("content parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Say hi."}]}]),
    chat("max_completion_tokens", max_tokens=None, max_completion_tokens=5),
    chat("max_tokens 1", max_tokens=1, compact=True),
    chat("error: n=3 greedy", n=3, compact=True),
    chat("n=3 seeded", n=3, temperature=0.8, seed=7, compact=True),
    chat("seeded sampling", temperature=0.9, seed=11, compact=True),
    chat("seeded top_p", temperature=1.0, seed=3, top_p=0.5),
    chat("seeded top_k min_p", temperature=1.0, seed=4, top_k=20, min_p=0.05),
    chat("logprobs", logprobs=True, top_logprobs=4, compact=True),
    chat("logprobs without alternatives", logprobs=True),
    chat("prompt_logprobs", prompt_logprobs=2, compact=True),
    chat("echo", echo=True, add_generation_prompt=False),
    chat("stop string", stop=["2."], max_tokens=40, compact=True),
    chat("stop kept in the output", stop=["2."], include_stop_str_in_output=True, max_tokens=40),
    chat("stop token ids", stop_token_ids=[30], max_tokens=40),
    chat("ignore_eos and min_tokens", ignore_eos=True, min_tokens=8),
    chat("min_tokens", min_tokens=10, max_tokens=16),
    chat("presence and frequency penalty", presence_penalty=1.2, frequency_penalty=0.7, max_tokens=24, compact=True),
    chat("repetition penalty", repetition_penalty=1.3, max_tokens=24),
    chat("logit bias", logit_bias={"30": 50, "28": -100}),
    chat("bad words", bad_words=["apple", "Apple"], max_tokens=24),
    chat("allowed token ids", allowed_token_ids=[28, 29, 30, 31], max_tokens=6),
    chat("json object", messages=PERSON, response_format={"type": "json_object"}, max_tokens=30),
    chat("json schema", messages=PERSON, response_format=_json_schema(), max_tokens=40, compact=True),
    chat("json schema strict, seeded", response_format=_json_schema(strict=True), max_tokens=40, temperature=1, seed=5),
    chat("regex", structured_outputs={"regex": "(red|green|blue)-[0-9]{2}"}),
    chat("choice", structured_outputs={"choice": ["yes", "no", "maybe"]}),
    chat("tools with tool_choice none", tools=[TOOL], tool_choice="none"),
    chat(
        "named tool",
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=30,
        compact=True,
    ),
    chat("required tool", tools=[TOOL], tool_choice="required", max_tokens=60),
    chat("stream", stream=True, compact=True),
    chat("stream with usage", stream=True, stream_options={"include_usage": True}, compact=True),
    chat(
        "stream with running usage", stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ),
    chat("stream n=2", stream=True, n=2, temperature=0.7, seed=9),
    chat("stream logprobs", stream=True, logprobs=True, top_logprobs=2, compact=True),
    chat("stream stop", stream=True, stop=["2."], max_tokens=40),
    chat(
        "stream named tool",
        stream=True,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        max_tokens=30,
    ),
    chat("stream json schema", messages=PERSON, stream=True, response_format=_json_schema(), max_tokens=40),
    chat("return token ids", return_token_ids=True),
    chat(
        "continue_final_message",
        messages=[*USER, {"role": "assistant", "content": "1. Mango"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    chat("priority, user and metadata", user="someone", metadata={"a": "b"}),
    chat("error: unknown model", model="no-such-model", compact=True),
    chat("error: no messages", messages=[]),
    chat("error: temperature below 0", temperature=-1),
    chat("error: top_logprobs without logprobs", top_logprobs=3),
    chat("error: too many tokens asked for", max_tokens=100_000, compact=True),
    chat("error: n of 0", n=0),
    chat("error: unknown response format", response_format={"type": "xml"}),
    chat("tool_choice auto", tools=[TOOL], tool_choice="auto"),
    chat("error: tool_choice without tools", tool_choice="required"),
    chat("error: logit bias out of vocabulary", logit_bias={"9999999": 1}),
    chat("error: bad regex", structured_outputs={"regex": "(unclosed"}),
    # completions
    completion("plain", compact=True),
    completion("one token prompt", prompt="Hello"),
    completion("token ids", prompt=list(range(100, 164)), compact=True),  # two full pages
    completion("33 token ids", prompt=list(range(200, 233))),
    completion("31 token ids", prompt=list(range(300, 331))),
    completion("several prompts", prompt=["One two", "Three four five"], compact=True),
    completion("several token prompts", prompt=[[1, 2, 3, 4], [5, 6, 7]]),
    completion("longer than a chunk", prompt=STORY * 60, max_tokens=6),
    completion("echo", echo=True, compact=True),
    completion("echo with logprobs", echo=True, logprobs=2, max_tokens=4, compact=True),
    completion("echo only", echo=True, max_tokens=0, logprobs=1),
    completion("logprobs", logprobs=3, compact=True),
    completion("logprobs 0", logprobs=0),
    completion("prompt_logprobs", prompt_logprobs=1, max_tokens=3),
    completion("n=2 seeded", n=2, temperature=0.9, seed=21),
    completion("n=4, several prompts", prompt=["One two", "Three"], n=4, temperature=0.9, seed=5),
    completion("stop", stop=["lamp", "."], max_tokens=40),
    completion("suffix of stop tokens", stop_token_ids=[30, 28], ignore_eos=True),
    completion("penalties seeded", presence_penalty=0.9, frequency_penalty=0.4, temperature=0.8, seed=2, max_tokens=24),
    completion("stream", stream=True, compact=True),
    completion("stream with usage", stream=True, stream_options={"include_usage": True}),
    completion("stream echo logprobs", stream=True, echo=True, logprobs=1, max_tokens=4),
    completion("stream several prompts", stream=True, prompt=["One two", "Three four"]),
    completion("structured choice", structured_outputs={"choice": ["north", "south"]}),
    completion("beam search", use_beam_search=True, n=2, max_tokens=6),
    completion("truncate_prompt_tokens", truncate_prompt_tokens=20),
    completion("return token ids", return_token_ids=True, max_tokens=3),
    completion("error: prompt too long", prompt="word " * 6000, compact=True),
    completion("error: empty prompt", prompt=""),
    completion("error: prompt of bad ids", prompt=[99_999_999]),
    completion("error: negative max_tokens", max_tokens=-1),
    # responses
    response("plain", compact=True),
    response("instructions", instructions="Answer in German."),
    response("messages", input=[{"role": "user", "content": "Name a city."}]),
    response("stream", stream=True),
    response(
        "json schema",
        input=PERSON,
        text={"format": {"type": "json_schema", "name": "person", "schema": SCHEMA}},
        max_output_tokens=40,
    ),
    response("error: unknown model", model="no-such-model"),
    # the rest of the surface
    Form("messages (Anthropic): plain", "/v1/messages", {"messages": USER, "max_tokens": 8, "temperature": 0}),
    Form(
        "generate: token ids in, token ids out",
        "/inference/v1/generate",
        {"token_ids": list(range(50, 90)), "sampling_params": {"max_tokens": 5, "temperature": 0.0}},
    ),
    Form("tokenize: text", "/tokenize", {"prompt": STORY}, compact=True),
    Form("tokenize: chat", "/tokenize", {"messages": USER}),
    Form("detokenize", "/detokenize", {"tokens": [28, 29, 30, 31]}),
    # vLLM answers with the path on the server's machine as `root`; ours has the model's name there.
    Form("models", "/v1/models", method="GET", compact=True, may_differ=frozenset({"root"})),
    Form("version", "/version", method="GET"),
    Form("error: body is no JSON", CHAT, raw=b"{not json"),
    Form("error: unknown path", "/v1/nothing", {"a": 1}),
    Form("error: wrong method", CHAT, method="GET"),
)
