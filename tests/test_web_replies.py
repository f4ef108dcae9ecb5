"""Replies with reasoning and tool calls, in the shapes that the openai client's own types accept."""

from __future__ import annotations

import json

import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.chat.chat_completion_chunk import ChoiceDelta

from appliance.web.replies import Reply

RAW = '<think>\nwhich word?\n</think>\n\nLooking.\n<tool_call>\n{"name": "look_up", "arguments": {"word": "tandem"}}\n</tool_call>'


def fed(reply: Reply, text: str, step: int) -> list[ChoiceDelta]:
    deltas = [delta for at in range(0, len(text), step) for delta in reply.feed(text[at : at + step])]
    return [ChoiceDelta.model_validate(delta, strict=True) for delta in [*deltas, *reply.finish()]]


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_reply_is_split_the_same_however_it_arrives(step: int) -> None:
    reply = Reply(tools=True, in_reasoning=False)
    deltas = fed(reply, RAW, step)
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "which word?"
    assert "".join(delta.content or "" for delta in deltas) == "Looking."
    (call,) = [call for delta in deltas for call in delta.tool_calls or []]
    assert call.function is not None
    assert call.function.name == "look_up"
    assert json.loads(call.function.arguments or "") == {"word": "tandem"}
    assert reply.has_tool_calls


def test_the_whole_message_has_the_same_parts() -> None:
    reply = Reply(tools=True, in_reasoning=False)
    fed(reply, RAW, 5)
    message = ChatCompletionMessage.model_validate(reply.message())
    assert message.content == "Looking."
    assert (message.model_extra or {})["reasoning_content"] == "which word?"
    assert message.tool_calls is not None
    assert len(message.tool_calls) == 1


def test_content_is_null_beside_nothing_but_tool_calls() -> None:
    reply = Reply(tools=True, in_reasoning=False)
    fed(reply, RAW[RAW.index("<tool_call>") :], 9)
    assert reply.message()["content"] is None


def test_without_tools_a_call_stays_text() -> None:
    reply = Reply(tools=False, in_reasoning=False)
    text = RAW[RAW.index("Looking") :]
    fed(reply, text, 4)
    assert reply.message() == {"role": "assistant", "content": text, "refusal": None}


def test_a_reply_that_begins_inside_think_is_reasoning_first() -> None:
    reply = Reply(tools=False, in_reasoning=True)
    fed(reply, "because\n</think>\n\nyes", 3)
    assert reply.message()["reasoning_content"] == "because"
    assert reply.message()["content"] == "yes"
