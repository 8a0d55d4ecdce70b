"""Suites of questions: data files in their forms, worked examples, and answers paired by question."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ops.accuracy import suites


@pytest.mark.parametrize(
    ("row", "asked", "worked", "short"),
    [
        ({"prompt": "1+1?", "expected": "2", "upstream_answer": "1+1=2\n#### 2"}, "1+1?", " 1+1=2\n#### 2", "2"),
        ({"question": "1+1?", "answer": "so #### 2"}, "1+1?", " so #### 2", "2"),
        ({"ctx": "It", "endings": ["a", "b"], "expected_index": 1}, "It\nA. a\nB. b", " B", "B"),
        (
            {"question": "Q", **{f"answer_{x}": x * 2 for x in "abcd"}, "correct_answer": "C"},
            "Q\nA. aa\nB. bb\nC. cc\nD. dd",
            " C",
            "C",
        ),
    ],
)
def test_forms_of_data_files(row: dict[str, object], asked: str, worked: str, short: str) -> None:
    assert suites.question(row) == (f"Question: {asked}\nAnswer:", worked, short)


@pytest.mark.parametrize("row", [{"answer": "2"}, {"question": "1+1?"}])
def test_a_row_without_a_question_or_an_answer_is_refused(row: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="a row needs"):
        suites.question(row)


def test_worked_examples_are_not_asked(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text("".join(json.dumps({"question": f"number {n}?", "expected": str(n)}) + "\n" for n in range(40)))
    made = suites.prompts(file, 20, seed=3)
    assert len(made) == 20 and made == suites.prompts(file, 20, seed=3) != suites.prompts(file, 20, seed=4)
    shots = made[0]["prompt"].split("Question: ")[1 : suites.SHOTS + 1]
    for row in made:
        *examples, asked = row["prompt"].split("Question: ")[1:]
        assert examples == shots and asked == f"number {row['answer']}?\nAnswer:" and asked not in "".join(examples)
    file.write_text('{"question": "one"}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl: a row needs"):
        suites.prompts(file, 20, seed=3)


def test_answers_are_paired_by_question() -> None:
    right, wrong = {"answer": "B", "right": True}, {"answer": "A", "right": False}
    reference = {"mmlu": {str(n): right for n in range(60)}}
    same = suites.judge(reference, reference, 0.1)
    assert [gate.passed for gate in same] == [True]
    worse = {"mmlu": {str(n): wrong if n < 6 else right for n in range(60)}}
    (gate,) = suites.judge(reference, worse, 0.1)
    assert not gate.passed and gate.value == pytest.approx(0.1)
    gates = [asdict(gate) for gate in same]
    assert "| mmlu | 60 | 60 | 60 | 60 |" in suites.table(
        {"answers": {"bf16": reference, "service": reference}, "gates": gates}
    )
