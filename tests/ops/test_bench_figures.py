"""From measurements to what is printed.

1. Prompts have exactly the asked length as the server's tokenizer counts it, and are the same every time.
2. Figures are medians of rounds; ratios pair rounds; the tables and the picture show them.
3. A red gate shows its breaches and no speed.
4. The phases add up to the time to first token.
5. Arguments that make no sense are named.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ops.bench import cli, compare, figures, overhead, phases, picture, prompts
from ops.bench.compare import Plan, Visit
from ops.bench.load import Answer, Wave
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


def wave(concurrency: int, speed: float) -> Wave:
    """`speed` tokens a second and a request, 11 tokens each, the first after one token's time."""
    each = [
        Answer(
            i,
            num_output_tokens=11,
            num_events=11,
            num_reads=11,
            start_s=1.0,
            ttft_s=1 / speed,
            end_s=1.0 + 11 / speed,
            token_s=[token / speed for token in range(1, 12)],
        )
        for i in range(concurrency * 2)
    ]
    return Wave(concurrency, 2 * 11 / speed, each)


def visits() -> list[Visit]:
    made = []
    for number, machine in enumerate((1.0, 0.5, 2.0)):  # the machine itself was faster and slower
        for name, factor in (("vllm-fp8", 10.0), ("ray-pd", 5.0), ("pageferry", 8.0)):
            waves = {c: wave(c, factor * machine) for c in (1, 4)}
            foreign = dict.fromkeys((1, 4), 0.1)
            made.append(Visit(name, number, 20.0 + number, 3.0, 0.01, foreign, waves, [[Answer(0, text="a")]]))
    return made


TITLES = {"vllm-fp8": "plain", "ray-pd": "peer", "pageferry": "ours"}


def test_figures_and_ratios(tmp_path: Path) -> None:
    made = figures.build(visits(), list(TITLES), (1, 4))
    own = made["systems"]["pageferry"]["concurrency"]["4"]
    assert own["tokens_per_s"] == {"median": pytest.approx(32.0), "min": pytest.approx(16.0), "max": pytest.approx(64)}
    assert own["ttft_p50"]["median"] == pytest.approx(1 / 8) and own["tpot_p50"]["median"] == pytest.approx(1 / 8)
    ratios = {(row["a"], row["b"], row["concurrency"]): row for row in made["ratios"]}
    assert set(ratios) == {
        (a, b, c)
        for a, b in (("ray-pd", "vllm-fp8"), ("pageferry", "vllm-fp8"), ("pageferry", "ray-pd"))
        for c in (1, 4)
    }
    found = ratios["pageferry", "ray-pd", 4]
    # The machine's own swings are in no ratio: every round said the same.
    assert found["tokens_per_s"].value == pytest.approx(1.6) == found["tokens_per_s"].low
    assert found["gap_p99"].value == found["gap_max"].value == pytest.approx(0.625)
    assert found["events_a_read"].value == 1
    assert found["ttft_p50"].value == pytest.approx(0.625) and found["tpot_p50"].high == pytest.approx(0.625)
    text = figures.table(made, TITLES)
    assert (
        "| 4 | ours | 32.0 | 125 | 125 | 125 | 125.0 | 125.0 | 125.0 | 125.0 | 125 | 1.00 |" in text
        and "1.60 [1.60, 1.60]" in text
    )
    picture.systems(made, TITLES, "caption", tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(json.dumps(cli.plain(made)))["systems"]["ray-pd"]["start_s"] == 21.0
    assert len(compare.as_dict(visits())) == 9


def test_a_red_gate_shows_no_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    red = visits()
    red[4].gate = [[Answer(0, text="b")]]

    async def run(*args: Any) -> list[Visit]:
        return red

    monkeypatch.setattr(compare, "run", run)
    systems = ["--systems", "vllm-fp8,ray-pd,pageferry"]
    monkeypatch.setattr(cli, "_choose", lambda *_: [SystemSpec(name, t, [], {}, 1, "m") for name, t in TITLES.items()])
    assert cli.main(["--out", str(tmp_path), "--concurrency", "1,4", *systems]) == 1
    said = capsys.readouterr()
    assert "ray-pd: 2 different greedy answers" in said.err and "tok/s" not in said.out + said.err
    assert list(tmp_path.iterdir()) == []
    red[4].gate = [[Answer(0, text="a")]]
    assert cli.main(["--out", str(tmp_path), "--concurrency", "1,4", *systems]) == 0
    assert "tok/s" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"systems.json", "systems.md", "systems.png"}
    facts = json.loads((tmp_path / "systems.json").read_text())["facts"]
    assert facts["command"].startswith("pageferry bench --out") and facts["machine"]["cores"] >= 1 and facts["date"]


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


def test_phases_add_up() -> None:
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
        (["--concurrency", "1,x"], "--concurrency is '1,x'"),
        (["--systems", "sglang"], "there are vllm-fp8"),
        (["nowhere.yaml"], "no topology file"),
        (["--ferry", "--pages", "0"], "--pages is '0'"),
        (["local-cpu", "pools.decode.replica=2"], "did you mean pools.decode.replicas?"),
    ],
)
def test_arguments_are_named(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    assert said in capsys.readouterr().err


def test_requests_of_a_wave() -> None:
    assert [Plan().num_requests(c) for c in (1, 4, 8, 16)] == [6, 8, 16, 32]
