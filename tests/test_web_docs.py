"""docs/api.md and docs/errors.md against the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from flask import Flask

from appliance import errors
from appliance.desk.config import DeskConfig, LaneConfig
from appliance.desk.desk import Desk
from appliance.gguf_file import open_gguf
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web.app import create_app
from appliance.web.errors import error_from_event, rule_for
from appliance.web.message_bodies import MessagesBody
from appliance.web.model_info import ModelInfo, SamplingDefaults
from appliance.web.schemas import HARMLESS, REFUSED, ChatBody, CompletionBody
from tests.fakes_web import write_vocabulary

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    gguf = open_gguf(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf"))
    template = ChatTemplate.from_gguf(gguf)
    desk = Desk(DeskConfig(lanes=(LaneConfig("lead", "host:0", ("true",)),), loader_argv=("true",)))
    yield create_app(Settings(), desk, Tokenizer.from_gguf(gguf), template, ModelInfo(name="m", context=512, vocab=320, lanes=1, created=0))
    template.close()


def table_rows(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


def all_errors() -> list[type[errors.TandemError]]:
    found = [errors.TandemError]
    for kind in found:
        found.extend(kind.__subclasses__())
    return found


def test_the_api_page_lists_exactly_the_routes(application: Flask) -> None:
    written = {(row[0], row[1].strip("`")) for row in table_rows("api.md") if row[0] in ("GET", "POST")}
    real = {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in application.url_map.iter_rules()
        for method in (rule.methods or set()) & {"GET", "POST", "PUT", "DELETE", "PATCH"}
    }
    assert written == real


def test_the_errors_page_lists_exactly_the_codes() -> None:
    written = {row[0].strip("`") for row in table_rows("errors.md") if row[0].startswith("`")}
    assert written == {kind.code for kind in all_errors()}


def test_the_errors_page_has_the_right_status_of_each_code() -> None:
    statuses = {row[0].strip("`"): row[1] for row in table_rows("errors.md") if len(row) == 5 and row[0].startswith("`")}
    for kind in all_errors():
        if kind.code in statuses:
            assert str(rule_for(kind("x")).status) in statuses[kind.code]


def test_the_errors_page_has_the_right_type_of_each_code_for_messages() -> None:
    types = {row[0].strip("`"): row[2] for row in table_rows("errors.md") if len(row) == 5 and row[0].startswith("`")}
    for kind in all_errors():
        if kind.code in types:
            rule = rule_for(kind("x"))
            assert types[kind.code] == f"`{rule.anthropic_type}`" + (f" ({rule.anthropic_status})" if rule.anthropic_status else "")


@pytest.mark.parametrize("body", [ChatBody, CompletionBody, MessagesBody])
def test_the_api_page_names_every_field(body: type[ChatBody | CompletionBody | MessagesBody]) -> None:
    text = (DOCS / "api.md").read_text()
    assert not [name for name in body.model_fields if f"`{name}`" not in text]


def test_no_field_is_both_obeyed_and_ignored_or_refused() -> None:
    obeyed = set(ChatBody.model_fields) | set(CompletionBody.model_fields)
    assert not HARMLESS & obeyed
    assert not HARMLESS & REFUSED.keys()
    assert not REFUSED.keys() & obeyed


def test_every_code_comes_back_from_an_event_as_its_own_class() -> None:
    for kind in all_errors():
        error = error_from_event(kind.code, "why")
        assert error.code == kind.code
        assert error.message == "why"
    assert isinstance(error_from_event("never heard of", None), errors.EngineError)


def test_a_models_recommended_sampling_is_the_default() -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.min_p": "wrong type"}
    assert SamplingDefaults.from_metadata(metadata) == SamplingDefaults(temperature=0.6, top_k=20)
    assert SamplingDefaults.from_metadata({}) == SamplingDefaults(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
