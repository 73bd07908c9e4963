"""One fine-tuning job, in the gateway that owns it: its process is started, followed and ended.

The process keeps a checkpoint in the job's directory on this machine. A job that was paused, or whose server was
killed, goes on from there, or begins again on another machine, with the same numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nsm_core.errors import InvalidRequest, NotFound, QuotaExceeded, VersionConflict
from service.deps import Services
from service.named_states.tuned import SOURCE, tuned_file
from service.schemas.tuned_model import tuned_model_name
from service.tuning.job import Job
from service.tuning.process import (
    NO_ROOM,
    STATE_FILE,
    STORAGE_FULL,
    TRAINING_FILE,
    VALIDATION_FILE,
    Order,
    is_full,
    tuning_threads,
)
from service.work.run import WorkRun

logger = logging.getLogger("nsm.tuning")

COMMAND = (sys.executable, "-m", "service.tuning.process")
STATE_JOB = "fine_tuning_job"  # in the metadata of a state: which job made it
MAX_LINE_BYTES = 2**20


@dataclasses.dataclass(slots=True, kw_only=True)
class JobRun(WorkRun[Job]):
    """`directory`: of this job's files."""

    services: Services
    directory: Path
    _wake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _began: float = dataclasses.field(default_factory=time.monotonic)

    def wake(self) -> None:
        self._wake.set()

    async def run(self) -> None:
        if not self.work.has_ended:
            try:
                await self._prepare()
                await self._train()
            except (InvalidRequest, NotFound) as error:
                await self._fail(error.code or "invalid_request", str(error), error.param)
            except OSError as error:
                if not is_full(error):
                    raise
                await self._fail(STORAGE_FULL, NO_ROOM)
        if self.work.is_paused:
            logger.info("fine-tuning job %s: paused", self.work.id)
            return
        self.services.metrics.tuning.ended(self.work.status)  # type: ignore[arg-type]
        await self.library.close(self.work)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        logger.info("fine-tuning job %s: %s", self.work.id, self.work.status)

    async def _prepare(self) -> None:
        """The files of examples as files of this machine."""
        await asyncio.to_thread(self.directory.mkdir, parents=True, exist_ok=True, mode=0o700)
        fields = self.work.fields
        for name, param in ((TRAINING_FILE, "training_file"), (VALIDATION_FILE, "validation_file")):
            if fields[param] is None:
                continue
            file = await self.services.files.get(self.work.tenant, fields[param], param=param)
            raw = await self.services.files.read(self.work.tenant, file, param=param)
            await asyncio.to_thread((self.directory / name).write_bytes, raw)

    async def _served(self) -> Services:
        """Of the model that the job names. Raises NotFound where it is not served any more."""
        return await self.services.for_model(self.work.fields["model"])

    async def _order(self) -> Order:
        served, settings = await self._served(), self.services.settings
        path = settings.further_models().get(self.work.fields["model"], settings.model)
        numerics = served.backend.model.numerics
        device = settings.device if settings.device.startswith("cuda") else "cuda"
        return Order(
            directory=str(self.directory),
            model=None if path is None else str(path),
            fingerprint=served.backend.model.fingerprint,
            template=served.settings.chat_template,
            device=device if numerics.startswith("cuda") else "cpu",
            num_threads=tuning_threads(settings.num_threads),
            config=dataclasses.asdict(self.work.config),
        )

    async def _train(self) -> None:
        await self._change_active(lambda job: job.changed(status="validating_files"))
        if not self.work.is_active:
            return
        order = json.dumps(dataclasses.asdict(await self._order())).encode() + b"\n"
        process = await asyncio.create_subprocess_exec(
            *COMMAND, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=MAX_LINE_BYTES
        )
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self.services.metrics.tuning.began()
        try:
            process.stdin.write(order)
            await self._follow(process.stdout)
        finally:
            self.services.metrics.tuning.stopped()
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await _until_ended(process)

    async def _follow(self, output: asyncio.StreamReader) -> None:
        """Until the job has ended or is paused; with a sign of life for each beat."""
        line = asyncio.create_task(output.readline())
        try:
            while self.work.is_active:
                wake = asyncio.create_task(self._wake.wait())
                await asyncio.wait((line, wake), timeout=self.beat_s, return_when=asyncio.FIRST_COMPLETED)
                wake.cancel()
                self._wake.clear()
                if not line.done():
                    await self._change(lambda job: job)
                    continue
                raw = line.result()
                if not raw:
                    await self._fail("process_ended", "the process of the job ended before its work was done")
                    return
                await self._take(json.loads(raw))
                line = asyncio.create_task(output.readline())
        finally:
            line.cancel()

    async def _fail(self, code: str, message: str, param: str | None = None) -> None:
        await self._change_active(lambda job: job.failed(code, message, param))

    async def _take(self, said: dict[str, Any]) -> None:
        """A line of the process."""
        kind = said.pop("kind")
        if kind == "started":
            words = "{num_train} examples, {num_held_out} held out, {num_steps} steps".format(**said)
            await self._change_active(lambda job: job.changed(status="running").with_event(words))
        elif kind == "report":
            await self._report(said)
        elif kind == "failed":
            await self._fail(said["code"], said["message"], said["param"])
        else:
            await self._succeed()

    async def _report(self, said: dict[str, Any]) -> None:
        train_loss, loss = said["train_loss"], said["held_out_loss"]
        training = "" if train_loss is None else f"training loss {train_loss:.4f}, "
        words = f"step {said['step']} of {said['num_steps']}: {training}held-out loss {loss:.4f}"
        data = {
            "step": said["step"],
            "total_steps": said["num_steps"],
            "train_loss": train_loss,
            "valid_loss": loss,
            "best_step": said["best_step"],
        }
        share = said["step"] / said["num_steps"]
        left_s = (time.monotonic() - self._began) * (1 - share) / share if share else None
        finish = None if left_s is None else int(time.time() + left_s)
        fields = {"estimated_finish": finish, "trained_tokens": said["num_tokens"]}
        await self._change_active(lambda job: job.changed(**fields).with_event(words, data=data))

    async def _succeed(self) -> None:
        """The state, then the last status. A state that the job made before a kill is not made again."""
        services, job = await self._served(), self.work
        reference = await self._made_before()
        if reference is None:
            file = tuned_file(
                await asyncio.to_thread((self.directory / STATE_FILE).read_bytes),
                model=services.backend.model,
                tokenizer_fingerprint=services.backend.tokenizer.fingerprint,
                tenant=job.tenant,
                name=job.name,
                state_format=services.state_format,
            )
            try:
                head = await services.states.add(
                    job.tenant, job.name, file, source=SOURCE, metadata={STATE_JOB: job.id}
                )
            except (QuotaExceeded, VersionConflict) as error:
                await self._fail("state_refused", str(error), "suffix")
                return
            reference = head.reference
        name = tuned_model_name(services.model_name, reference)
        words = f"the state {reference} is there"
        await self._change_active(lambda job: job.ended("succeeded", fine_tuned_model=name).with_event(words))

    async def _change_active(self, change: Callable[[Job], Job]) -> None:
        """A job that was cancelled or paused meanwhile stays so."""
        await self._change(lambda job: change(job) if job.is_active else job)

    async def _made_before(self) -> str | None:
        for head in await self.services.states.list(self.work.tenant):
            if head.metadata.get(STATE_JOB) == self.work.id:
                return head.reference
        return None


async def _until_ended(process: asyncio.subprocess.Process) -> None:
    """Of a killed process, which ends at once: a second cancellation of the task waits for it too."""
    waiting = asyncio.create_task(process.wait())
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
