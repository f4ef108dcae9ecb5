"""Request bodies that are no JSON, or no request: one sentence of our own, which names the place or the field. Without a server."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from collections.abc import Callable, Iterator
from io import BytesIO
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from werkzeug.test import Client, EnvironBuilder

from appliance.desk.config import DeskConfig, LaneConfig
from appliance.desk.desk import Desk
from appliance.errors import RequestError
from appliance.gguf_file import open_gguf
from appliance.json_depth import MAX_DEPTH
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web.app import create_app
from appliance.web.json_body import MAX_VALUES, parse_json
from appliance.web.message_bodies import MessagesBody
from appliance.web.model_info import ModelInfo
from appliance.web.schemas import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.fakes_web import write_vocabulary

ROUTES = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
MESSAGES = ["/v1/messages", "/v1/messages/count_tokens"]
LIMIT = 65536
CONTEXT = 512


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Of an application over a desk that was never started: a good request for an answer is 503."""
    gguf = open_gguf(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"))
    tokenizer, template = Tokenizer.from_gguf(gguf, CONTEXT), ChatTemplate.from_gguf(gguf)
    desk = Desk(DeskConfig(lanes=(LaneConfig("lead", "host:0", ("true",)),), loader_argv=("true",)))
    info = ModelInfo(name="m", context=CONTEXT, vocab=320, lanes=1, created=0)
    app = create_app(Settings.model_validate({"max_body_bytes": LIMIT}), desk, tokenizer, template, info)
    yield app.test_client()
    template.close()


def error_of(answer: Any) -> dict[str, Any]:
    assert set(answer.get_json()) == {"error"}
    error: dict[str, Any] = answer.get_json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def refused(client: Client, route: str, body: dict[str, object]) -> dict[str, Any]:
    answer = client.post(route, json=body)
    assert answer.status_code == 400
    return error_of(answer)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b"{", "the body is not valid JSON: .* at line 1 column 2"),
        (b'{\n  "a": NaN}', "the body is not valid JSON: .* at line 2 column 8"),
        (b'{"a": 1,}', "the body is not valid JSON: .* at line 1 column 8"),
        (b"[" * LIMIT, "the body is not valid JSON: .*depth.* at line 1 column 10.."),
        (b'{"a": "\xff"}', "the body is not UTF-8: byte 0xff at line 1 column 8"),
        ('{\n"ä": "'.encode() + b"\xed\xa0\x80", "the body is not UTF-8: byte 0xed at line 2 column 7"),
        (b'{"a": "\\ud83d", x}', "the body is not valid JSON: .* at line 1 column 17"),
        (b'{"a": "\\ud8zz"}', "the body is not valid JSON: .* at line 1"),
        (b"[1]", "the body must be a JSON object, not an array"),
        (b'"{}"', "the body must be a JSON object, not a string"),
        (b"null", "the body must be a JSON object, not null"),
    ],
)
def test_a_body_that_is_no_json_object_is_told_what_is_wrong_and_where(client: Client, route: str, body: bytes, sentence: str) -> None:
    answer = client.post(route, data=body, content_type="application/json")
    assert answer.status_code == 400
    error = error_of(answer)
    assert (error["code"], error["param"]) == ("invalid_request", None)
    assert re.match(sentence, error["message"]), error["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("media_type", ["text/plain", ""])
def test_a_body_that_is_not_announced_as_json_is_415(client: Client, route: str, media_type: str) -> None:
    answer = client.post(route, data=b"{}", content_type=media_type)
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_media_type"


def of_unknown_length(client: Client, body: bytes) -> Any:
    """A POST whose length the server is not told, as with chunks."""
    environ = EnvironBuilder("/tokenize", method="POST", content_type="application/json").get_environ()
    environ.pop("CONTENT_LENGTH", None)
    return client.open({**environ, "wsgi.input": BytesIO(body), "wsgi.input_terminated": True})


@pytest.mark.parametrize(("length", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (40 * LIMIT, 413)])
def test_the_limit_of_bodies_is_the_same_with_and_without_a_known_length(client: Client, length: int, status: int) -> None:
    body = b'{"content": "x"}'.ljust(length)
    for answer in (client.post("/tokenize", data=body, content_type="application/json"), of_unknown_length(client, body)):
        assert answer.status_code == status
        if status == 413:
            assert error_of(answer)["code"] == "payload_too_large"
            assert str(LIMIT) in error_of(answer)["message"]


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"a\ud83d", "a\ufffd"),
        (r"\ude00b", "\ufffdb"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\uD83D\uDE00", "\U0001f600"),
        (r"\ud83d \\ud83d", "\ufffd \\ud83d"),
        (r"\\\udbff", "\\\ufffd"),
    ],
)
def test_half_an_emoji_is_read_as_a_replacement_character(escaped: str, text: str) -> None:
    assert parse_json(f'{{"{escaped}": ["{escaped}"]}}'.encode()) == {text: [text]}


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from('\ud83d\ude00\\"u')))
def test_every_text_that_python_escapes_is_read_with_its_lone_surrogates_replaced(text: str) -> None:
    pairs_joined = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    assert parse_json(json.dumps({"text": text}).encode()) == {"text": pairs_joined}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'),
        ("/v1/chat/completions", r'{"messages": [{"role": "user", "content": "x"}], "stop": ["\ude00"]}'),
        ("/v1/completions", r'{"prompt": "cut \ud83d"}'),
        ("/v1/completions", r'{"prompt": ["cut \ud83d", "y"]}'),
    ],
)
def test_half_an_emoji_is_no_reason_to_refuse_a_request(client: Client, route: str, body: str) -> None:
    answer = client.post(route, data=body, content_type="application/json")
    assert error_of(answer)["code"] == "not_ready"


def test_tokenize_reads_half_an_emoji_as_the_replacement_character(client: Client) -> None:
    half = client.post("/tokenize", data=r'{"content": "\ud83d"}', content_type="application/json").get_json()
    assert half == client.post("/tokenize", json={"content": "\ufffd"}).get_json()


@pytest.mark.parametrize("route", MESSAGES)
@pytest.mark.parametrize(
    ("body", "media_type", "status", "kind"),
    [
        (b"", "application/json", 400, "invalid_request_error"),
        (b"{", "application/json", 400, "invalid_request_error"),
        (b"[1]", "application/json", 400, "invalid_request_error"),
        (b"{}", "text/plain", 415, "invalid_request_error"),
        (b" " * (LIMIT + 1), "application/json", 413, "request_too_large"),
    ],
)
def test_messages_that_are_no_json_object_are_refused_in_anthropics_shape(
    client: Client, route: str, body: bytes, media_type: str, status: int, kind: str
) -> None:
    answer = client.post(route, data=body, content_type=media_type)
    assert answer.status_code == status
    assert answer.get_json()["error"]["type"] == kind
    assert set(answer.get_json()) == {"type", "error", "request_id"}


def test_messages_while_the_model_loads_are_told_when_to_try_again(client: Client) -> None:
    answer = client.post("/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 5})
    assert (answer.status_code, answer.get_json()["error"]["type"]) == (503, "overloaded_error")
    assert int(answer.headers["Retry-After"]) > 0


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SAID = [{"role": "user", "content": "x"}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
UNREAD = "x" * 50_000
"""It cannot fit, whatever it says."""


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        (TEXT, {"prompt": [5, -1]}, "prompt"),
        (TEXT, {"prompt": [[5], [-1]]}, "prompt"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt"),
        (TEXT, {"prompt": [1.5]}, "prompt"),
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": "x" * CONTEXT}, "prompt"),
        (TEXT, {"prompt": "x", "logit_bias": {"x": 1}}, "logit_bias.x"),
        (TEXT, {"prompt": "x", "logit_bias": {"7": 1000}}, "logit_bias.7"),
        (TEXT, {"prompt": "x", "logit_bias": {"5": 1, "9999": 1}}, "logit_bias.9999"),
        (TEXT, {"prompt": UNREAD}, "prompt"),
        (TEXT, {"prompt": ["x", UNREAD]}, "prompt"),
        (TEXT, {"prompt": "x", "stream_options": 3}, "stream_options"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usege": True}}, "stream_options.include_usege"),
        (TEXT, {"prompt": "x", "stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
        (TEXT, {"prompt": "x", "temperature": "hot"}, "temperature"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": ["x", 3]}]}, "messages[0].content[0]"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [*SAID, {"role": "user", "content": [{"text": "x"}, {"type": "image_url"}]}]}, "messages[1].content[1]"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}, "messages[0].content[0].text"),
        (CHAT, {"messages": SAID, "tools": [1]}, "tools[0]"),
        (CHAT, {"messages": SAID, "tools": [{"type": "function", "function": {"description": "x"}}]}, "tools[0].function.name"),
        (CHAT, {"messages": SAID, "tools": [{"name": "f"}, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        (CHAT, {"messages": SAID, "tools": [{"name": "f"}, {"type": "function", "function": {"name": "f"}}]}, "tools[1].function.name"),
        (CHAT, {"messages": [*SAID, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (CHAT, {"messages": [*SAID, {"role": "assistant", "tool_calls": [{**CALL, "id": None}]}]}, "messages[1].tool_calls[0].id"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [CALL, {**CALL, "function": {}}]}]},
            "messages[0].tool_calls[1].function.name",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "x" * CONTEXT}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": UNREAD}]}, "messages"),
        ("/tokenize", {"messages": [*SAID, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ("/tokenize", {"messages": SAID, "tools": [{}]}, "tools[0].function.name"),
        ("/tokenize", {"content": UNREAD}, "content"),
        ("/tokenize", {"prompt": UNREAD}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
    ],
)
def test_param_names_the_field_as_the_request_has_it(client: Client, route: str, body: dict[str, object], param: str) -> None:
    error = refused(client, route, body)
    assert error["param"] == param
    assert param in error["message"] or error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("max_tokens", "5", "a whole number, not '5'"),
        ("max_tokens", 5.5, "a whole number, not 5.5"),
        ("max_tokens", True, "a whole number, not true"),
        ("max_tokens", -1, "at least"),
        ("stream", "yes", "true or false, not 'yes'"),
        ("stream", 1, "true or false, not 1"),
        ("temperature", "0.5", "a number, not '0.5'"),
        ("temperature", True, "a number, not true"),
        ("temperature", 1000, "at most 100, not 1000"),
        ("top_k", "x" * 1000, f"a whole number, not '{'x' * 50}'"),
        ("model", 5, "a string, not 5"),
        ("model", {"a": 1}, "a string, not an object"),
        ("messages", [], "a list that is not empty, not []"),
        ("messages", [{"role": "user", "content": 3}], "a string or a list, not 3"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_value_of_the_wrong_type_is_refused_with_what_the_field_must_be(
    client: Client, route: str, field: str, value: object, wanted: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5, field: value}
    answer = client.post(route, json=body)
    assert answer.status_code == 400
    assert re.match(rf"{field}(\[0\]\.content)? must be {re.escape(wanted)}", answer.get_json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({}, "messages is missing; send it"),
        ({"messages": [3]}, "messages[0] must be an object, not 3"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role must be 'user' or 'assistant' or 'system', not 'wizard'"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type is missing; it must be 'text' or 'tool_result'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0].type must be 'text' or 'tool_result', not 'image'; this model reads text only",
        ),
        ({"tools": [3]}, "tools[0] must be an object, not 3"),
        (
            {"tools": [{"name": "f", "input_schema": {}}] * 2},
            "tools[1].name: an earlier tool is called 'f' already; give each a name of its own",
        ),
        ({"tool_choice": {"type": "tool"}, "tools": [{"name": "f", "input_schema": {}}]}, "tool_choice.name is missing; name one of them"),
        ({"thinking": {"type": "x"}}, "thinking.type must be 'enabled', 'adaptive', 'between_tools' or 'disabled', not 'x'"),
    ],
)
def test_a_wrong_message_is_told_its_place_in_words_of_the_request(client: Client, body: dict[str, object], sentence: str) -> None:
    base = {"messages": [{"role": "user", "content": "x"}]} if body else {}
    answer = client.post("/v1/messages", json={**base, "max_tokens": 5, **body})
    assert answer.status_code == 400
    assert answer.get_json()["error"]["message"] == sentence


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages"])
def test_a_whole_number_may_have_a_point(client: Client, route: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5.0, "top_k": 3.0}
    assert client.post(route, json=body).status_code == 503
    assert client.post("/detokenize", json={"tokens": [97.0]}).get_json()["content"] == "a"


def test_a_template_may_have_a_variable_of_any_name(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"service": 1, "variables": 2, "begun": 3}}
    assert client.post(CHAT, json=body).status_code == 503


def test_a_part_of_a_message_that_has_no_text_is_not_blamed_for_its_type(client: Client) -> None:
    message = refused(client, CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]})["message"]
    assert message == "messages[0].content[0].text must be a string, not 3"


def test_what_clients_leave_out_of_calls_and_tools_is_not_asked_for(client: Client) -> None:
    call = {"id": "call_1", "function": {"name": "f", "arguments": {"a": 1}}}
    messages = [*SAID, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "x"}]
    assert client.post(CHAT, json={"messages": messages, "tools": [{"name": "f"}]}).status_code == 503


def test_a_message_that_cannot_fit_is_refused_with_its_field_in_anthropics_shape(client: Client) -> None:
    answer = client.post("/v1/messages", json={"messages": [{"role": "user", "content": UNREAD}], "max_tokens": 5})
    assert answer.get_json()["error"]["details"] == {"error_code": "context_length_exceeded", "param": "messages"}


def test_a_token_id_below_zero_is_named(client: Client) -> None:
    assert "-7" in refused(client, TEXT, {"prompt": [5, -7]})["message"]


@pytest.mark.parametrize("prompt", [[], [[]], [[5], []], ""])
def test_an_empty_prompt_is_said_to_be_empty(client: Client, prompt: object) -> None:
    error = refused(client, TEXT, {"prompt": prompt})
    assert error["param"] == "prompt"
    assert "empty" in error["message"]


def many(item: object) -> list[object]:
    return [item] * 200_000


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (DetokenizeBody, {"tokens": many(-1)}),
        (CompletionBody, {"prompt": many("x")}),
        (CompletionBody, {"prompt": many([-1])}),
        (CompletionBody, {"prompt": "x", "stop": many("")}),
        (CompletionBody, {"prompt": "x", "logit_bias": {f"x{number}": 1 for number in range(200_000)}}),
        (ChatBody, {"messages": many({})}),
        (ChatBody, {"messages": [{"role": "user", "content": many(3)}]}),
        (ChatBody, {"messages": [{"role": "assistant", "tool_calls": many(3)}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "x"}], "tools": many(3)}),
        (MessagesBody, {"max_tokens": 1, "messages": many({})}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": many(3)}]}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "system": many(3)}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": many(3)}),
        (MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "stop_sequences": many("")}),
        (TokenizeBody, {"messages": many({})}),
        (TokenizeBody, {"messages": [{"role": "user", "content": "x"}], "tools": many(3)}),
    ],
)
def test_a_body_that_is_wrong_many_times_over_is_given_up_early(schema: type[Body | MessagesBody], body: dict[str, object]) -> None:
    with pytest.raises((ValidationError, RequestError)) as caught:
        schema.model_validate(body)
    complaints = caught.value.error_count() if isinstance(caught.value, ValidationError) else 1
    assert complaints < 10


def test_looking_at_the_depth_of_a_long_text_costs_little() -> None:
    """Nobody else of the process gets a turn meanwhile."""

    def seconds(parse: Callable[[bytes], object]) -> float:
        begin = time.thread_time()
        parse(data)
        return time.thread_time() - begin

    data = json.dumps({"a": '[say "x" {' * 400_000}).encode()
    assert min(seconds(parse_json) for _ in range(3)) < 5 * min(seconds(orjson.loads) for _ in range(3)) + 0.01


def test_a_body_that_ends_early_takes_no_more_memory_than_its_parser_does() -> None:
    data = b'{"a":"' + b"x\\n" * 400_000

    def peak_bytes(parse: Callable[[bytes], object], error: type[Exception]) -> int:
        tracemalloc.start()
        with pytest.raises(error):
            parse(data)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return peak

    assert peak_bytes(parse_json, RequestError) < 1.5 * peak_bytes(orjson.loads, orjson.JSONDecodeError)


def test_a_body_of_too_many_values_is_refused_and_one_of_a_million_token_ids_is_not() -> None:
    assert len(parse_json(b'{"prompt":[' + b"1," * (1 << 20) + b"1]}")["prompt"]) == (1 << 20) + 1
    for many in (b'{"metadata":[' + b"{}," * MAX_VALUES + b"{}]}", b"[" + b"[1]," * (MAX_VALUES // 2) + b"1]"):
        with pytest.raises(RequestError, match=f"more than {MAX_VALUES} values"):
            parse_json(many)


@pytest.mark.parametrize("route", [*ROUTES, *MESSAGES])
def test_a_body_nested_too_deeply_is_refused_before_anybody_walks_it(client: Client, route: str) -> None:
    deep: object = {"x": "]" * 300 + '"{'}
    for _ in range(MAX_DEPTH - 1):
        deep = {"a": deep}
    assert parse_json(json.dumps(deep).encode()) == deep
    answer = client.post(route, json={"tools": deep})
    assert answer.status_code == 400
    assert f"{MAX_DEPTH + 1} levels deep in each other; at most {MAX_DEPTH} are read" in answer.get_json()["error"]["message"]
