"""From the Messages API's conversation to a prompt: its turns as the chat template knows them, and how the answer begins.

    system               ── system
    user: tool_result    ── tool          one each, in front of and behind the text, as they come
    user: text           ── user
    assistant            ── assistant     text; thinking as reasoning_content; tool_use as tool_calls

Turns of one side in a row are one turn, since many templates want both sides to alternate. A last turn of the assistant is where
its answer goes on. A call that the request demands is begun for the model, which then can only finish it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.text.reply import begun_call, ends_in_think
from appliance.web.message_bodies import (
    AssistantBlock,
    CountTokensBody,
    Message,
    TextBlock,
    TextOnly,
    ThinkingBlock,
    Tool,
    ToolResultBlock,
    ToolUseBlock,
    UserBlock,
    blocks_of,
)
from appliance.web.service import Service

_Plain = dict[str, Any]
"""A message as templates know it."""

_BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*(?:\n|\Z)")
"""A line that Claude Code puts in front of its instructions. It changes with every request, so no prefix would ever be reused."""


@dataclass(frozen=True, slots=True)
class MessagePrompt:
    """What the model reads before it answers."""

    ids: list[int]
    begun: str
    """The part of the reply that was written for the model."""
    in_reasoning: bool
    """The reply begins inside `<think>`."""


def message_prompt(service: Service, body: CountTokensBody) -> MessagePrompt:
    """RequestError for what the chat template does not accept."""
    turns = list(_turns(body.messages))
    prefill = _texts(turns.pop().blocks) if turns[-1].role == "assistant" else []
    begun = begun_call(body.tool_choice.name) if body.tool_choice.type in ("tool", "any") else ""
    continuation = "\n".join(prefill) + begun
    variables: _Plain = {"enable_thinking": body.thinking.type != "disabled" and not continuation}
    if body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    messages = [*_system(body.system), *_plain_messages(turns)]
    tools = [] if body.tool_choice.type == "none" else [_function(tool) for tool in body.tools]
    ids = service.template.render_continued(service.tokenizer, messages, tools, continuation, **variables)
    return MessagePrompt(ids, begun, ends_in_think(service.tokenizer, ids))


@dataclass(frozen=True, slots=True)
class _Turn:
    role: str
    blocks: list[UserBlock | AssistantBlock]


def _turns(messages: Sequence[Message]) -> Iterator[_Turn]:
    for role, group in itertools.groupby(messages, key=lambda message: message.role):
        yield _Turn(role, [block for message in group for block in blocks_of(message)])


def _plain_messages(turns: Sequence[_Turn]) -> Iterator[_Plain]:
    names: dict[str, str] = {}
    for turn in turns:
        match turn.role:
            case "assistant":
                names |= {block.id: block.name for block in turn.blocks if isinstance(block, ToolUseBlock)}
                yield _assistant(turn.blocks)
            case "user":
                yield from _user(turn.blocks, names)
            case _:
                yield from _system("\n".join(_texts(turn.blocks)))


def _system(content: TextOnly) -> Iterator[_Plain]:
    """One message, or none if there is nothing to say."""
    blocks = [content] if isinstance(content, str) else [block.text for block in content]
    texts = [text for block in blocks if (text := _BILLING.sub("", block))]
    if texts:
        yield {"role": "system", "content": _parts(texts)}


def _assistant(blocks: Sequence[UserBlock | AssistantBlock]) -> _Plain:
    message: _Plain = {"role": "assistant", "content": _parts(_texts(blocks))}
    if thoughts := [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls := [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]:
        message["tool_calls"] = calls
    return message


def _user(blocks: Sequence[UserBlock | AssistantBlock], names: dict[str, str]) -> Iterator[_Plain]:
    """`names`: of the tools called so far, by the id of the call."""
    for is_result, group in itertools.groupby(blocks, key=lambda block: isinstance(block, ToolResultBlock)):
        if is_result:
            yield from (_result(block, names) for block in group if isinstance(block, ToolResultBlock))
        else:
            yield {"role": "user", "content": _parts(_texts(group))}
    if not blocks:
        yield {"role": "user", "content": ""}


def _result(block: ToolResultBlock, names: dict[str, str]) -> _Plain:
    """Templates have no word for failure, so the text says it."""
    texts = [block.content] if isinstance(block.content, str) else [part.text for part in block.content]
    if block.is_error:
        texts = ["Error: " + "\n".join(texts)]
    return {"role": "tool", "tool_call_id": block.tool_use_id, "name": names[block.tool_use_id], "content": _parts(texts)}


def _call(block: ToolUseBlock) -> _Plain:
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _function(tool: Tool) -> _Plain:
    described = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **described, "parameters": tool.input_schema}}


def _texts(blocks: Iterable[UserBlock | AssistantBlock]) -> list[str]:
    return [block.text for block in blocks if isinstance(block, TextBlock)]


def _parts(texts: Sequence[str]) -> list[_Plain]:
    """The template's side joins them, as it does for the other routes."""
    return [{"type": "text", "text": text} for text in texts]
