"""For those who run the server: probes, metrics, status. All of it is read from the desk's memory and never touches an engine."""

from __future__ import annotations

from dataclasses import asdict
from importlib.metadata import version as package_version

from flask import Flask, Response, jsonify
from flask_openapi3.blueprint import APIBlueprint
from flask_openapi3.models.tag import Tag
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from appliance.desk.status import DeskStatus, Phase
from appliance.errors import NotReadyError
from appliance.web.errors import error_response
from appliance.web.metrics import registry_for
from appliance.web.service import service

ops = APIBlueprint("ops", __name__, abp_tags=[Tag(name="Operations")])


@ops.get("/livez")
def livez() -> Response:
    """200 while a restart would not help; 503 once no lane will ever take requests again."""
    status = service().desk.status()
    if status.phase is Phase.FAILED:
        return _unavailable(status)
    return jsonify({"status": "ok"})


@ops.get("/readyz")
def readyz() -> Response:
    """200 once the lead has come up and while a request gets a lane; otherwise 503 with reason, phase and how far loading is."""
    status = service().desk.status()
    if status.unready_reason is not None:
        return _unavailable(status)
    return jsonify({"status": "ok", "phase": status.phase, "lanes": {lane.name: lane.state for lane in status.lanes}})


@ops.get("/metrics")
def metrics() -> Response:
    """Prometheus text format."""
    here = service()
    return Response(generate_latest(registry_for(here.desk, here.model.name)), content_type=CONTENT_TYPE_LATEST)


@ops.get("/status")
def status() -> Response:
    """Everything the page shows: phase, lanes, line, counters, the model and its plan."""
    here = service()
    model = asdict(here.model)
    plan = model.pop("plan")
    return jsonify({"version": package_version("tandem-appliance"), **here.desk.status().to_json(), "model": model, "plan": plan})


@ops.get("/props")
def props() -> Response:
    """What llama.cpp's clients ask before they talk."""
    model = service().model
    return jsonify(
        {
            "default_generation_settings": {"n_ctx": model.context, "params": asdict(model.sampling)},
            "total_slots": model.lanes,
            "model_alias": model.name,
        }
    )


def install_description(app: Flask, describe: object) -> None:
    """`/openapi`: the API's machine-readable description."""
    app.add_url_rule("/openapi", "ops.openapi", lambda: jsonify(describe))


def _unavailable(status: DeskStatus) -> Response:
    plain = status.to_json()
    reason = status.unready_reason
    response = error_response(NotReadyError(reason or "", retry_after_s=_retry_after_s(status)))
    body = {"status": "unavailable", "phase": status.phase, "reason": reason, "load": plain["load"], **(response.get_json() or {})}
    response.set_data(jsonify(body).get_data())
    return response


def _retry_after_s(status: DeskStatus) -> int:
    left_s = status.load.left_s if status.load else None
    return max(1, min(60, round(left_s))) if left_s is not None else 2
