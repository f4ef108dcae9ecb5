"""Request bodies of Anthropic's Messages API.

Its clients send new fields before servers know them, so what is not declared here is ignored, in every object. A field that we know
and that has the wrong type is an error that names it, and so is one of `REFUSED`, which asks for something we cannot do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from appliance.complaints import shown
from appliance.errors import RequestError
from appliance.web.schemas import (
    MAX_STOPS,
    AnswerBody,
    Count,
    ListOf,
    TopK,
    WholeNumber,
    check_demanded_tool,
    check_tools_differ,
    checked_stops,
    refuse,
)

_NO_CONSTRAINTS = "constrained output is not available yet; ask for JSON in the prompt instead"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "mcp_servers": (([],), "this server calls no tools; let the client connect to them"),
    "output_format": ((), _NO_CONSTRAINTS),
}
"""Field to (values that ask for nothing, what to do instead)."""

_NO_TEXT = ("image", "document", "container_upload")


class Part(BaseModel):
    """Base of everything here; null counts as absent."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _one_of(field: str, *values: str) -> BeforeValidator:
    """Says which objects may stand here, where pydantic would name its own classes."""
    words = " or ".join(map(shown, values))

    def check(given: Any) -> Any:
        if not isinstance(given, dict):
            raise PydanticKnownError("dict_type")
        value = given.get(field)
        if value in values:
            return given
        hint = "; this model reads text only" if value in _NO_TEXT else ""
        sentence = f"is missing; it must be {words}" if value is None else f"must be {words}, not {shown(value)}{hint}"
        raise PydanticCustomError("one_of", "{sentence}", {"field": field, "sentence": sentence})

    return BeforeValidator(check)


def _by(field: str) -> Discriminator:
    """Chooses a class by its tag, which has quotes so that it is not taken for a field of the body."""

    def tag(given: Any) -> str:
        return f"'{given[field]}'"

    return Discriminator(tag)


class TextBlock(Part):
    type: Literal["text"]
    text: str


class ThinkingBlock(Part):
    """What the model thought in an earlier answer. Nobody looks at the signature."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Part):
    """From another server, which alone can read it."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Part):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextOnly: TypeAlias = str | ListOf[Annotated[TextBlock, _one_of("type", "text")]]


class ToolResultBlock(Part):
    type: Literal["tool_result"]
    tool_use_id: str
    content: TextOnly = ""
    is_error: bool = False


UserBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("'text'")] | Annotated[ToolResultBlock, Tag("'tool_result'")],
    _by("type"),
    _one_of("type", "text", "tool_result"),
]
AssistantBlock: TypeAlias = Annotated[
    Annotated[TextBlock, Tag("'text'")]
    | Annotated[ThinkingBlock, Tag("'thinking'")]
    | Annotated[RedactedThinkingBlock, Tag("'redacted_thinking'")]
    | Annotated[ToolUseBlock, Tag("'tool_use'")],
    _by("type"),
    _one_of("type", "text", "thinking", "redacted_thinking", "tool_use"),
]


class UserMessage(Part):
    role: Literal["user"]
    content: str | ListOf[UserBlock]


class AssistantMessage(Part):
    role: Literal["assistant"]
    content: str | ListOf[AssistantBlock]


class SystemMessage(Part):
    """Instructions in the middle of a conversation; it depends on the chat template whether it takes them there."""

    role: Literal["system"]
    content: TextOnly


Message: TypeAlias = Annotated[
    Annotated[UserMessage, Tag("'user'")] | Annotated[AssistantMessage, Tag("'assistant'")] | Annotated[SystemMessage, Tag("'system'")],
    _by("role"),
    _one_of("role", "user", "assistant", "system"),
]


def blocks_of(message: Message) -> Sequence[UserBlock | AssistantBlock]:
    """The content of a message, always in blocks."""
    return [TextBlock(type="text", text=message.content)] if isinstance(message.content, str) else message.content


class Tool(Part):
    """A tool of the client. Those that Anthropic runs or has trained its models on have other types and no schema."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _custom(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("type") not in (None, "custom"):
            raise ValueError(f"tools of type {shown(given['type'])} are not available here; send tools with a name and an input_schema")
        return given


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="For `tool`: which one.")
    disable_parallel_tool_use: bool = Field(default=False, description="No more than one call in the answer.")


class Thinking(Part):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Count | None = Field(default=None, description="The thoughts end after so many tokens.")


class OutputConfig(Part):
    effort: str | None = Field(default=None, description="Handed to the chat template as `reasoning_effort`.")
    format: Any = None

    @field_validator("format")
    @classmethod
    def _no_format(cls, value: Any) -> Any:
        refuse("output_config.format", value, (), _NO_CONSTRAINTS)
        return value


class CountTokensBody(Part):
    """`POST /v1/messages/count_tokens`, and what a message has in common with it: all that the model reads."""

    model: str | None = Field(default=None, description="Our model's name, `default`, or nothing.")
    messages: ListOf[Message] = Field(min_length=1)
    system: TextOnly = ""
    tools: ListOf[Tool] = []
    tool_choice: ToolChoice = ToolChoice(type="auto")
    thinking: Thinking = Field(default=Thinking(type="disabled"), description="Left out: none.")
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="before")
    @classmethod
    def _nothing_impossible(cls, given: Any) -> Any:
        for name, (neutral, instead) in REFUSED.items():
            if isinstance(given, dict) and name in given:
                refuse(name, given[name], neutral, instead)
        return given

    @model_validator(mode="after")
    def _together(self) -> CountTokensBody:
        names = [tool.name for tool in self.tools]
        check_tools_differ(names, "name")
        _check_choice(self.tool_choice, names)
        _check_calls(self.messages)
        return self


class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: WholeNumber = Field(ge=0, description="0: the prompt is computed and kept for a later request, nothing is answered.")
    stream: bool = False
    stop_sequences: list[str] = Field(default=[], description=f"Up to {MAX_STOPS} strings that end the answer; they are not part of it.")
    temperature: float | None = Field(default=None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: TopK | None = Field(default=None, description="0 and -1 are off.")
    metadata: dict[str, Any] = Field(default={}, description="Accepted and ignored.")

    @field_validator("stop_sequences", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        return checked_stops(value, "stop_sequences")

    def answer(self) -> AnswerBody:
        """How the answer is chosen, in the words of the other routes."""
        same = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        return AnswerBody.model_validate({"stop": self.stop_sequences, **same})


def _check_choice(choice: ToolChoice, names: Collection[str]) -> None:
    if choice.type in ("tool", "any"):
        check_demanded_tool("tool_choice.name" if choice.type == "tool" else None, choice.name, names)


def _check_calls(messages: list[Message]) -> None:
    """Results need their call in front of them, and calls cannot be the last word."""
    called: set[str] = set()
    for at, message in enumerate(messages):
        for number, block in enumerate(blocks_of(message)):
            if isinstance(block, ToolUseBlock):
                called.add(block.id)
            elif isinstance(block, ToolResultBlock) and block.tool_use_id not in called:
                path = f"messages[{at}].content[{number}].tool_use_id"
                raise RequestError(f"{path}: no message before this one has a tool_use with the id {shown(block.tool_use_id)}", param=path)
    if any(isinstance(block, ToolUseBlock) for block in blocks_of(messages[-1])):
        path = f"messages[{len(messages) - 1}]"
        raise RequestError(f"{path}: the last message calls tools; send what they answered as tool_result behind it", param=path)
