"""The one model, as the API that is spoken describes models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from flask import Response, jsonify, request
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from flask_openapi3.types import ResponseDict

from appliance.web.model_info import ModelInfo
from appliance.web.request_api import Api, api_of
from appliance.web.schemas import ErrorBody, ModelPath
from appliance.web.service import service

_ERRORS: ResponseDict = {str(status): ErrorBody for status in (401, 403, 404)}

api = APIBlueprint("models", __name__, abp_tags=[Tag(name="OpenAI")], abp_responses=_ERRORS)


@api.get("/v1/models")
def list_models() -> Response:
    """The one model, in a list: OpenAI's, or Anthropic's if `anthropic-version` was sent."""
    model = service().model
    if api_of(request) is Api.ANTHROPIC:
        return jsonify({"data": [_anthropic_model(model)], "has_more": False, "first_id": model.name, "last_id": model.name})
    return jsonify({"object": "list", "data": [_openai_model(model)]})


@api.get("/v1/models/<path:model_id>")
def get_model(path: ModelPath) -> Response:
    """The model by its name."""
    here = service()
    here.check_model(path.model_id)
    return jsonify(_anthropic_model(here.model) if api_of(request) is Api.ANTHROPIC else _openai_model(here.model))


def _openai_model(model: ModelInfo) -> dict[str, Any]:
    """Clients look for the context length under different names; all of them are here."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "max_model_len": model.context,
        "context_length": model.context,
        "context_window": model.context,
        "meta": {"n_ctx": model.context, "n_vocab": model.vocab, "size": model.file_bytes, "architecture": model.architecture},
    }


def _anthropic_model(model: ModelInfo) -> dict[str, Any]:
    return {
        "type": "model",
        "id": model.name,
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.context,
        "max_tokens": model.context,
    }
