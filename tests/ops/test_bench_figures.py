"""From measurements to what is printed.

1. Prompts have exactly the asked length as the server's tokenizer counts it, and are the same every time.
2. The phases add up to the time to first token.
3. Arguments that make no sense are named.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ops.bench import cli, overhead, phases, picture, prompts
from ops.bench.load import Answer
from ops.bench.systems import SystemSpec

MODEL = ".models/smollm2-135m-instruct"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("num_tokens", [2, 31, 32, 33, 256, 1000])
def test_prompts_are_exact(tokenizer: Any, num_tokens: int) -> None:
    texts = prompts.batch(tokenizer, num_tokens, 1, "label", 5)
    assert [len(tokenizer(text)["input_ids"]) for text in texts] == [num_tokens] * 5
    assert texts == prompts.batch(tokenizer, num_tokens, 1, "label", 5)
    assert num_tokens < 31 or len(set(texts)) == 5
    assert texts != prompts.batch(tokenizer, num_tokens, 2, "label", 5)


def test_a_length_that_cannot_be_is_refused(tokenizer: Any) -> None:
    with pytest.raises(prompts.PromptError, match="num_tokens is 1"):
        prompts.make(tokenizer, 1, 1, "label", 0)


EXPORT = """# HELP ray_pageferry_hand_over_seconds x
ray_pageferry_hand_over_seconds_bucket{WorkerId="w",le="0.1",phase="admit"} 3.0
ray_pageferry_hand_over_seconds_sum{WorkerId="w",phase="admit"} 777
ray_pageferry_hand_over_seconds_count{WorkerId="w",phase="admit"} %(count)s
ray_pageferry_phase_seconds_total{WorkerId="w",phase="admit"} %(admit)s
ray_pageferry_hand_over_seconds_count{WorkerId="w",phase="prefill"} %(count)s
ray_pageferry_phase_seconds_total{WorkerId="w",phase="prefill"} %(prefill)s
ray_pageferry_hand_over_seconds_count{WorkerId="w",phase="prefill_replica"} %(count)s
ray_pageferry_phase_seconds_total{WorkerId="w",phase="prefill_replica"} %(replica)s
ray_pageferry_hand_over_seconds_count{WorkerId="w",phase="submit"} %(count)s
ray_pageferry_phase_seconds_total{WorkerId="w",phase="submit"} %(submit)s
ray_pageferry_ttft_seconds_count{WorkerId="w"} %(count)s
ray_pageferry_phase_seconds_total{WorkerId="w",phase="first_token"} %(first)s
ray_pageferry_tpot_seconds_sum{WorkerId="w"} 99
"""


def test_phases_add_up(tmp_path: Path) -> None:
    sums = {"admit": 1.0, "prefill": 2.0, "replica": 1.5, "submit": 1.0, "first": 5.0}
    more = {"admit": 1.5, "prefill": 6.0, "replica": 5.0, "submit": 1.2, "first": 13.0}
    means = phases.difference(
        phases.parse(EXPORT % {**sums, "count": 10}), phases.parse(EXPORT % {**more, "count": 20})
    )
    assert means == pytest.approx(
        {"admit": 0.05, "prefill": 0.4, "prefill_replica": 0.35, "submit": 0.02, "first_token": 0.8}
    )
    rows = phases.rows(means, 0.9)
    upto = [row for row in rows if not row["phase"].startswith("(after")]
    assert sum(row["mean_s"] for row in upto) == pytest.approx(0.9) and len(rows) == len(upto) + 1
    assert phases.rows({}, 0.9) == []
    means["hand_over"] = 0.01
    after = [row["mean_s"] for row in phases.rows(means, 0.9, 0.3) if row["phase"].startswith(phases.AFTER_FIRST)]
    assert len(after) == 3 and sum(after) == pytest.approx(0.3)
    picture.phases(rows, rows, "caption", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_overhead_table() -> None:
    specs = [SystemSpec(name, name.upper(), [], {}, 1, "m") for name in ("single", "pageferry")]
    answers = {
        "single": [Answer(i, ttft_s=1.0 + i) for i in range(4)],
        "pageferry": [Answer(i, ttft_s=(1.0 + i) * 1.04) for i in range(4)],
    }
    means = {"first_token": 1.0, "admit": 0.1, "prefill": 0.8, "prefill_replica": 0.7}
    made = overhead.Made(specs, answers, means, {"single": 0.0, "pageferry": 0.1})
    report = {"plan": overhead.Plan(4), **overhead.build(made)}
    assert report["overhead"][0]["ratio"].value == pytest.approx(1.04)
    text = overhead.table(report)
    assert (
        "| SINGLE | 1.040 [1.040, 1.040] | 100.0 [" in text and "| admit: ticket from the controller | 100.0 |" in text
    )


@pytest.mark.parametrize(
    "argv, said",
    [
        ([], "name a plan"),
        (["nowhere"], "shipped plans are a-a,"),
        (["--overhead", "nowhere.yaml"], "no topology file"),
        (["--ferry", "--pages", "0"], "--pages is '0'"),
        (["a-a", "pools.decode.replica=2"], "did you mean pools.decode.replicas?"),
    ],
)
def test_arguments_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err
