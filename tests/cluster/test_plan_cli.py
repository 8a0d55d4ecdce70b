"""`pageferry plan` as people run it: exit codes, stable JSON keys, tables, and the check over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.plan.cli import main

GLM = ["glm-5.2", "--gpu", "H200", "--count", "8", "--tp", "8", "--weights", "int4", "--kv", "fp8"]
CPU = ["smollm2-135m-instruct", "--gpu", "CPU", "--kv-space-gib", "1", "--set", "block_tokens=32", "--kv", "fp8"]
SHORT = ["--input", "512", "--output", "128"]


def as_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_json_has_the_stable_keys_and_the_published_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    tree = as_json(capsys, *GLM, "--prefill", "weights=fp8", "--gpu-price", "3.5")
    assert tree["weights_gib_total"] == pytest.approx(419.9, abs=0.1)
    assert tree["weights_gib_per_gpu"] == pytest.approx(52.5, abs=0.1)
    assert tree["weights_gib_per_gpu_resident"] == pytest.approx(54.6, abs=0.1)
    assert tree["kv_bytes_per_token"] == 78 * 656 + 21 * 132
    assert tree["max_requests"] == (tree["blocks"] - 1) // -(-tree["context"] // tree["block_tokens"])
    assert tree["pools"]["prefill"]["weights_gib_total"] == pytest.approx(703.7, abs=0.1)
    assert tree["pools"]["prefill"]["kv"] == "bf16"
    expected = {
        *("model", "gpu", "gpus", "tp", "pp", "dp_attention", "ep", "weights", "kv", "context", "concurrency"),
        *("weights_gib_total", "weights_gib_per_gpu", "weights_gib_per_gpu_resident", "weights_gib_by_kind"),
        *("kv_gib_per_gpu", "kv_bytes_per_token", "kv_bytes_per_token_per_gpu", "kv_tokens", "max_requests"),
        *("blocks", "page_bytes", "longest_context", "fits", "problems", "pools", "roofline", "transfer", "cost"),
        *("nearest_that_fits", "notes", "workload"),
    }
    assert expected <= set(tree)
    assert tree["cost"]["per_million_output_tokens"] > tree["cost"]["per_million_input_tokens"] > 0
    assert {"ttft_ms", "decode_tok_s", "tpot_ms", "decode_bound", "prefill_tok_s"} <= set(tree["roofline"])
    assert tree["transfer"]["bytes_per_request"] == 8192 * tree["kv_bytes_per_token"]


def test_count_makes_replicas_and_must_divide(capsys: pytest.CaptureFixture[str]) -> None:
    one = as_json(capsys, "glm-4.5", "--tp", "8", "--kv", "fp8")
    two = as_json(capsys, "glm-4.5", "--tp", "8", "--kv", "fp8", "--count", "16")
    assert (one["replicas"], two["replicas"]) == (1, 2)
    assert two["kv_tokens"] == 2 * one["kv_tokens"]
    assert main(["glm-4.5", "--tp", "8", "--count", "12"]) == 2
    assert "count 12 GPUs is not a multiple of the 8" in capsys.readouterr().err


def test_what_does_not_fit_exits_1_with_three_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["kimi-k2.6", "--tp", "8", "--context", "21400", "--concurrency", "64"]
    tree = as_json(capsys, *argv, code=1)
    assert not tree["fits"] and "37 such requests" in tree["problems"][0]
    assert tree["nearest_that_fits"]["decode"][0]["changes"] == {"kv": "bf16 -> fp8"}
    assert len(tree["nearest_that_fits"]["decode"]) == 3
    assert main(argv) == 1
    text = capsys.readouterr().out
    assert "decode does not fit" in text and "1. kv bf16 -> fp8" in text


def test_tables_show_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GLM, "--gpu-price", "3.5"]) == 0
    text = capsys.readouterr().out
    for part in ("419.94", "52.49", "54.62", "KV tokens", "bound by", "hand-over of one request", "million output"):
        assert part in text


def test_published_figures_are_listed_with_their_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    tree = as_json(capsys, "--published")
    rows = tree["figures"]
    assert len(tree["orderings"]) == 5 and len(tree["costs"]) == 2
    assert {686_000, 1_370_000, 705, 421, 88, 52, 1_180_000} <= {row["published"] for row in rows}
    assert all(row["why"] for row in rows)
    assert main(["--published"]) == 0
    text = capsys.readouterr().out
    assert "1,370,000 tokens" in text and "who is ahead" in text and "ratio of costs" in text


def test_gpu_overrides_and_other_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    tree = as_json(capsys, "glm-4.5-air", "--gpu", "X9", "--set", "gpu_hbm_gib=64", "--set", "gpu_tb_s=2", "--tp", "8")
    assert (tree["gpu"], tree["hbm_gib"]) == ("X9", 64)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "name a model"),
        (["glm-52"], "did you mean 'glm-5.2'"),
        (["glm-5.2", "--gpu", "H2000"], "did you mean 'H200'"),
        (["glm-5.2", "--kv", "fp7"], "did you mean 'fp8'"),
        (["smollm2-135m-instruct", "--gpu", "CPU"], "kv_space_gib is needed"),
        (["glm-5.2", "--set", "block_token=16"], "did you mean 'block_tokens'"),
        (["glm-5.2", "--set", "mtp=yes"], "mtp is 'yes'"),
        (["glm-5.2", "--prefill", "dp=2"], "there are gpu, tp, pp, weights, kv"),
        (["--topology", "no-such-file"], "no-such-file"),
        (["--topology", "two-node"], "name their type"),
        ([*CPU, *SHORT, "--check", "/no/such/status.json"], "no status from"),
    ],
)
def test_wrong_arguments_exit_2_and_say_what_to_do(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    out = capsys.readouterr()
    assert message in out.err and not out.out


def test_shipped_topologies_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    two = as_json(capsys, "kimi-k2.6", "--topology", "two-node", "--gpu", "H200")
    assert two["pools"]["decode"]["kv"] == "fp8" and two["pools"]["prefill"]["kv"] == "bf16"
    one = as_json(capsys, "glm-4.5-air", "--topology", "one-node", "--gpu", "H200")
    assert one["tp"] == 2 and one["fits"]
    glm = as_json(capsys, "glm-5.2", "--topology", "two-node-glm", "--gpu", "H200")
    assert glm["pools"]["decode"]["kv"].startswith("fp8") and glm["pools"]["prefill"]["kv"] == "bf16"


def test_a_cpu_topology_needs_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cpu.yaml"
    pool = "{replicas: 1, kv_cache_gib: 1, block_tokens: 32"
    file.write_text(
        "model: {path: smollm2-135m-instruct, max_model_len: 4096}\n"
        f"pools: {{prefill: {pool}}}, decode: {pool}, kv_dtype: fp8_e4m3}}}}\n"
    )
    tree = as_json(capsys, "--topology", str(file))
    assert tree["pools"]["decode"]["kv_tokens"] == 2912 * 32
    assert tree["pools"]["prefill"]["kv_tokens"] == 1456 * 32
    assert tree["max_requests"] == 2911 // 128


@contextmanager
def serving(status: dict[str, Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(status).encode()
            self.send_response(200 if self.path == "/status" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def decode_status(blocks: int) -> dict[str, Any]:
    replica = {
        "replica_id": "d0",
        "blocks_total": blocks,
        "layout": {"num_layers": 30, "page_tokens": 32, "num_kv_heads": 3, "head_dim": 64},
        "engine": {"kv_cache_bytes": 2912 * 32 * 11_520},
    }
    return {"pools": {"decode": {"replicas": [replica]}}}


def test_check_agrees_with_a_service_that_is_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(decode_status(2911)) as url:
        rows = as_json(capsys, *CPU, *SHORT, "--check", url)
        assert all(row["ok"] for row in rows) and len(rows) == 5
        assert main([*CPU, *SHORT, "--check", url + "/status"]) == 0
        assert "ok" in capsys.readouterr().out


def test_check_fails_when_a_number_is_more_than_two_percent_off(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(decode_status(2800)) as url:
        rows = as_json(capsys, *CPU, *SHORT, "--check", url, code=1)
        assert [row["what"] for row in rows if not row["ok"]] == ["KV tokens"]
        assert as_json(capsys, *CPU, *SHORT, "--check", url, "--set", "tolerance=0.05")


def test_check_reads_a_saved_status_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "status.json"
    file.write_text(json.dumps(decode_status(2911)))
    assert main([*CPU, *SHORT, "--check", str(file)]) == 0
    capsys.readouterr()
    file.write_text("[]")
    assert main([*CPU, *SHORT, "--check", str(file)]) == 2
    assert "is list" in capsys.readouterr().err


def test_a_checkpoint_folder_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / ".models" / "smollm2-135m-instruct"
    if not folder.is_dir():
        pytest.skip(f"no demo model at {folder}: make setup")
    tree = as_json(capsys, str(folder), *CPU[1:], *SHORT)
    assert any(note.startswith("on disk: 272 tensors, 0.2506 GiB, +0.00% planned") for note in tree["notes"])
