"""`nsm sessions verify` and `migrate`: stored states against their token logs, under the model at hand."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nsm_core.execution.names import executor_of_numerics
from service.cli import options
from service.cli.output import note, print_json, printable
from service.cli.progress import progress
from service.cli.stores import opened_store, source_settings
from service.stores.sessions.base import DEFAULT_TENANT
from service.stores.sessions.key import SessionKey

if TYPE_CHECKING:
    from nsm_core.state.quantize import StateFormat
    from service.backends.base import InferenceBackend
    from service.settings import Settings
    from service.stores.sessions.base import SessionStore
    from service.stores.sessions.key import SessionKey
    from service.transfer.migrate import Migrated
    from service.transfer.verify import Verified

Sessions = Annotated[list[str] | None, typer.Argument(help="Ids; without any, all sessions.", show_default=False)]
Tenant = Annotated[str | None, typer.Option(help="Whose sessions.", show_default="all; with ids, default")]

MAX_TOLERANCE = 100.0  # above it any state would pass

BAD = ("diverged", "damaged", "failed")
INCOMPARABLE = ("several_numerics", "other_numerics")
OTHERS = ("other_model", "other_tokenizer")
MISSED = (*OTHERS, *INCOMPARABLE, "no_state", "busy")  # sessions with a log, none of which has a state that is compared
NOTHING_COMPARED = 3  # the status of `verify` where no state could be compared: a nightly job must not pass
VERIFIED: dict[str, str] = {
    "same": "same",
    "diverged": "diverged",
    "several_numerics": "of several numerics classes, not comparable",
    "other_numerics": "of another numerics class, not comparable",
    "damaged": "damaged",
    "other_model": "of another model",
    "other_tokenizer": "of another tokenizer",
    "empty": "empty",
    "no_state": "without a state to compare",
    "busy": "busy",
    "gone": "deleted meanwhile",
}
MIGRATED: dict[str, str] = {
    "migrated": "migrated",
    "repaired": "repaired",
    "current": "left as they are",
    "damaged": "damaged (--damaged repairs)",
    "other_tokenizer": "of another tokenizer",
    "other_damaged": "damaged, and of another model",
    "busy": "busy",
    "gone": "deleted meanwhile",
    "failed": "failed",
}
DONE = ("migrated", "repaired", "current", "gone")


def verify(
    sessions: Sessions = None,
    tenant: Tenant = None,
    sample: Annotated[
        int | None, typer.Option(min=1, help="Only so many, drawn at random.", show_default=False)
    ] = None,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=MAX_TOLERANCE,
            help="Most that a number of a state may differ, over max(1, itself); a rounded state, over its size. Given,"
            " it also holds for states of other numerics classes.",
            show_default="0.001; 0.05 of one in fp16, 0.2 in int8",
        ),
    ] = None,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
    as_json: options.AsJson = False,
) -> None:
    """Derive states from their token logs again and compare; status 1 if one is wrong, else 3 if sessions have tokens
    and no state could be compared. Writes nothing.
    """
    settings = source_settings(data_dir, store, model=model, device=device)
    report = asyncio.run(_verify(settings, sessions, tenant, sample, tolerance))
    if as_json:
        print_json(report.to_json())
    else:
        report.show()
    if any(report.counts[verdict] for verdict in BAD):
        raise typer.Exit(1)
    if report.has_missed_all:
        raise typer.Exit(NOTHING_COMPARED)


def migrate(
    sessions: Sessions = None,
    tenant: Tenant = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the changes, make none.")] = False,
    damaged: Annotated[bool, typer.Option("--damaged", help="Also make missing and damaged states again.")] = False,
    model: options.Model = None,
    device: options.Device = None,
    data_dir: options.DataDir = None,
    store: options.Store = None,
) -> None:
    """Bring sessions of another model (with the same tokenizer) to the model at hand; status 1 if some are left."""
    settings = source_settings(data_dir, store, model=model, device=device)
    counts: Counter[str] = Counter()
    asyncio.run(_migrate(settings, sessions, tenant, counts, is_dry_run=dry_run, is_repairing=damaged))
    print(f"{'would migrate' if dry_run else 'migrate'}: {_tally(counts, MIGRATED)}")
    if any(counts[outcome] for outcome in MIGRATED if outcome not in DONE):
        raise typer.Exit(1)


class Report:
    """Findings of `verify`; of correct sessions only their number and largest difference."""

    def __init__(self, backend: InferenceBackend, tolerances: Mapping[StateFormat, float]) -> None:
        self.counts: Counter[str] = Counter()
        self._fingerprint, self._numerics = backend.model.fingerprint, backend.model.numerics
        self._tolerances = tolerances
        self._compared: Counter[StateFormat] = Counter()
        self._differences: dict[StateFormat, float] = {}  # the largest, of those that are the same
        self._num_tokens = 0
        self._odd: list[Verified] = []

    @property
    def num_sessions(self) -> int:
        return self.counts.total()

    @property
    def has_missed_all(self) -> bool:
        """Whether there are sessions with tokens and no state could be compared."""
        return not self._compared and any(self.counts[verdict] for verdict in MISSED)

    def add(self, verified: Verified) -> None:
        self.counts[verified.verdict] += 1
        self._num_tokens += verified.num_log_tokens
        form = None if verified.verdict in INCOMPARABLE else verified.rounding
        if form is not None:
            self._compared[form] += 1
        if verified.verdict == "same" and form is not None:
            self._differences[form] = max(self._differences.get(form, 0.0), verified.difference)
        elif verified.verdict not in ("empty", "no_state"):
            self._odd.append(verified)

    def show(self) -> None:
        for verified in self._odd:
            print(
                printable(f"{_title(verified.name)}: {VERIFIED[verified.verdict]}{_because(verified, self._numerics)}")
            )
        closest = "".join(
            f", {_stored_in(form)}differing by at most {size:.2g}" for form, size in self._differences.items()
        )
        print(f"verify: {_tally(self.counts, VERIFIED)}{closest}{self._why_nothing()}")

    def _why_nothing(self) -> str:
        """Where no state was compared."""
        return f"; nothing was compared: {self._way_to_compare()}" if self.has_missed_all else ""

    def _way_to_compare(self) -> str:
        """Where no state was compared: what compares all of them, if that is one thing."""
        if not any(self.counts[verdict] for verdict in (*INCOMPARABLE, *OTHERS)):
            if self.counts["busy"]:
                return "sessions were busy, verify again later"
            return "the store has no state of these sessions yet (NSM_SNAPSHOT_TOKENS=0 stores one each turn)"
        if not any(self.counts[verdict] for verdict in INCOMPARABLE):
            return "--model names the model that made them"
        made = {verified.numerics for verified in self._odd if verified.verdict == "other_numerics"}
        verifiers = {_verifier(numerics, self._numerics) for numerics in made if numerics is not None}
        if len(verifiers) > 1 or any(self.counts[verdict] for verdict in (*OTHERS, "several_numerics")):
            return "see the line of each session"
        return f"{verifiers.pop()} verifies them"

    def to_json(self) -> dict[str, Any]:
        return {
            "model_fingerprint": self._fingerprint,
            "numerics": self._numerics,
            "num_sessions": self.num_sessions,
            "num_log_tokens": self._num_tokens,
            "counts": {verdict: self.counts[verdict] for verdict in VERIFIED},
            "compared": {
                form.value: {
                    "num_sessions": self._compared[form],
                    "tolerance": self._tolerances[form],
                    "max_difference": self._differences.get(form),
                }
                for form in self._compared
            },
            "sessions": [_to_json(verified) for verified in self._odd],
        }


def _stored_in(form: StateFormat) -> str:
    """A rounded state is compared in another way than one that was not."""
    return "" if form.value == "fp32" else f"rounded to {form.value} and as a whole "


def _title(name: SessionKey) -> str:
    return f"{name.tenant}/{name.session_id}"


def _because(verified: Verified, running: str) -> str:
    """`running`: the numerics class that states are derived with."""
    if verified.verdict in INCOMPARABLE:
        reasons = [f"differs by up to {verified.difference:.3g}, --tolerance says how much is too much"]
    else:
        reasons = [f"{found.what} {found.detail}" for found in verified.divergences]
    reasons += [] if verified.damage is None else [verified.damage.with_notes()]
    reasons += _of_classes(verified, running)
    return ": " + "; ".join(reasons) if reasons else ""


def _of_classes(verified: Verified, running: str) -> list[str]:
    """The numerics classes that made the state, where they are not only the running one."""
    newest = verified.numerics or running
    if verified.earlier_numerics:
        before = " and ".join(verified.earlier_numerics)
        return [f"made by {before} and {newest}, verified as {running}: it differs under each of them"]
    if verified.numerics is None:
        return []
    return [f"made by {newest}, verified as {running}: {_verifier(newest, running)} verifies it"]


def _verifier(made: str, running: str) -> str:
    """What verifies a state of another numerics class."""
    executor = executor_of_numerics(made)
    if executor is None:
        return "its own executor"
    if executor == executor_of_numerics(running):
        return "the same executor in the versions and on the device of then"
    bound_to = " with the same torch and device" if "/torch-" in made else ""  # of such a class both are in the name
    return f"NSM_EXECUTOR={executor}{bound_to}"


def _to_json(verified: Verified) -> dict[str, Any]:
    return {
        "tenant": verified.name.tenant,
        "id": verified.name.session_id,
        "verdict": verified.verdict,
        "num_log_tokens": verified.num_log_tokens,
        "rounded_to": None if verified.rounding is None else verified.rounding.value,
        "numerics": verified.numerics,
        "earlier_numerics": list(verified.earlier_numerics),
        "damage": None if verified.damage is None else verified.damage.with_notes(),
        "divergences": [
            {"what": found.what, "detail": found.detail, "difference": found.difference}
            for found in verified.divergences
        ],
    }


def _tally(counts: Mapping[str, int], words: Mapping[str, str]) -> str:
    return ", ".join(f"{counts[name]} {word}" for name, word in words.items() if counts[name]) or "no sessions"


async def _verify(
    settings: Settings, ids: Sequence[str] | None, tenant: str | None, sample: int | None, tolerance: float | None
) -> Report:
    from service.transfer.verify import TOLERANCES
    from service.transfer.verify import verify as run

    tolerances = TOLERANCES if tolerance is None else dict.fromkeys(TOLERANCES, tolerance)

    async with _opened(settings) as (store, backend):
        names = await _names(store, ids, tenant)
        if sample is not None and sample < len(names):
            names = random.sample(names, sample)
        report = Report(backend, tolerances)
        with progress("verify", len(names)) as advance:
            found = run(store, backend, names, tolerances=tolerances, is_strict=tolerance is not None)
            async with contextlib.aclosing(found) as steps:
                async for verified in steps:
                    report.add(verified)
                    advance(report.num_sessions)
        return report


async def _migrate(
    settings: Settings,
    ids: Sequence[str] | None,
    tenant: str | None,
    counts: Counter[str],
    *,
    is_dry_run: bool,
    is_repairing: bool,
) -> None:
    from nsm_core.errors import NsmError
    from nsm_core.state.quantize import StateFormat
    from service.telemetry.metrics.metrics import Metrics
    from service.transfer.migrate import Migrator
    from service.turns.lease import Leases

    async with _opened(settings) as (store, backend):
        names = await _names(store, ids, tenant)
        leases = Leases(
            store,
            lease_s=settings.lease_s,
            metrics=Metrics(backend),
            max_retained=settings.retained_snapshots,
            state_format=StateFormat(settings.state_dtype),
        )
        migrator = Migrator(store, backend, leases, is_dry_run=is_dry_run, is_repairing=is_repairing)
        try:
            with progress("migrate", len(names)) as advance:
                async with contextlib.aclosing(migrator.run(names)) as steps:
                    async for migrated in steps:
                        counts[migrated.outcome] += 1
                        _note_odd(migrated)
                        advance(counts.total())
        except NsmError as error:
            raise NsmError(f"{error.with_notes()}; until there: {_tally(counts, MIGRATED)}") from error


def _note_odd(migrated: Migrated) -> None:
    if migrated.outcome not in ("migrated", "repaired", "current"):
        error = migrated.error if migrated.outcome == "failed" else None
        reason = "" if error is None else f": {error.with_notes()}"
        note(f"{_title(migrated.name)}: {MIGRATED[migrated.outcome]}{reason}")


@contextlib.asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[tuple[SessionStore, InferenceBackend]]:
    from service.server import make_backend

    backend = make_backend(settings)
    async with opened_store(settings) as store:
        await backend.start()
        try:
            yield store, backend
        finally:
            await backend.stop()


async def _names(store: SessionStore, ids: Sequence[str] | None, tenant: str | None) -> list[SessionKey]:
    """Raises NotFound for an id that does not exist."""
    from service.stores.sessions.key import SessionKey
    from service.transfer.backup import all_sessions

    if not ids:
        return await all_sessions(store, tenant=tenant)
    owner = DEFAULT_TENANT if tenant is None else tenant
    for session_id in ids:
        await store.get(SessionKey(owner, session_id))
    return [SessionKey(owner, session_id) for session_id in dict.fromkeys(ids)]
