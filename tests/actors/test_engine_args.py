"""The table of refused engine arguments against the vLLM that is installed."""

from __future__ import annotations

import dataclasses

from vllm.engine.arg_utils import AsyncEngineArgs

from cluster.engine_args import ONLY, OWNED


def test_every_refused_engine_argument_is_one_that_vllm_has() -> None:
    assert not {*OWNED, *ONLY} - {field.name for field in dataclasses.fields(AsyncEngineArgs)}
