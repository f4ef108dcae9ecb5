"""Anthropic's Messages API, which coding agents speak: the model of the other routes behind another shape."""

from __future__ import annotations

import uuid

from flask import Response, jsonify
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from flask_openapi3.types import ResponseDict
from pydantic import BaseModel

from appliance.web.answering import answer
from appliance.web.message_blocks import MessageBlocks
from appliance.web.message_bodies import CountTokensBody, MessagesBody
from appliance.web.message_dialect import MessageDialect
from appliance.web.message_prompt import message_prompt
from appliance.web.orders import message_orders
from appliance.web.request_api import request_id
from appliance.web.service import service


class AnthropicErrorDetails(BaseModel):
    error_code: str
    param: str | None


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(BaseModel):
    """Every error of these routes, and of the `error` event in a stream."""

    type: str
    error: AnthropicErrorDetail
    request_id: str


_ERRORS: ResponseDict = {str(status): AnthropicErrorBody for status in (400, 401, 403, 404, 413, 415, 500, 503, 529)}

api = APIBlueprint("anthropic", __name__, abp_tags=[Tag(name="Anthropic")], abp_responses=_ERRORS)


@api.post("/v1/messages")
def create_message(body: MessagesBody) -> Response:
    """Continue a conversation."""
    here = service()
    here.check_model(body.model)
    message_id = f"msg_{uuid.uuid4().hex}"
    prompt = message_prompt(here, body)
    orders = message_orders(here, body, prompt, message_id)
    choice = body.tool_choice
    tools = bool(body.tools) and choice.type != "none"
    blocks = MessageBlocks(tools=tools, one_call=choice.disable_parallel_tool_use, in_reasoning=prompt.in_reasoning)
    blocks.feed(prompt.begun)
    dialect = MessageDialect(message_id, here.model.name, blocks, request_id=request_id())
    return answer(here, orders, dialect, stream=body.stream)


@api.post("/v1/messages/count_tokens")
def count_tokens(body: CountTokensBody) -> Response:
    """How long the prompt of a message would be."""
    here = service()
    here.check_model(body.model)
    return jsonify({"input_tokens": len(message_prompt(here, body).ids)})
