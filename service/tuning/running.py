"""One fine-tuning job, in the gateway that owns it: its process is started, followed and ended.

The process keeps a checkpoint in the job's directory on this machine. A job whose server was killed goes on from there,
or begins again on another machine, with the same numbers.
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
from service.lifecycle.ownership import Ownership, OwnershipLost
from service.named_states.tuned import SOURCE, tuned_file
from service.schemas.tuned_model import tuned_model_name
from service.tuning.job import Job
from service.tuning.library import JobLibrary
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

logger = logging.getLogger("nsm.tuning")

STATE_JOB = "fine_tuning_job"  # in the metadata of a state: which job made it
MAX_LINE_BYTES = 2**20


@dataclasses.dataclass(slots=True, kw_only=True)
class JobRun:
    """`owner`: the name of this process. `beat_s`: between two signs of life. `directory`: of this job's files."""

    services: Services
    library: JobLibrary
    job: Job
    owner: str
    beat_s: float
    directory: Path
    _wake: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _began: float = dataclasses.field(default_factory=time.monotonic)

    def wake(self) -> None:
        """Somebody may have cancelled the job."""
        self._wake.set()

    async def run(self) -> None:
        """To the job's end. Raises OwnershipLost, or NsmError where the store fails: then somebody goes on later."""
        if not self.job.has_ended:
            try:
                await self._prepare()
                await self._train()
            except (InvalidRequest, NotFound) as error:
                await self._fail(error.code or "invalid_request", str(error), error.param)
            except OSError as error:
                if not is_full(error):
                    raise
                await self._fail(STORAGE_FULL, NO_ROOM)
        self.services.metrics.tuning.ended(self.job.status)  # type: ignore[arg-type]
        await self.library.close(self.job.tenant, self.job.id)
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
        logger.info("fine-tuning job %s: %s", self.job.id, self.job.status)

    async def _prepare(self) -> None:
        """The files of examples as files of this machine."""
        await asyncio.to_thread(self.directory.mkdir, parents=True, exist_ok=True, mode=0o700)
        fields = self.job.fields
        for name, param in ((TRAINING_FILE, "training_file"), (VALIDATION_FILE, "validation_file")):
            if fields[param] is None:
                continue
            file = await self.services.files.get(self.job.tenant, fields[param], param=param)
            raw = await self.services.files.read(self.job.tenant, file, param=param)
            await asyncio.to_thread((self.directory / name).write_bytes, raw)

    async def _served(self) -> Services:
        """Of the model that the job names. Raises NotFound where it is not served any more."""
        return await self.services.for_model(self.job.fields["model"])

    async def _order(self) -> Order:
        served, settings = await self._served(), self.services.settings
        path = settings.further_models().get(self.job.fields["model"], settings.model)
        numerics = served.backend.model.numerics
        device = settings.device if settings.device.startswith("cuda") else "cuda"
        return Order(
            directory=str(self.directory),
            model=None if path is None else str(path),
            fingerprint=served.backend.model.fingerprint,
            template=served.settings.chat_template,
            device=device if numerics.startswith("cuda") else "cpu",
            num_threads=tuning_threads(settings.num_threads),
            config=dataclasses.asdict(self.job.config),
        )

    async def _train(self) -> None:
        await self._change(lambda job: _if_open(job, lambda: job.changed(status="validating_files")))
        if self.job.has_ended:
            return
        order = json.dumps(dataclasses.asdict(await self._order())).encode() + b"\n"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "service.tuning.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
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
            await process.wait()

    async def _follow(self, output: asyncio.StreamReader) -> None:
        """Until the job has ended; with a sign of life for each beat."""
        line = asyncio.create_task(output.readline())
        try:
            while not self.job.has_ended:
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
        await self._change(lambda job: _if_open(job, lambda: job.failed(code, message, param)))

    async def _take(self, said: dict[str, Any]) -> None:
        """A line of the process."""
        kind = said.pop("kind")
        if kind == "started":
            words = "{num_train} examples, {num_held_out} held out, {num_steps} steps".format(**said)
            await self._change(lambda job: _if_open(job, lambda: job.changed(status="running").with_event(words)))
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
        await self._change(lambda job: _if_open(job, lambda: job.changed(**fields).with_event(words, data=data)))

    async def _succeed(self) -> None:
        """The state, then the last status. A state that the job made before a kill is not made again."""
        services, job = await self._served(), self.job
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
        await self._change(
            lambda job: _if_open(job, lambda: job.ended("succeeded", fine_tuned_model=name).with_event(words))
        )

    async def _made_before(self) -> str | None:
        for head in await self.services.states.list(self.job.tenant):
            if head.metadata.get(STATE_JOB) == self.job.id:
                return head.reference
        return None

    async def _change(self, change: Callable[[Job], Job]) -> None:
        """Changes the job, with a sign of life. Raises OwnershipLost."""

        def with_beat(job: Job) -> Job:
            if job.ownership is None or job.ownership.owner != self.owner:
                raise OwnershipLost
            changed = change(job)
            return dataclasses.replace(changed, ownership=Ownership(owner=self.owner, beat=job.ownership.beat + 1))

        self.job = await self.library.change(self.job.tenant, self.job.id, with_beat)


def _if_open(job: Job, change: Callable[[], Job]) -> Job:
    """A job that was cancelled meanwhile stays so."""
    return job if job.has_ended else change()
