"""One batch from its input file to its output files, in the process that owns it.

Each line's result is one document, written once: a process that is killed loses the lines that it had not finished,
and whoever owns the batch next runs just those. The files are made of the results when all are there, under ids that
follow from the batch's own, so that writing them again changes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from nsm_core.errors import NotFound, NsmError
from nsm_core.hashing import identity_of
from service.batches.batch import Batch
from service.batches.input_lines import InputErrors, InputLine, batch_error, read_lines
from service.batches.library import RESULTS_AT_ONCE, BatchLibrary
from service.batches.pace import LinePace
from service.batches.requests import (
    MODEL_CHANGED,
    LineRequest,
    changed_line,
    expired_line,
    is_failed,
    key_of,
    num_requests_of,
    run_line,
)
from service.deps import Services
from service.state.other_model import shown_model
from service.work.ownership import OwnershipLost
from service.work.run import WorkRun

logger = logging.getLogger("nsm.batches")


@dataclasses.dataclass(slots=True, kw_only=True)
class BatchRun(WorkRun[Batch]):
    """Of a gateway, whose batches share `pace`."""

    library: BatchLibrary
    services: Services
    pace: LinePace
    _is_over: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _counts: dict[int, bool] = dataclasses.field(default_factory=dict)  # lines that have a result: whether it failed
    _num_lines: int = 0
    _is_lost: bool = False  # the batch is another's now, or the store is away

    async def run(self) -> None:
        if self.work.has_ended:  # killed before it was taken off the list
            await self.library.close(self.work)
            return
        lines = await self._read_input()
        if isinstance(lines, InputErrors):
            await self._end(self.work.now("failed", errors=lines.to_object()))
            return
        self._num_lines = len(lines)
        self._counts = await self.library.known(self.work, len(lines))
        if not self._counts:
            models = self._models_of(lines)
            await self._change(lambda batch: batch.begun(models))
        async with self._sending_beats():
            if self.work.status in ("in_progress", "cancelling"):
                pending = [line for line in lines if line.number not in self._counts]
                pending = await self._without_changed(pending)
                async with self.pace.yielding_slots():
                    await self._run_lines(pending)
            if not self._is_lost:
                await self._finish(lines)

    async def _read_input(self) -> list[InputLine] | InputErrors:
        services, fields = self.services, self.work.fields
        try:
            file = await services.files.get(self.work.tenant, fields["input_file_id"])
            raw = await services.files.read(self.work.tenant, file)
        except NotFound as error:
            return batch_error("file_not_found", str(error))
        return await asyncio.to_thread(read_lines, raw, endpoint=fields["endpoint"])

    def _models_of(self, lines: Sequence[InputLine]) -> dict[str, str]:
        """The fingerprints of the models that they name, of those that are served."""
        found = {name: self.services.models.fingerprint_of(name or None) for name in {line.model for line in lines}}
        return {name: fingerprint for name, fingerprint in found.items() if fingerprint is not None}

    async def _without_changed(self, lines: Sequence[InputLine]) -> list[InputLine]:
        """Ends those whose model is not the one that the batch began with, so that no output is of two models."""
        began, now = self.work.models, self._models_of(lines)
        changed = [name for name in now if began.get(name, now[name]) != now[name]]
        if not changed:
            return list(lines)
        refused = [line for line in lines if line.model in changed]
        models = [await asyncio.to_thread(shown_model, of[changed[0]]) for of in (began, now)]
        message = f"the batch began with model {models[0]}, {models[1]} runs now: {len(refused)} requests are not run"
        logger.warning("batch %s: %s", self.work.id, message)
        await self._change(lambda batch: batch.changed(errors=batch_error(MODEL_CHANGED, message).to_object()))
        for line in refused:
            await self._keep(line, changed_line(line, key_of(self.work.id, line.number)))
        return [line for line in lines if line.model not in changed]

    async def _run_lines(self, lines: Sequence[InputLine]) -> None:
        """Until all have a result, or the batch is to end."""
        waiting, running = list(reversed(lines)), dict[asyncio.Task[Any], InputLine]()
        over = asyncio.create_task(self._is_over.wait())
        try:
            while (waiting or running) and not self._is_over.is_set():
                if waiting:
                    room = asyncio.create_task(self.pace.wait_for_room())
                    try:
                        await asyncio.wait((room, over, *running), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        room.cancel()
                    if room.done() and not room.cancelled() and not self._is_over.is_set():
                        line = waiting.pop()
                        running[self._begin(line)] = line
                else:
                    await asyncio.wait((over, *running), return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in running if task.done()]:
                    line = running.pop(task)
                    if task.cancelled():  # it gave way
                        self.services.metrics.batches.gave_way()
                        waiting.append(line)
                    else:
                        task.result()
        finally:
            over.cancel()
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)

    def _begin(self, line: InputLine) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(self._run_line(line))
        self.pace.add(task, num_requests=num_requests_of(line.body))
        return task

    async def _run_line(self, line: InputLine) -> None:
        request = LineRequest(
            services=self.services, tenant=self.work.tenant, line=line, key=key_of(self.work.id, line.number)
        )
        metrics = self.services.metrics.batches
        metrics.began()
        try:
            result = await run_line(request, endpoint=self.work.fields["endpoint"])
            keeping = asyncio.create_task(self._keep(line, result))
            while not keeping.done():
                with contextlib.suppress(asyncio.CancelledError):  # too late: a line whose result is stored has run
                    await asyncio.wait((keeping,))
            keeping.result()
        finally:
            metrics.left()

    async def _keep(self, line: InputLine, result: dict[str, Any]) -> None:
        await self.library.put_result(self.work, line.number, result)
        self._counts[line.number] = is_failed(result)
        self.services.metrics.batches.ended(is_failed=is_failed(result))

    @contextlib.asynccontextmanager
    async def _sending_beats(self) -> AsyncIterator[None]:
        """Inside, the batch tells how far it is, and hears when it is to end."""
        if self.work.is_cancelled or self.work.is_expired():
            self._is_over.set()
        task = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def _beat(self) -> None:
        try:
            while True:
                await asyncio.sleep(self.beat_s)
                await self._change(lambda batch: batch.changed(request_counts=self._request_counts()))
                if self.work.is_cancelled or self.work.is_expired():
                    self._is_over.set()
        except (OwnershipLost, NsmError):
            self._is_lost = True
            self._is_over.set()
            raise

    def _request_counts(self) -> dict[str, int]:
        num_failed = sum(self._counts.values())
        return {"total": self._num_lines, "completed": len(self._counts) - num_failed, "failed": num_failed}

    async def _finish(self, lines: Sequence[InputLine]) -> None:
        """The files, then the last status."""
        is_whole = len(self._counts) == len(lines)
        status = "cancelled" if self.work.is_cancelled else "completed" if is_whole else "expired"
        if status == "completed" and self.work.status == "in_progress":
            await self._change(lambda batch: batch.now("finalizing") if batch.status == "in_progress" else batch)
        output, errors = await self._outputs(lines, has_expired=status == "expired")
        files = {
            "output_file_id": await self._write("output", output),
            "error_file_id": await self._write("error", errors),
        }
        await self._end(self.work.now(status, request_counts=self._request_counts(), **files))
        await self.library.forget_results(self.work, len(lines))

    async def _outputs(self, lines: Sequence[InputLine], *, has_expired: bool) -> tuple[bytes, bytes]:
        """The lines of both files, in the order of the input."""
        output, errors = list[bytes](), list[bytes]()
        for start in range(0, len(lines), RESULTS_AT_ONCE):
            some = lines[start : start + RESULTS_AT_ONCE]
            results = await self.library.results(self.work, [line.number for line in some])
            for line, found in zip(some, results, strict=True):
                result = found
                if result is None and has_expired:
                    result = expired_line(line, key_of(self.work.id, line.number))
                if result is not None:
                    raw = orjson.dumps(result, option=orjson.OPT_APPEND_NEWLINE)
                    (errors if is_failed(result) else output).append(raw)
        return b"".join(output), b"".join(errors)

    async def _write(self, kind: str, raw: bytes) -> str | None:
        """The id of the file; None for one without a line."""
        if not raw:
            return None
        file = await self.services.files.write_owed(
            self.work.tenant,
            raw,
            file_id=f"file-{identity_of(self.work.id, kind)[:32]}",
            filename=f"{self.work.id}_{kind}.jsonl",
            ttl_s=self.work.output_ttl_s,
        )
        return file.id

    async def _end(self, ended: Batch) -> None:
        await self._change(lambda batch: dataclasses.replace(batch, fields=ended.fields))
        await self.library.close(self.work)
        logger.info("batch %s: %s", self.work.id, self.work.status)
