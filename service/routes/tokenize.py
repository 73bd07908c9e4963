"""POST /tokenize and POST /detokenize; GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from nsm_core.tokenizer import describe
from service.deps import ServicesDep
from service.generate.openai_format import token_text
from service.schemas.answers import TextAnswer, TokenizerAnswer, TokensAnswer
from service.schemas.chat import render_chat
from service.schemas.tokenize import DetokenizeBody, TokenizeBody
from service.web.json_body import JsonRoute, json_response
from service.web.openapi import ERROR_RESPONSES, answers

router = APIRouter(route_class=JsonRoute, tags=["tokens"], responses=ERROR_RESPONSES)


@router.post(
    "/tokenize",
    summary="Encode a text or a chat",
    response_class=Response,
    responses=answers(TokensAnswer),
)
async def tokenize(body: TokenizeBody, services: ServicesDep) -> Response:
    """The ids a prompt or a chat is read as; `count` equals `usage.prompt_tokens` of a completion on it."""
    services = await services.for_model(body.model)
    text, param = body.prompt, "prompt"
    if text is None:
        text, param = render_chat(services.chat_template, body.messages), "messages"
    prompt = await services.prompts.fresh(text, param=param)
    tokens = prompt.ids if body.add_special_tokens else prompt.ids[prompt.num_start :]
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": None, "tokens": tokens}
    if body.return_token_strs:
        answer["token_strs"] = [token_text(services.backend.tokenizer, token_id) for token_id in tokens]
    return json_response(answer)


@router.post(
    "/detokenize",
    summary="Decode token ids",
    response_class=Response,
    responses=answers(TextAnswer),
)
async def detokenize(body: DetokenizeBody, services: ServicesDep) -> Response:
    """The text of ids; bytes that are not valid UTF-8 become U+FFFD, special tokens nothing."""
    services = await services.for_model(body.model)
    services.prompts.check_ids(body.tokens, param="tokens")
    return json_response({"prompt": services.backend.tokenizer.decode(body.tokens)})


@router.get(
    "/tokenizer_info",
    summary="Get the tokenizer's configuration",
    response_class=Response,
    responses=answers(TokenizerAnswer),
)
async def tokenizer_info(services: ServicesDep) -> Response:
    """What the model's `tokenizer_config.json` says: for programs that build prompts with this server's tokenizer."""
    return json_response(describe(services.chat_template, services.backend.tokenizer))
