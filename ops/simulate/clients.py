"""What the clients asked for and what they saw: the ground truth that the checkers judge."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.request.events import ENGINE_DEATH_ERROR, PAGE_INTEGRITY_ERROR, RequestError
from ops.simulate.model import Script, advance, generate, next_token

LOOK_AHEAD = 64  # positions after the expected one in which a token that came too early is looked for


@dataclass(slots=True)
class Sequence:
    """One of a request's n sequences, as its client sees it. Position 0 is the first output token."""

    request_id: str
    script: Script
    state: int  # of the model after the prompt and every token so far
    salt: int | None  # None: known with the first token
    last: int  # the position after its last token
    stops: bool = False  # its client ends it there, by a stop string
    position: int = 0
    duplicated: int = 0
    missing: int = 0
    wrong: int = 0
    finished: bool = False
    _seen: set[int] = field(default_factory=set)

    def take(self, tokens: list[int]) -> None:
        if self.salt is not None:
            expected, state = generate(self.state, self.salt, len(tokens))
            if tokens == expected:
                self._seen.update(tokens)
                self.state, self.position = state, self.position + len(tokens)
                return
        for token in tokens:
            if self.salt is None:
                self.salt = next((s for s in self.script.salts if next_token(self.state, s) == token), 0)
            if token == next_token(self.state, self.salt):
                self._accept(token)
            elif token in self._seen:
                self.duplicated += 1
            else:
                self._skip_to(token)

    def _accept(self, token: int) -> None:
        self._seen.add(token)
        self.state = advance(self.state, (token,))
        self.position += 1

    def _skip_to(self, token: int) -> None:
        assert self.salt is not None
        state = self.state
        for skipped in range(1, LOOK_AHEAD):
            state = advance(state, (next_token(state, self.salt),))
            if next_token(state, self.salt) == token:
                self.missing += skipped
                self.position += skipped
                self.state = state
                self._accept(token)
                return
        self.wrong += 1


@dataclass(slots=True)
class Record:
    """`outcome`: done, cancelled, busy, client_gone, page_integrity, not_resumable, engine_death or failed."""

    request_id: str
    arrival_ns: int
    prompt_tokens: int
    recovery: str
    num_sequences: int
    sequences: list[Sequence] = field(default_factory=list)
    first_token_ns: int = 0
    end_ns: int = 0
    outcome: str = ""
    ends: int = 0
    detail: str = ""

    @property
    def output_tokens(self) -> int:
        """Of all sequences, when nothing goes wrong."""
        return sum(sequence.last for sequence in self.sequences)

    @property
    def position(self) -> int:
        return sum(sequence.position for sequence in self.sequences)

    @property
    def duplicated(self) -> int:
        return sum(sequence.duplicated for sequence in self.sequences)

    def take(self, sequence: Sequence, tokens: list[int], now_ns: int) -> None:
        if tokens:
            self.first_token_ns = self.first_token_ns or now_ns
            sequence.take(tokens)

    def end(self, outcome: str, detail: str, now_ns: int) -> None:
        self.ends += 1
        if self.ends == 1:
            self.outcome, self.detail, self.end_ns = outcome, detail, now_ns

    def fail(self, error: RequestError, now_ns: int) -> None:
        if self.ends:
            return  # the first error of n sequences is the whole answer
        outcome = "busy" if error.status == 429 else "failed"
        if error.kind == PAGE_INTEGRITY_ERROR:
            outcome = "page_integrity"
        elif error.kind == ENGINE_DEATH_ERROR:
            outcome = "engine_death"
        elif self.recovery == "none" and self.position and "cannot be continued exactly" in error.message:
            outcome = "not_resumable"
        self.end(outcome, f"{error.status}: {error.message}", now_ns)
