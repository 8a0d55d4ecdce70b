"""What a frontend's vLLM server is configured as: decode's settings, nothing of an engine, the user's own arguments."""

from __future__ import annotations

import pytest

from app.api.server import server_args
from cluster.spec import ClusterSpec, SpecError


def test_a_frontend_has_decodes_settings_and_no_engine() -> None:
    args = server_args(ClusterSpec.load("local-cpu", {"frontend.tool_call_parser": "hermes"}))
    assert args.served_model_name == ["smollm2"]
    assert (args.block_size, args.kv_cache_dtype, args.max_model_len, args.max_num_seqs) == (32, "fp8_e4m3", 4096, 32)
    assert args.kv_transfer_config is None
    assert args.tool_call_parser == "hermes"


def test_server_arguments_are_passed_on() -> None:
    spec = ClusterSpec.load("local-cpu", {"frontend.server_args": {"enable-scale-out": True, "max_log_len": 7}})
    args = server_args(spec)
    assert args.enable_scale_out is True and args.max_log_len == 7


def test_an_unknown_server_argument_names_the_nearest() -> None:
    spec = ClusterSpec.load("local-cpu", {"frontend.server_args": {"enable_scale_uot": True}})
    with pytest.raises(SpecError, match="did you mean enable_scale_out"):
        server_args(spec)
