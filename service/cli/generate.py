"""`nsm generate`: text from the model in this process."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from service.cli import options
from service.cli.options import make_sampling
from service.cli.output import print_json, write_text

if TYPE_CHECKING:
    from nsm_core.engine.request import Finished
    from nsm_core.sampling.params import SamplingParams
    from service.backends.base import InferenceBackend
    from service.settings import Settings

STDIN = "-"

Prompt = Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.", show_default=False)]


def generate(
    prompt: Prompt,
    model: options.Model = None,
    device: options.Device = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = options.TEMPERATURE,
    top_p: options.TopP = options.TOP_P,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = options.REPETITION_PENALTY,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    seed: options.Seed = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text, usage and seed as JSON at the end.")] = False,
) -> None:
    """Continue a text, without a server.

    The text goes to standard output as it is written; Ctrl-C ends it.
    """
    from service.settings import load_settings

    sampling = make_sampling(
        seed=seed,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    settings = load_settings(model=model, device=device)
    _generate(settings, read_stdin() if prompt == STDIN else prompt, sampling, as_json=as_json)


def read_stdin() -> str:
    """All of standard input, less the newline that every text file ends with."""
    return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")


def _generate(settings: Settings, prompt: str, sampling: SamplingParams, *, as_json: bool) -> None:
    from service.generate.openai_format import finish_reason, usage
    from service.server import make_backend

    backend = make_backend(settings)
    try:
        show = _nothing if as_json else write_text
        text, finished = asyncio.run(_run(settings, backend, prompt, sampling, show=show))
    except KeyboardInterrupt:
        write_text("" if as_json else "\n")
        raise
    if not as_json:
        write_text("" if text.endswith("\n") else "\n")
        return
    print_json(
        {
            "text": text,
            "finish_reason": finish_reason(finished),
            "usage": usage([finished]),
            "seed": sampling.seed,
            "model": settings.served_model_name or backend.model.name,
            "model_fingerprint": backend.model.fingerprint,
        }
    )


async def _run(
    settings: Settings, backend: InferenceBackend, prompt: str, sampling: SamplingParams, *, show: Callable[[str], None]
) -> tuple[str, Finished]:
    """The whole text and its last event; each piece is shown as it comes. Raises the engine's error."""
    from nsm_core.engine.request import Finished, GenerationRequest, TokenEvent
    from service.prompts import PromptEncoder

    pieces: list[str] = []
    await backend.start()
    try:
        ids = (await PromptEncoder(backend, max_tokens=settings.max_prompt_tokens).fresh(prompt)).ids
        request = GenerationRequest(request_id=uuid.uuid4().hex, prompt_ids=ids, sampling=sampling)
        async for event in backend.submit(request).events():
            if isinstance(event, TokenEvent | Finished):
                pieces.append(event.text)
                show(event.text)
            if isinstance(event, Finished):
                if event.error is not None:
                    raise event.error
                return "".join(pieces), event
    finally:
        await backend.stop()
    raise RuntimeError("the engine ended a request without Finished")


def _nothing(text: str) -> None:
    """With --json the text is shown at the end."""
