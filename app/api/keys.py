"""API keys: who has sent one. Hashes from a file, or keys from the environment; no key is kept, logged or shown.

A key is `pf-ID-SECRET`; the file holds a scrypt hash for each id. A verified key's SHA-256 is remembered while the
file stays as it is, so that a request costs microseconds and not the tens of milliseconds of scrypt.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

logger = logging.getLogger("pageferry.frontend")

API_KEYS, ADMIN_KEY = "PAGEFERRY_API_KEYS", "PAGEFERRY_ADMIN_KEY"
SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 14, 8, 1  # 16 MiB and some tens of milliseconds a hash
LOOK_EVERY_S = 1.0
WRONG_KEPT = 1024  # digests of keys that are none, so that a repeated one costs nothing
CHECKS_MAX = 32  # unknown keys that wait for scrypt at one time
KEY_MAX_CHARS = 256
FILE_MAX_BYTES = 16 << 20


class KeysError(ValueError):
    """A keys file or an environment that cannot be used. Never holds a key."""


class TooManyChecks(Exception):
    """So many unknown keys are being checked that this one is not."""


class KeyEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key of the file. `salt` and `hash` are hexadecimal, `made` is seconds since 1970."""

    id: str
    tenant: str
    salt: str
    hash: str
    made: int = 0
    admin: bool = False


class KeyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    keys: tuple[KeyEntry, ...] = ()


class Owner(msgspec.Struct, frozen=True):
    """Whose key it is. An admin's key opens what is not for clients as well."""

    tenant: str
    admin: bool = False


def read_file(path: Path) -> dict[str, KeyEntry]:
    """The entries by id. Raises `KeysError`."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_MAX_BYTES + 1)
    except OSError as error:
        raise KeysError(
            f"keys file {path}: {error.strerror}; `pageferry keys add TENANT --file {path}` makes it"
        ) from None
    if len(data) > FILE_MAX_BYTES:
        raise KeysError(f"keys file {path} has more than {FILE_MAX_BYTES} bytes")
    try:
        entries = msgspec.json.decode(data, type=KeyFile).keys
    except msgspec.MsgspecError as error:
        raise KeysError(f"keys file {path}: {error}; it is written by `pageferry keys`") from None
    for entry in entries:
        if not entry.id or not entry.tenant or not _is_hex(entry.salt, 16) or not _is_hex(entry.hash, 32):
            raise KeysError(f"keys file {path}: key {entry.id!r} is not as `pageferry keys` writes it")
    return {entry.id: entry for entry in entries}


def _is_hex(text: str, num_bytes: int) -> bool:
    try:
        return len(bytes.fromhex(text)) == num_bytes
    except ValueError:
        return False


def write_file(path: Path, entries: Mapping[str, KeyEntry]) -> None:
    """Whole or not at all; only its owner may read it."""
    data = msgspec.json.format(msgspec.json.encode(KeyFile(keys=tuple(entries.values()))), indent=1)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data + b"\n")
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def new_key(tenant: str, admin: bool, now_s: float) -> tuple[str, KeyEntry]:
    """The key, which is shown once, and what is kept of it."""
    name, salt = secrets.token_hex(4), secrets.token_bytes(16)
    key = f"pf-{name}-{secrets.token_urlsafe(32)}"
    entry = KeyEntry(
        id=name, tenant=tenant, salt=salt.hex(), hash=_scrypt(key, salt).hex(), made=int(now_s), admin=admin
    )
    return key, entry


def _scrypt(key: str, salt: bytes) -> bytes:
    return hashlib.scrypt(key.encode(), salt=salt, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P, maxmem=64 << 20, dklen=32)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def from_environment(environ: Mapping[str, str]) -> dict[bytes, Owner]:
    """Owners by their keys' digests: `tenant=key,tenant=key`, and an admin's key. Raises `KeysError`."""
    found: dict[bytes, Owner] = {}
    for number, pair in enumerate(filter(None, environ.get(API_KEYS, "").split(",")), 1):
        tenant, sign, key = pair.strip().partition("=")
        if not sign or not tenant or not key:
            raise KeysError(f"{API_KEYS}: entry {number} is not TENANT=KEY; entries are parted by commas")
        found[_digest(key)] = Owner(tenant)
    if admin := environ.get(ADMIN_KEY):
        found[_digest(admin)] = Owner("", admin=True)
    return found


class KeyRing:
    """The keys that are good now. The file is looked at once a second; one that cannot be read changes nothing."""

    def __init__(
        self, file: str | None, environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = Path(file) if file else None
        self._clock = clock
        self._fixed = from_environment(environ)
        self._entries: dict[str, KeyEntry] = {}
        self._seen: tuple[int, ...] = ()
        self._look_at = 0.0
        self._verified: dict[bytes, Owner] = {}
        self._wrong: OrderedDict[bytes, None] = OrderedDict()
        self._checking = asyncio.Semaphore(1)  # scrypt takes memory and a core
        self._num_checks = 0
        if self._file is not None:
            self._entries, self._seen = read_file(self._file), _signature(self._file)
            self._look_at = clock() + LOOK_EVERY_S

    @property
    def for_clients(self) -> bool:
        """Whether clients need a key."""
        return self._file is not None or any(not owner.admin for owner in self._fixed.values())

    @property
    def for_admins(self) -> bool:
        """Whether some key is an administrator's."""
        return any(owner.admin for owner in self._owners())

    @property
    def tenants(self) -> list[str]:
        return sorted({owner.tenant for owner in self._owners() if owner.tenant})

    def _owners(self) -> Iterator[Owner | KeyEntry]:
        yield from self._fixed.values()
        yield from self._entries.values()

    async def owner(self, key: str) -> Owner | None:
        """Raises `TooManyChecks`."""
        self._look()
        digest = _digest(key)
        if (owner := self._fixed.get(digest) or self._verified.get(digest)) is not None:
            return owner
        if digest in self._wrong or len(key) > KEY_MAX_CHARS:
            return None
        entry = self._entries.get(_id_of(key))
        if entry is None:
            return None
        if self._num_checks >= CHECKS_MAX:
            raise TooManyChecks
        self._num_checks += 1
        try:
            async with self._checking:
                if (owner := self._verified.get(digest)) is not None:
                    return owner  # another request of the same key has waited before this one
                hashed = await asyncio.to_thread(_scrypt, key, bytes.fromhex(entry.salt))
        finally:
            self._num_checks -= 1
        if self._entries.get(entry.id) is not entry:
            return await self.owner(key)  # the file has changed meanwhile
        if not hmac.compare_digest(hashed, bytes.fromhex(entry.hash)):
            self._wrong[digest] = None
            if len(self._wrong) > WRONG_KEPT:
                self._wrong.popitem(last=False)
            return None
        self._verified[digest] = Owner(entry.tenant, entry.admin)
        return self._verified[digest]

    def _look(self) -> None:
        if self._file is None or self._clock() < self._look_at:
            return
        self._look_at = self._clock() + LOOK_EVERY_S
        if (seen := _signature(self._file)) == self._seen:
            return
        self._seen = seen
        try:
            self._entries = read_file(self._file)
        except KeysError as error:
            logger.error("%s; the keys stay as they were", error)
            return
        self._verified.clear()
        self._wrong.clear()
        logger.info("keys file %s was read again: %d keys", self._file, len(self._entries))


def _id_of(key: str) -> str:
    head, _, rest = key.partition("-")
    return rest.partition("-")[0] if head == "pf" else ""


def _signature(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns
