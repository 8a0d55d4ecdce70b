"""What all commands share: version, examples, exit codes, completion, Ctrl-C; and `pageferry doctor`."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from app import cli
from app.commands import completion, doctor
from cluster.spec import ClusterSpec


def test_the_version_names_what_the_service_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"pageferry \d+\.\d+\.\d+ \(ray [\d.]+, vllm .*torch .*\)\n", capsys.readouterr().out)


def test_the_help_has_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for word in (*cli.COMMANDS, *map(str, cli.EXIT_CODES)):
        assert re.search(rf"^ +{word}  ", shown, re.M), word


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_each_command_ends_with_examples_of_its_own_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of itself when it is imported
        importlib.import_module(cli.COMMANDS[name].module)
    with pytest.raises(SystemExit) as stopped:
        cli.main([name, "--help"])
    assert stopped.value.code == 0
    options, _, shown = capsys.readouterr().out.rpartition("examples:\n")
    assert [line.strip() for line in shown.splitlines()] == [
        f"pageferry {name} {each}".strip() for each in cli.COMMANDS[name].examples
    ]
    for word in shlex.split(" ".join(cli.COMMANDS[name].examples)):
        if word.startswith("--"):
            assert word in re.findall(r"--[a-z][\w-]*", options), f"{word} is no option of {name}"


def test_ctrl_c_is_one_line_and_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = ModuleType("interrupted")

    def main(argv: list[str]) -> int:
        raise KeyboardInterrupt

    module.main = main  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "app.commands.status", module)
    assert cli.main(["status"]) == cli.INTERRUPTED
    assert capsys.readouterr().err == "pageferry status: interrupted\n"


def complete(script: Path, *words: str) -> set[str]:
    """What bash would offer for the last word."""
    line = f"source {script}; COMP_WORDS=(pageferry {' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words)}"
    command = ["bash", "--norc", "-c", f'{line}; _pageferry; echo "${{COMPREPLY[@]}}"']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return set(done.stdout.split())


def test_bash_completes_commands_and_their_options(tmp_path: Path) -> None:
    found = {name: completion.options(name) for name in ("status", "dashboards", "completion")}
    script = tmp_path / "pageferry.bash"
    script.write_text(completion.bash(found))
    assert complete(script, "da") == {"dashboards"}
    assert complete(script, "status", "--a") == {"--api-key", "--audit"}
    assert complete(script, "dashboards", "--dry") == {"--dry-run"}
    assert complete(script, "completion", "") == {"bash", "zsh", "fish"}
    assert complete(script, "--v") == {"--version"}


def findings(capsys: pytest.CaptureFixture[str], *settings: str) -> tuple[int, dict[str, dict[str, str]]]:
    code = cli.main(["doctor", "local-cpu", *settings, "--json"])
    return code, {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}


def test_the_doctor_names_what_is_missing_and_how_to_mend_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = findings(
            capsys,
            f"frontend.port={port}",
            f"model.path={tmp_path}",
            "pools.decode.weights=/nowhere",
            "transfer.staging_bytes_max=9000000000000",
            "pools.decode.kv_cache_gib=4000",
        )
    assert code == 1
    assert {what for what, each in found.items() if each["state"] == "missing"} >= {
        f"port {port}",
        "model.path",
        "pools.decode.weights",
        "memory",
    }
    assert "lacks weights (*.safetensors), a tokenizer" in found["model.path"]["found"]
    assert all(each["mend"] for each in found.values() if each["state"] == "missing")


def test_the_doctor_counts_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ClusterSpec.load("one-node", {})
    monkeypatch.setattr(doctor, "gpu_names", lambda: ["NVIDIA H200"] * 8)
    (enough,) = doctor.gpus(spec)
    assert enough.state == "ok" and "8 here (NVIDIA H200)" in enough.found
    monkeypatch.setattr(doctor, "gpu_names", list)
    (none,) = doctor.gpus(spec)
    assert none.state == "missing" and none.mend
    assert not list(doctor.gpus(ClusterSpec.load("local-cpu", {})))


def test_the_doctor_finds_this_machine_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """It runs the other tests."""
    _, found = findings(capsys, "frontend.port=18911")
    for what in ("Python", "ray", "vllm", "CPU instructions"):
        assert found[what]["state"] == "ok", found[what]


def test_a_wrong_setting_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "local-cpu", "pools.decode.replica=1"]) == 2
    assert "did you mean" in capsys.readouterr().err
