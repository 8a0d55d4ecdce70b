"""For every request form a client sees what a single vLLM engine with the same settings would show.

Here the compact subset; the whole table is `python -m ops.bench.parity local-cpu`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from live_service import free_port

from app.commands.serve import Service
from cluster.spec import ClusterSpec
from ops.bench.forms import FORMS, Form
from ops.bench.parity import Answer, ask_all, compare, environment, plain_command, running

COMPACT = tuple(form for form in FORMS if form.compact)
# A matrix product rounds by how many rows it has: decode computes the last prompt position alone, one engine with the
# rest of the page. Log probabilities of BF16 logits may move by that much.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def plain(spec: ClusterSpec) -> Iterator[dict[str, Answer]]:
    port = free_port()
    with running(plain_command(spec, port), environment(spec), f"http://127.0.0.1:{port}") as url:
        yield dict(zip((form.name for form in COMPACT), ask_all(url, COMPACT, spec.model.served_name)))


@pytest.mark.parametrize("form", COMPACT, ids=lambda form: form.name)
def test_form(form: Form, plain: dict[str, Answer], service: Service, spec: ClusterSpec) -> None:
    [ours] = ask_all(service.url, (form,), spec.model.served_name)
    row = compare(form, plain[form.name], ours, TOLERANCE)
    assert row.equal, "\n".join(row.differences)
    assert (row.status_plain >= 400) == ("error" in form.name)
