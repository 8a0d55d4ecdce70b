"""API keys: the file of hashes, the environment, rotation, and what a guess costs."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path

import pytest

from app.api import keys
from app.api.keys import KeyRing, KeysError, Owner, TooManyChecks
from app.cli import main


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(file: Path, tenant: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[str, str]:
    assert main(["keys", "add", tenant, "--file", str(file), "--json", *more]) == 0
    made = json.loads(capsys.readouterr().out)
    return made["key"], made["id"]


async def test_keys_of_the_command_are_taken_and_changed_without_a_restart(
    file: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first, name = add(file, "acme", capsys)
    clock = Clock()
    ring = KeyRing(str(file), {}, clock)
    assert await ring.owner(first) == Owner("acme")
    assert await ring.owner(first[:-1]) is None and await ring.owner("pf-00000000-x") is None
    second, _ = add(file, "zeta", capsys, "--admin")
    assert await ring.owner(second) is None, "the file is looked at once a second"
    clock.now += 2
    assert await ring.owner(second) == Owner("zeta", admin=True) and ring.for_admins
    assert main(["keys", "revoke", name, "--file", str(file)]) == 0
    clock.now += 2
    assert await ring.owner(first) is None, "also one that was verified before"
    file.write_text("{")
    clock.now += 2
    assert await ring.owner(second) == Owner("zeta", admin=True), "a broken file changes nothing"
    file.unlink()
    clock.now += 2
    assert await ring.owner(second) is not None and ring.tenants == ["zeta"]
    shown = caplog.text + capsys.readouterr().out + str(vars(ring))
    assert "stay as they were" in caplog.text and first not in shown and second not in shown


def test_the_file_holds_no_key_and_only_its_owner_reads_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key, name = add(file, "acme", capsys)
    assert key.split("-", 2)[2] not in file.read_text() and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert main(["keys", "list", "--file", str(file)]) == 0
    shown = capsys.readouterr().out
    assert name in shown and "acme" in shown and key not in shown
    assert os.listdir(file.parent) == ["keys.json"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["add"], "needs a tenant"),
        (["revoke", "nope"], "no key 'nope'"),
        (["add", "a\nb"], "printable"),
    ],
)
def test_mistakes_are_exit_status_2_and_named(
    argv: list[str], says: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    add(file, "acme", capsys)
    assert main(["keys", *argv, "--file", str(file)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", '{"keys": [{"id": "a"}]}', '{"keys": [], "more": 1}', "[]"])
def test_a_file_that_is_no_keys_file_is_refused_at_start(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(KeysError, match="keys file"):
        KeyRing(str(file), {})
    with pytest.raises(KeysError, match="pageferry keys add"):
        KeyRing(str(file.with_name("missing")), {})


async def test_keys_of_the_environment() -> None:
    ring = KeyRing(None, {keys.API_KEYS: "acme=sk-1, zeta=sk=2", keys.ADMIN_KEY: "root"})
    assert [await ring.owner(key) for key in ("sk-1", "sk=2", "root", "sk-3")] == [
        Owner("acme"),
        Owner("zeta"),
        Owner("", admin=True),
        None,
    ]
    assert ring.for_clients and ring.for_admins
    only_admin = KeyRing(None, {keys.ADMIN_KEY: "root"})
    assert not only_admin.for_clients and only_admin.for_admins and not KeyRing(None, {}).for_clients
    with pytest.raises(KeysError) as caught:
        KeyRing(None, {keys.API_KEYS: "acme=sk-1,sk-secret"})
    assert "entry 2" in str(caught.value) and "sk-" not in str(caught.value)


async def test_scrypt_is_paid_once_a_key_and_guesses_cannot_pile_up(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = add(file, "acme", capsys)
    hashed: list[str] = []
    real = keys._scrypt
    monkeypatch.setattr(keys, "_scrypt", lambda text, salt: hashed.append(text) or real(text, salt))  # type: ignore[func-returns-value]
    monkeypatch.setattr(keys, "CHECKS_MAX", 3)
    ring = KeyRing(str(file), {})
    for _ in range(5):
        assert await ring.owner(key) == Owner("acme")
        assert await ring.owner(key + "x") is None
        assert await ring.owner("pf-ffffffff-unknown") is None
        assert await ring.owner("pf-" + "x" * 300) is None
    assert hashed == [key, key + "x"]
    guesses = [ring.owner(f"{key}{number}") for number in range(keys.CHECKS_MAX + 3)]
    answers = await asyncio.gather(*guesses, return_exceptions=True)
    assert sum(isinstance(answer, TooManyChecks) for answer in answers) == 3
    assert all(answer is None or isinstance(answer, TooManyChecks) for answer in answers)
    assert await ring.owner(key) == Owner("acme")
