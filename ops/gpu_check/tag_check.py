"""The tag check beside a forward that is replayed as a CUDA graph: the replay must read what the check left.

The forward stands for attention: it reads block table and slot mapping from the buffers it was captured with, as model
runner V2's graphs do, between matrix products that keep the device busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

from actors.engine.integrity.tag_check import TagCheck, self_test
from actors.engine.integrity.tracker import IntegrityDelta
from actors.engine.runner_view import StepView
from ops.gpu_check.plan import Options, Row

PAGE_TOKENS = 64


class Forward:
    def __init__(self, view: StepView, width: int, on_gpu: bool) -> None:
        self.view = view
        self.seen, self.written = torch.empty_like(view.table), torch.empty_like(view.slot_mapping)
        device = view.table.device
        self.weight = torch.randn(width, width, device=device, dtype=torch.bfloat16)
        self.state = torch.randn(len(view.table), width, device=device, dtype=torch.bfloat16)
        self.replay: Callable[[], Any] = self._compute
        if on_gpu:
            self._compute()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._compute()
            self.replay = graph.replay

    def _compute(self) -> None:
        state = self.state
        for _ in range(8):
            state = torch.tanh(state @ self.weight)
        self.seen.copy_(self.view.table)
        self.written.copy_(self.view.slot_mapping)


def run(options: Options) -> Iterator[Row]:
    self_test(options.device)
    yield {"self_test": True, "ok": True}
    rows, columns, width, steps = (4, 6, 16, 6) if options.dry else (64, 512, 4096, 200)
    yield from beside_a_replay(options, rows, columns, width, steps)


def beside_a_replay(options: Options, rows: int, columns: int, width: int, steps: int) -> Iterator[Row]:
    device, pages = options.device, rows * columns + 1
    right = (torch.randperm(pages - 1)[: rows * columns] + 1).view(rows, columns).to(torch.int32)
    names = [f"r{i}" for i in range(rows)]
    tags = {int(page): 1000 + int(page) for page in right.flatten()}
    table, slots = right.to(device), torch.arange(rows, dtype=torch.int64, device=device)
    lengths = torch.full((rows,), columns * PAGE_TOKENS, dtype=torch.int32, device=device)
    view = StepView(names, table, lengths, torch.arange(rows + 1, dtype=torch.int32, device=device), slots)
    check = TagCheck(pages, PAGE_TOKENS, rows, columns, device)
    claims = {name: (0, [tags[int(page)] for page in right[i]]) for i, name in enumerate(names)}
    check.step(IntegrityDelta(tags=tags, claims=claims), None)
    forward = Forward(view, width, on_gpu=not options.dry)
    kept_table, kept_slots = table.clone(), slots.clone()
    planted = found = passed = wrong_reads = 0
    for step in range(steps):
        table.copy_(kept_table)
        slots.copy_(kept_slots)
        victim = step % rows
        if step % 2:
            table[victim, step % columns] = int(right[(victim + 1) % rows, 0])
        check.step(None, view)
        forward.replay()
        proof = check.proof()
        assert proof is not None
        at = {(wrong.request_id, wrong.position) for wrong in proof.mismatches}
        if step % 2:
            planted += 1
            found += at == {(names[victim], step % columns)}
            masked = not forward.seen[victim].any() and int(forward.written[victim]) == -1
            wrong_reads += not masked
        else:
            passed += not at and bool(torch.equal(forward.seen, kept_table))
    yield {
        "rows": rows, "columns": columns, "steps": steps, "planted": planted, "found": found,
        "right_steps_passed": passed, "replays_that_read_a_wrong_row": wrong_reads,
        "ok": found == planted and passed == steps - planted and wrong_reads == 0,
    }  # fmt: skip
    table.copy_(kept_table)
    slots.copy_(kept_slots)
    yield from cost(options, check, view, forward, steps)


def cost(options: Options, check: TagCheck, view: StepView, forward: Forward, steps: int) -> Iterator[Row]:
    """Steps with and without the check in turn; the answer is read after the replay, as a step's results are."""
    taken: dict[bool, list[float]] = {True: [], False: []}
    for step in range(2 * steps):
        checked = step % 2 == 0
        began = time.perf_counter()
        if checked:
            check.step(None, view)
        forward.replay()
        if not options.dry:
            torch.cuda.synchronize()
        if checked and (proof := check.proof()) is not None:
            assert not proof.mismatches
        taken[checked].append((time.perf_counter() - began) * 1e6)
    yield {
        "step_us": median(taken[False]),
        "step_with_check_us": median(taken[True]),
        "check_host_us": check.check_ns / max(1, check.checks) / 1e3,
    }
