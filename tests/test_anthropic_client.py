"""The Messages API and its errors with the real `anthropic` client, over a real server with fake engines."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.web.message_bodies import REFUSED, MessagesBody
from tests.fakes_web import CALL, CONTEXT, END_OF_CALL, IM_END, MODEL, THOUGHT, FakeServer, running_server, write_vocabulary

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look_up", "description": "Finds a word.", "input_schema": {"type": "object", "properties": {"word": {"type": "string"}}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """Its engines answer abcdefghijabcdefghij... at temperature 0."""
    folder = tmp_path_factory.mktemp("server")
    answer = ",".join(str(ord(letter)) for letter in "abcdefghij")
    with running_server(write_vocabulary(folder / "v.gguf"), engine=f"--answer {answer}", max_body_bytes=100_000) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    """Its engine thinks, says ok, and calls the tool."""
    folder = tmp_path_factory.mktemp("thinker")
    answer = f"{THOUGHT},{ord('o')},{ord('k')},{CALL},{IM_END}"
    with running_server(write_vocabulary(folder / "v.gguf"), lanes=1, engine=f"--answer {answer}") as running:
        running.wait_until_ready()
        yield running


def client_of(server: FakeServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30)


@pytest.fixture
def client(server: FakeServer) -> Iterator[anthropic.Anthropic]:
    with client_of(server) as made:
        yield made


@pytest.fixture
def thinking_client(thinker: FakeServer) -> Iterator[anthropic.Anthropic]:
    with client_of(thinker) as made:
        yield made


def asked(**options: object) -> Any:
    """The arguments of a request; temperature is not in every client any more."""
    return {"model": MODEL, "messages": HI, "max_tokens": 12, "extra_body": {"temperature": 0}, **options}


def ask(client: anthropic.Anthropic, **options: object) -> Any:
    return client.messages.create(**asked(**options))


def refused(client: anthropic.Anthropic, **options: object) -> anthropic.BadRequestError:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(client, **options)
    return caught.value


def param_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return str(body["error"]["details"]["param"])


def test_a_message_has_text_stop_reason_and_usage(client: anthropic.Anthropic) -> None:
    message = ask(client)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "abcdefghijab")]
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert message.usage.output_tokens == 12
    assert message.usage.cache_creation_input_tokens == 0


def test_the_prefix_that_was_reused_is_no_fresh_input(client: anthropic.Anthropic) -> None:
    messages: list[Any] = [{"role": "user", "content": "a story of some length, please, " * 4}]
    first = ask(client, messages=messages, max_tokens=5)
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "more"}]
    second = ask(client, messages=messages)
    length = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == length
    assert second.usage.cache_read_input_tokens >= first.usage.input_tokens


@pytest.mark.parametrize("name", ["default", MODEL])
def test_the_models_own_name_is_in_the_message(client: anthropic.Anthropic, name: str) -> None:
    assert ask(client, model=name).model == MODEL


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_across_tokens_ends_the_answer_and_is_named(client: anthropic.Anthropic, stream: bool) -> None:
    options = {"stop_sequences": ["zz", "efg"], "max_tokens": 500}
    if stream:
        with client.messages.stream(**asked(**options)) as events:
            message = events.get_final_message()
    else:
        message = ask(client, **options)
    assert message.content[0].text == "abcd"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "efg")


def test_a_stream_has_the_events_in_order(client: anthropic.Anthropic) -> None:
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert "".join(event.delta.text for event in events[2:-3]) == "abcdefghijab"
    begun, ended = events[0].message, events[-2]
    assert (begun.content, begun.stop_reason, begun.usage.output_tokens) == ([], None, 0)
    assert (ended.delta.stop_reason, ended.usage.output_tokens) == ("max_tokens", 12)
    assert begun.usage.input_tokens == ended.usage.input_tokens + ended.usage.cache_read_input_tokens


def test_streamed_and_whole_messages_are_the_same(thinking_client: anthropic.Anthropic) -> None:
    whole = ask(thinking_client, tools=[TOOL])
    with thinking_client.messages.stream(**asked(tools=[TOOL])) as events:
        streamed = events.get_final_message()
    for message in (whole, streamed):
        thinking, text, call = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "which word?")
        assert thinking.signature
        assert (text.type, text.text) == ("text", "ok")
        assert (call.type, call.name, call.input) == ("tool_use", "look_up", {"word": "tandem"})
        assert call.id.startswith("toolu_")
        assert message.stop_reason == "tool_use"
        assert message.usage.output_tokens == 5


def test_a_tool_loop_goes_round(thinking_client: anthropic.Anthropic) -> None:
    first = ask(thinking_client, tools=[TOOL])
    result = {"type": "tool_result", "tool_use_id": first.content[-1].id, "content": "a bicycle for two"}
    messages = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert ask(thinking_client, messages=messages, tools=[TOOL]).stop_reason == "tool_use"


def test_a_call_is_text_where_no_tool_may_be_used(thinking_client: anthropic.Anthropic) -> None:
    message = ask(thinking_client, tools=[TOOL], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert message.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_demanded_is_begun_for_the_model(tmp_path_factory: pytest.TempPathFactory, stream: bool) -> None:
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("demanded") / "v.gguf")
    options: Any = asked(tools=[TOOL], tool_choice={"type": "tool", "name": "look_up"})
    with running_server(vocabulary, lanes=1, engine=f"--answer {END_OF_CALL},{IM_END}") as server, client_of(server) as client:
        server.wait_until_ready()
        if stream:
            with client.messages.stream(**options) as events:
                message = events.get_final_message()
        else:
            message = client.messages.create(**options)
        (call,) = message.content
        assert (call.type, call.name, call.input) == ("tool_use", "look_up", {"word": "bicycle"})
        assert message.stop_reason == "tool_use"


def test_only_one_call_is_made_if_only_one_is_wanted(tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("parallel") / "v.gguf")
    with running_server(vocabulary, lanes=1, engine=f"--answer {CALL}") as server, client_of(server) as client:
        server.wait_until_ready()
        many = ask(client, tools=[TOOL], max_tokens=3)
        one = ask(client, tools=[TOOL], max_tokens=3, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert (len(many.content), many.stop_reason) == (3, "max_tokens")
    assert (len(one.content), one.stop_reason) == (1, "tool_use")


def test_max_tokens_zero_computes_the_prompt_for_the_next_request(client: anthropic.Anthropic) -> None:
    messages = [{"role": "user", "content": "to be used again, " * 5}]
    first = ask(client, messages=messages, max_tokens=0)
    assert (first.content, first.usage.output_tokens) == ([], 0)
    second = ask(client, messages=messages)
    assert second.usage.input_tokens == 1


def test_an_answer_longer_than_the_context_ends_with_max_tokens(client: anthropic.Anthropic) -> None:
    length = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": ""}]).input_tokens
    messages = [{"role": "user", "content": "a" * (CONTEXT - length - 3)}]
    with client.messages.stream(**asked(messages=messages, max_tokens=1_000_000)) as events:
        message = events.get_final_message()
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 3)


def test_a_prompt_over_the_context_says_both_numbers(client: anthropic.Anthropic) -> None:
    error = refused(client, messages=[{"role": "user", "content": "a" * 5000}])
    assert error.error_code == "context_length_exceeded"
    assert "4096" in error.message
    assert client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "a" * 5000}]).input_tokens > 5000


def test_an_answer_goes_on_from_the_last_message(client: anthropic.Anthropic) -> None:
    message = ask(client, messages=[*HI, {"role": "assistant", "content": "abc"}])
    assert message.content[0].text == "defghijabcde"


def test_sampling_is_obeyed(client: anthropic.Anthropic) -> None:
    message = ask(client, max_tokens=6, extra_body={"temperature": 50, "top_k": 1, "top_p": 1})
    assert message.content[0].text == "abcdef"


def test_fields_that_are_new_or_change_nothing_are_ignored(client: anthropic.Anthropic) -> None:
    extra = {"temperature": 0, "new_field": 1, "context_management": {"edits": []}, "mcp_servers": []}
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    tool = {**TOOL, "type": "custom", "strict": False, "eager_input_streaming": True}
    options = {"system": system, "tools": [tool], "metadata": {"user_id": "u"}, "service_tier": "auto"}
    assert ask(client, **options, extra_body=extra, extra_headers={"anthropic-beta": "a-1,b-2"}).content
    assert client.beta.messages.create(**asked(**options, betas=["context-1m"])).content


def test_models_are_described_in_the_clients_words(client: anthropic.Anthropic, server: FakeServer) -> None:
    (model,) = client.models.list().data
    assert (model.type, model.id, model.max_input_tokens) == ("model", MODEL, CONTEXT)
    assert model.created_at.year == 2023
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other/model")
    assert httpx2.get(f"{server.url}/v1/models").json()["object"] == "list"


def test_another_model_is_404(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="another-model")
    assert (caught.value.type, caught.value.error_code) == ("not_found_error", "model_not_found")
    assert MODEL in caught.value.message


def test_every_request_has_a_name(client: anthropic.Anthropic) -> None:
    assert (ask(client)._request_id or "").startswith("req_")
    error = refused(client, max_tokens=-1)
    body: Any = error.body
    assert error.request_id == body["request_id"]
    assert error.request_id.startswith("req_")


def test_routes_and_methods_that_do_not_exist_have_the_error_shape(client: anthropic.Anthropic, server: FakeServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.batches.list()
    assert (missing.value.type, missing.value.error_code) == ("not_found_error", "route_not_found")
    answer = httpx2.get(f"{server.url}/v1/messages")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "not_found_error")
    assert "POST" in answer.headers["Allow"]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "thinking"}]}]}, "messages[1].content[0].thinking"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]}, "messages[1]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": list("abcdefghijklmnopq")}, "stop_sequences"),
        ({"metadata": 3}, "metadata"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "much"}}, "thinking.budget_tokens"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers"),
        ({"extra_body": {"output_config": {"format": {"type": "json_schema", "schema": {}}}}}, "output_config.format"),
    ],
)
def test_what_cannot_be_done_is_400_and_names_the_field(client: anthropic.Anthropic, options: dict[str, object], param: str) -> None:
    error = refused(client, **options)
    assert error.type == "invalid_request_error"
    assert param_of(error) == param
    assert param in error.message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "image"])},
    optional=dict.fromkeys(("text", "thinking", "id", "name", "input", "tool_use_id", "content", "is_error"), JSON),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text() | st.lists(BLOCK, max_size=4)}
)
FUZZED = sorted(MessagesBody.model_fields.keys() | REFUSED.keys())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.sampled_from(["messages", "messages/count_tokens"]),
    fields=st.dictionaries(st.sampled_from(FUZZED), JSON, max_size=3),
    messages=st.lists(MESSAGE, min_size=1, max_size=4),
)
def test_no_body_is_a_server_error(server: FakeServer, path: str, fields: dict[str, object], messages: list[object]) -> None:
    body = {"messages": messages, **fields, "max_tokens": 1}
    answer = httpx2.post(f"{server.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code in (200, 400, 404)
    if answer.status_code != 200:
        assert set(answer.json()) == {"type", "error", "request_id"}
        assert set(answer.json()["error"]) == {"type", "message", "details"}


def test_the_description_has_the_routes(server: FakeServer) -> None:
    description = httpx2.get(f"{server.url}/openapi").json()
    assert {"/v1/messages", "/v1/messages/count_tokens"} <= description["paths"].keys()
    assert {"MessagesBody", "ToolResultBlock", "AnthropicErrorBody"} <= description["components"]["schemas"].keys()


def test_an_engine_that_fails_in_an_answer_ends_the_stream_with_an_error_event(tmp_path_factory: pytest.TempPathFactory) -> None:
    vocabulary = write_vocabulary(tmp_path_factory.mktemp("failing") / "v.gguf")
    with running_server(vocabulary, lanes=1, engine="--answer 97,98,99 --fail-at 40") as server, client_of(server) as client:
        server.wait_until_ready()
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(ask(client, stream=True, max_tokens=100))
        assert (caught.value.type, caught.value.error_code) == ("api_error", "engine_error")
        deadline = time.monotonic() + 60
        body = {"messages": HI, "max_tokens": 100, "stream": True}
        while (answer := httpx2.post(f"{server.url}/v1/messages", json=body, timeout=60)).status_code == 503:  # the engine starts again
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert json.loads(answer.text.rsplit("data: ", 1)[1])["type"] == "error"
