"""Tenants with keys: the file, its keys as their holders have them, and a clock that stands still."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import AsyncIterator
from pathlib import Path

from service.tenants.api_keys import digest_of, new_key
from tests.support.fakes import FakeBackend
from tests.support.gateway import Gateway, gateway


@dataclasses.dataclass(frozen=True, slots=True)
class TestKey:
    """A key as its holder has it, and the file's line for it."""

    __test__ = False

    text: str
    line: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.text}"}

    @property
    def secret(self) -> str:
        return self.text.split("_", 2)[2]


class StillClock:
    """Seconds, moved by the test alone."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_key(tenant: str, *, metrics: bool = False) -> TestKey:
    text, key_id = new_key()
    fields = [f'id = "{key_id}"', f'tenant = "{tenant}"', f'sha256 = "{digest_of(text)}"']
    return TestKey(text, "\n".join(["[[keys]]", *fields, *(["metrics = true"] if metrics else [])]))


def write_keys(path: Path, *keys: TestKey, **limits: str) -> Path:
    """`limits`: for each tenant the lines of its table. The file appears whole, as one that replaces another should."""
    tables = [f"[tenants.{tenant}]\n{lines}" for tenant, lines in limits.items()]
    new = path.with_suffix(".new")
    new.write_text("\n\n".join([*tables, *(key.line for key in keys)]) + "\n")
    os.replace(new, path)
    return path


@contextlib.asynccontextmanager
async def keyed(
    path: Path, *keys: TestKey, backend: FakeBackend | None = None, is_live: bool = False, **limits: str
) -> AsyncIterator[Gateway]:
    """A gateway on the file `path` with these keys."""
    write_keys(path, *keys, **limits)
    async with gateway(backend or FakeBackend(), is_live=is_live, api_keys_file=path) as server:
        yield server
