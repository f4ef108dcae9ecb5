"""OpenAI's answering routes, and `/tokenize` and `/detokenize` beside them."""

from __future__ import annotations

import uuid
from typing import Any

from flask import Response, jsonify
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from flask_openapi3.types import ResponseDict

from appliance.errors import RequestError
from appliance.text.reply import ends_in_think
from appliance.text.tokenizer import Tokenizer
from appliance.web.answering import answer
from appliance.web.chat import ChatChoices
from appliance.web.completions import CompletionChoices
from appliance.web.openai_dialect import OpenAIDialect
from appliance.web.orders import chat_orders, chat_prompt, completion_orders
from appliance.web.schemas import ChatBody, CompletionBody, DetokenizeBody, ErrorBody, TokenizeBody
from appliance.web.service import service

_ERRORS: ResponseDict = {str(status): ErrorBody for status in (400, 401, 403, 404, 413, 415, 429, 500, 503)}

api = APIBlueprint("openai", __name__, abp_tags=[Tag(name="OpenAI")], abp_responses=_ERRORS)


@api.post("/v1/chat/completions")
def chat_completions(body: ChatBody) -> Response:
    """Continue a conversation."""
    here = service()
    here.check_model(body.model)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    orders = chat_orders(here, body, request_id)
    in_reasoning = ends_in_think(here.tokenizer, orders[0].generate.prompt)
    choices = ChatChoices(request_id, here.model.name, here.tokenizer, body, in_reasoning=in_reasoning)
    return answer(here, orders, OpenAIDialect(choices, body), stream=body.stream)


@api.post("/v1/completions")
def completions(body: CompletionBody) -> Response:
    """Continue a text, or token ids."""
    here = service()
    here.check_model(body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    orders = completion_orders(here, body, request_id)
    choices = CompletionChoices(request_id, here.model.name, here.tokenizer, body)
    return answer(here, orders, OpenAIDialect(choices, body), stream=body.stream)


@api.post("/tokenize")
def tokenize(body: TokenizeBody) -> Response:
    """Text or messages as token ids, as the other routes would read them."""
    here = service()
    here.check_model(body.model)
    if body.messages is not None:
        variables = {"add_generation_prompt": body.add_generation_prompt, **body.chat_template_kwargs}
        ids = chat_prompt(here, body.messages, body.tools, variables)
    else:
        field, text = ("prompt", body.prompt or "") if body.content is None else ("content", body.content)
        ids = here.tokenizer.encode(text, body.add_special, body.parse_special, param=field)
    tokens: list[Any] = [_piece(here.tokenizer, token) for token in ids] if body.with_pieces else ids
    return jsonify({"tokens": tokens, "count": len(ids), "max_model_len": here.model.context})


@api.post("/detokenize")
def detokenize(body: DetokenizeBody) -> Response:
    """Token ids as text."""
    here = service()
    here.check_model(body.model)
    unknown = next((token for token in body.tokens if token >= here.model.vocab), None)
    if unknown is not None:
        raise RequestError(f"token {unknown} is not in the vocabulary, which has 0 to {here.model.vocab - 1}", param="tokens")
    text = here.tokenizer.decode(body.tokens)
    return jsonify({"content": text, "prompt": text})


def _piece(tokenizer: Tokenizer, token: int) -> dict[str, Any]:
    """The token's text, or its bytes where they are no text."""
    raw = tokenizer.token_bytes(token)
    try:
        return {"id": token, "piece": raw.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(raw)}
