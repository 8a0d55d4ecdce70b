"""Statistics of the comparison and the tap that sees the distributions, against plain formulas."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ops.compress.evaluate import Comparison, buckets, measure
from ops.compress.logit_tap import LogitTap

VOCABULARY = 50


def comparison(windows: int = 40, positions: int = 100, shift: float = 0.1) -> Comparison:
    chance = np.random.default_rng(0)
    base = chance.gamma(2.0, 1.0, (windows, positions)) + chance.normal(0, 0.5, (windows, 1))
    noise = chance.normal(shift, 0.2, (windows, positions))
    kl = chance.gamma(1.0, 0.05, (windows, positions))
    return Comparison(base, base + noise, kl, (chance.random((windows, positions)) < 0.1).astype(float))


def test_means_are_plain_means_and_intervals_hold_them() -> None:
    found, measures = comparison(), measure(comparison())
    assert measures.positions == 4000
    assert measures.kl.mean == pytest.approx(found.kl.mean())
    assert measures.flips.mean == pytest.approx(found.flips.mean())
    assert measures.ppl.mean == pytest.approx(np.exp(found.nll.mean()))
    assert measures.ppl_ratio.mean == pytest.approx(np.exp((found.nll - found.nll_reference).mean()))
    for name in ("kl", "flips", "ppl_reference", "ppl", "ppl_ratio"):
        interval = getattr(measures, name)
        assert interval.low < interval.mean < interval.high


def test_pairing_makes_the_ratio_sharper_than_either_side() -> None:
    measures = measure(comparison())
    assert (measures.ppl_ratio.high - measures.ppl_ratio.low) / measures.ppl_ratio.mean < 0.2 * (
        measures.ppl.high - measures.ppl.low
    ) / measures.ppl.mean


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    """95 % bootstrap intervals over 40 windows, on data whose mean is known: 200 draws."""
    chance, hits = np.random.default_rng(1), 0
    for _ in range(200):
        kl = chance.normal(1.0, 1.0, (40, 5)) + chance.normal(0.0, 0.5, (40, 1))
        interval = measure(Comparison(kl, kl, kl, kl), resamples=400).kl
        hits += interval.low <= 1.0 <= interval.high
    assert 0.88 <= hits / 200 <= 0.99


def test_the_same_figures_give_the_same_interval() -> None:
    assert measure(comparison()) == measure(comparison())


def test_buckets_partition_the_positions() -> None:
    found = buckets(comparison(positions=100))
    assert [(bucket.first, bucket.last) for bucket in found] == [(0, 16), (16, 64), (64, 100)]
    assert sum(bucket.measures.positions for bucket in found) == 4000


class Tap(LogitTap):
    """The tap without an engine: rows are shown to it directly."""

    def __init__(self, path: Path, record: bool) -> None:
        self._tap_path, self._tap_record, self._tap_row = path, record, 0
        self._tap_rows: list[torch.Tensor] = []


def see(tap: Tap, logits: torch.Tensor, tokens: list[int], sampled_first: bool) -> list[list[float]]:
    """As an engine does: the prompt's rows, and the row it samples from before or after them."""
    sampled = torch.randn(1, VOCABULARY)
    parts = [sampled, logits] if sampled_first else [logits[:40], logits[40:], sampled]
    for part in parts:
        tap._tap_see(None, None, part)
    logprobs = logits.log_softmax(1)[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])]
    figures = tap.tap_window(tokens, logprobs.tolist())
    assert figures is not None
    return figures


@pytest.mark.parametrize("sampled_first", [True, False])
def test_the_tap_computes_exact_kl_over_windows(tmp_path: Path, sampled_first: bool) -> None:
    torch.manual_seed(0)
    path = tmp_path / "reference.f32"
    references = [torch.randn(length, VOCABULARY) * 2 for length in (99, 129)]
    candidates = [logits + 0.3 * torch.randn_like(logits) for logits in references]
    texts = [torch.randint(0, VOCABULARY, (len(logits) + 1,)).tolist() for logits in references]
    recorder = Tap(path, record=True)
    for logits, tokens in zip(references, texts, strict=True):
        figures = see(recorder, logits, tokens, sampled_first)
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
        assert [row[0] for row in figures] == pytest.approx(expected.tolist(), abs=1e-5)
    tap = Tap(path, record=False)
    for reference, candidate, tokens in zip(references, candidates, texts, strict=True):
        nll, kl, flips = np.array(see(tap, candidate, tokens, sampled_first)).T
        p, q = reference.double().log_softmax(1), candidate.double().log_softmax(1)
        assert kl == pytest.approx((p.exp() * (p - q)).sum(1).numpy(), abs=1e-5)
        assert flips.tolist() == (reference.argmax(1) != candidate.argmax(1)).float().tolist()
        assert nll.mean() == pytest.approx(float(-q[torch.arange(len(q)), tokens[1:]].mean()), abs=1e-5)


def test_rows_that_are_not_the_tokens_rows_are_refused(tmp_path: Path) -> None:
    tap = Tap(tmp_path / "x", record=True)
    logits = torch.randn(20, VOCABULARY)
    tap._tap_see(None, None, logits)
    with pytest.raises(RuntimeError, match="split or reordered"):
        tap.tap_window(list(range(20)), logits.flip(0).log_softmax(1)[:19, 0].tolist())
    assert Tap(tmp_path / "y", record=True).tap_window([1, 2], [0.0]) is None
