"""For every request form a client sees what a single vLLM engine with the same settings would show.

Every run sends the compact forms; the others are marked `soak`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_service import free_port
from openai_forms import FORMS, Form
from parity import differences, environment, plain_command, running, second_answer

from app.commands.serve import Service
from cluster.spec import ClusterSpec

CASES = [pytest.param(form, id=form.name, marks=() if form.compact else pytest.mark.soak) for form in FORMS]
# A matrix product rounds by how many rows it has: decode computes the last prompt position alone, one engine with the
# rest of the page. Log probabilities of BF16 logits may move by that much.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def plain(spec: ClusterSpec) -> Iterator[str]:
    """URL of a plain vLLM server."""
    port = free_port()
    with running(plain_command(spec, port), environment(spec), f"http://127.0.0.1:{port}") as url:
        yield url


@pytest.mark.parametrize("form", CASES)
def test_form(form: Form, plain: str, service: Service, spec: ClusterSpec) -> None:
    expected, ours = (second_answer(url, form, spec.model.served_name) for url in (plain, service.url))
    assert differences(form, expected, ours, TOLERANCE) == []
    assert (expected.status >= 400) == ("error" in form.name)
