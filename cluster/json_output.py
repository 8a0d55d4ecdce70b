"""`--json` means that standard output holds one JSON document and nothing else.

Engines, the libraries under them and the C library write to file descriptor 1 as they like, from this process and from
its children. So while such a command runs, descriptor 1 is standard error, and only `print_json` has the real one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

_answers: list[TextIO] = []  # the real standard output, while it is reserved


def run(main: Callable[[list[str]], int], argv: Sequence[str]) -> int:
    """Runs a command's `main`, with standard output reserved for `print_json` when `argv` has `--json`."""
    arguments = list(argv)
    if "--json" not in arguments:
        return main(arguments)
    with reserved_stdout():
        return main(arguments)


@contextmanager
def reserved_stdout() -> Iterator[None]:
    """Descriptor 1 and `sys.stdout` lead to standard error until the end; within itself it does nothing."""
    if _answers:
        yield
        return
    before = sys.stdout
    if not _is_descriptor_one(before):  # replaced by a caller that wants the answer there
        _answers.append(before)
        sys.stdout = sys.stderr
        try:
            yield
        finally:
            sys.stdout = before
            _answers.clear()
        return
    before.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    with os.fdopen(real, "w") as answer:
        _answers.append(answer)
        try:
            yield
        finally:
            _answers.clear()
            before.flush()  # what libraries wrote through it belongs to standard error
            answer.flush()
            os.dup2(real, 1)
            sys.stdout = before


def _is_descriptor_one(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):
        return False


def print_json(value: Any, indent: int | None = 1) -> None:
    """The command's one document; refuses NaN and infinity, which JSON does not have."""
    print(json.dumps(value, indent=indent, allow_nan=False), file=_answers[-1] if _answers else sys.stdout, flush=True)
