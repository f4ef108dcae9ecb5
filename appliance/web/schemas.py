"""Request bodies of the OpenAI dialect, with the extensions that other servers have in common.

A field that we know and obey is declared here. A field that OpenAI (or a well-known client) sends and that does not change the
answer is in `HARMLESS` and ignored; one that asks for something we cannot do is in `REFUSED` unless its value asks for
nothing; any other is an error that names it, because a misspelt `temprature` that is silently ignored helps nobody.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator
from pydantic.types import Strict

from appliance.complaints import shown
from appliance.errors import RequestError
from appliance.text.reply import begun_call

MAX_STOPS = 16
MAX_PROMPTS = 16
MAX_TOP_LOGPROBS = 20
MAX_BIASES = 10_000

Item = TypeVar("Item")
ListOf: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is given up at its first wrong item: a complaint about each of millions would cost gigabytes."""

_EXACT = 2**53


def _without_fraction(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT else value


_WHOLE = BeforeValidator(_without_fraction)
"""JSON has one kind of numbers, so 5.0 is 5 (up to where a float knows each whole number)."""
WholeNumber: TypeAlias = Annotated[int, _WHOLE]
Count: TypeAlias = Annotated[int, Field(ge=1), _WHOLE]
TokenId: TypeAlias = Annotated[int, Field(ge=0), _WHOLE]
TopK: TypeAlias = Annotated[int, Field(ge=-1), _WHOLE]
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), _WHOLE]

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
        "parallel_tool_calls", "verbosity", "cache_prompt", "id_slot", "timings_per_token", "return_progress", "session_id", "provider",
        "transforms", "route", "usage", "priority", "request_id", "reasoning_format", "reasoning", "thinking", "length_penalty",
    }
)  # fmt: skip

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), "constrained output is not available yet; ask for JSON in the prompt instead"),
    "suffix": (("",), "text cannot be inserted before a suffix; send the prompt alone"),
    "best_of": ((1,), "answers are not ranked; use n"),
    "echo": ((False,), "the prompt is not repeated in the answer; put it there yourself"),
    "audio": ((), "this model writes text only"),
    "modalities": ((["text"],), "this model writes text only"),
    "functions": (([],), "functions is the old form; send tools"),
    "function_call": (("none", "auto"), "function_call is the old form; send tools"),
    "grammar": (("",), "constrained output is not available yet"),
    "json_schema": (({},), "constrained output is not available yet"),
    "guided_json": ((), "constrained output is not available yet"),
    "guided_regex": ((), "constrained output is not available yet"),
    "guided_choice": ((), "constrained output is not available yet"),
    "guided_grammar": ((), "constrained output is not available yet"),
    "structured_outputs": ((), "constrained output is not available yet"),
    "prompt_logprobs": ((0,), "log-probabilities of the prompt are not computed"),
    "min_tokens": ((0,), "a shortest length is not enforced; use ignore_eos with max_tokens"),
    "stop_token_ids": (([],), "stop by text instead, with stop"),
    "bad_words": (([],), "use logit_bias"),
    "typical_p": ((1, 1.0), "use top_p or min_p"),
    "mirostat": ((0,), "use top_p or min_p"),
    "lora": (([],), "adapters are not supported"),
    "web_search_options": ((), "this server reads no web"),
    "use_beam_search": ((False,), "beams are not available; use n"),
    "early_stopping": ((False,), "beams are not available"),
    "include_stop_str_in_output": ((False,), "a stop string is never part of the answer"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself, with /tokenize"),
    "skip_special_tokens": ((True,), "ask for return_token_ids instead"),
    "spaces_between_special_tokens": ((True,), "ask for return_token_ids instead"),
    "add_special_tokens": ((True,), "send token ids instead"),
}
"""Field to (values that ask for nothing, what to do instead)."""


class Body(BaseModel):
    """Base of all request bodies; null counts as absent."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    path: ClassVar[str] = ""
    """Where it lies in the request's body, with a dot behind."""

    @model_validator(mode="before")
    @classmethod
    def _only_what_we_obey(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        kept = {}
        for name, value in given.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name not in HARMLESS:
                _check_refused(name, value, cls)
        return kept


def refuse(path: str, value: Any, neutral: tuple[Any, ...], instead: str) -> None:
    """RequestError for a field that asks for something we cannot do, unless its value asks for nothing."""
    if value is not None and value not in neutral:
        raise RequestError(f"{path} is not supported: {instead}", param=path)


def checked_stops(value: Any, field: str) -> Any:
    """Stop strings as a list; RequestError for what is none."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestError(f"{field} must be a string or a list of strings, none of them empty", param=field)
    if len(stops) > MAX_STOPS:
        raise RequestError(f"{len(stops)} stop strings were given; at most {MAX_STOPS} are allowed", param=field)
    return stops


def check_demanded_tool(path: str | None, name: str | None, names: Collection[str]) -> None:
    """RequestError unless `name`, or any tool at all where `path` is None, is among those of the request. `path`: of the name."""
    if not names:
        raise RequestError("tool_choice: there are no tools in this request to choose from", param="tool_choice")
    if path is not None and name not in names:
        sentence = f"{path} is missing" if name is None else f"{path}: {shown(name)} is none of the tools of this request"
        raise RequestError(f"{sentence}; name one of them", param=path)


def check_tools_differ(names: Iterable[Any], field: str) -> None:
    """RequestError for a name that an earlier tool has already. `field`: where a tool has its name."""
    seen = set()
    for number, name in enumerate(names):
        if name in seen:
            path = f"tools[{number}].{field}"
            raise RequestError(f"{path}: an earlier tool is called {shown(name)} already; give each a name of its own", param=path)
        seen.add(name)


def _check_refused(name: str, value: Any, body: type[Body]) -> None:
    path = body.path + name
    if name in REFUSED:
        neutral, instead = REFUSED[name]
        refuse(path, value, neutral, instead)
        return
    close = difflib.get_close_matches(name, body.model_fields, n=1)
    hint = f"did you mean {close[0]}?" if close else "leave it out; docs/api.md lists the fields"
    raise RequestError(f"{path} is not a field of this request; {hint}", param=path)


NamedId = Annotated[int, Strict(False)]
"""A name in a JSON object, which is always a string."""
Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(Body):
    path: ClassVar[str] = "stream_options."

    include_usage: bool = Field(False, description="Send one more chunk with the usage at the end.")
    continuous_usage_stats: bool = False
    include_obfuscation: bool = Field(False, description="Accepted and ignored.")

    @field_validator("continuous_usage_stats")
    @classmethod
    def _once(cls, value: bool) -> bool:
        refuse(f"{cls.path}continuous_usage_stats", value, (False,), "the usage is sent once, at the end")
        return value


class AnswerBody(Body):
    """What chat and plain completions have in common. A number left out takes the model's recommended value, else OpenAI's default."""

    model: str | None = Field(None, description="Our model's name, `default`, or nothing.")
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: WholeNumber = Field(1, ge=1, description="Answers to the same prompt; at most one per lane.")
    stop: str | list[str] = Field([], description=f"Up to {MAX_STOPS} strings that end the answer; they are not part of it.")
    max_tokens: Count | None = None
    seed: WholeNumber | None = Field(None, description="The same seed and request give the same answer.")

    temperature: float | None = Field(None, ge=0, le=100, description="0 is greedy.")
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: TopK | None = Field(None, description="Extension. 0 and -1 are off.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension.")
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="Extension.")
    logit_bias: dict[NamedId, Bias] = Field({}, description="Token id to a value added to its logit.")

    ignore_eos: bool = Field(False, description="Extension. Go on past the end of the answer until max_tokens.")
    return_token_ids: bool = Field(False, description="Extension. Add `token_ids` to each choice.")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_BIASES:
            raise RequestError(f"logit_bias has {len(value)} tokens; at most {MAX_BIASES} are allowed", param="logit_bias")
        wrong = next((token for token in value if re.fullmatch("-?[0-9]{1,18}", token) is None), None)
        if wrong is not None:
            raise RequestError(f"logit_bias.{wrong:.50}: the name must be a token id, such as 42", param=f"logit_bias.{wrong:.50}")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        return checked_stops(value, "stop")


class CompletionBody(AnswerBody):
    """`POST /v1/completions`."""

    prompt: str | ListOf[str] | ListOf[TokenId] | ListOf[ListOf[TokenId]] = Field(
        description=f"Text, token ids, or a list of up to {MAX_PROMPTS} of either."
    )
    logprobs: NumLogprobs | None = Field(None, description="Log-probabilities of the chosen token and the N likeliest.")

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        prompts = [value] if _is_ids(value) else value
        if not isinstance(prompts, list) or not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in prompts):
            raise RequestError("prompt must be text, a list of token ids, or a list of either", param="prompt")
        if [] in prompts:
            raise RequestError("prompt is empty; send text or at least one token id", param="prompt")
        if len({isinstance(prompt, str) for prompt in prompts}) != 1:
            raise RequestError("prompt must hold one kind only: a list of texts or a list of lists of token ids", param="prompt")
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(f"{len(prompts)} prompts were given; at most {MAX_PROMPTS} are allowed", param="prompt")
        smallest = 0 if isinstance(prompts[0], str) else min(map(min, prompts))
        if smallest < 0:
            raise RequestError(f"prompt has the token id {smallest}; token ids begin at 0", param="prompt")
        return value

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, always as a list."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(part) is int for part in value)


def _template_variables(value: dict[str, Any]) -> dict[str, Any]:
    for name in value:
        if name in _OWN_VARIABLES or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs cannot set {name!r}; send it as a field of its own if there is one", param="chat_template_kwargs"
            )
    return value


_OWN_VARIABLES = frozenset({"self", "tokenizer", "messages", "tools", "add_generation_prompt"})
TemplateVariables = Annotated[dict[str, Any], AfterValidator(_template_variables)]
"""Variables of the chat template beyond those that the request sets by fields of their own."""


class ChatMessage(BaseModel):
    """One message. Clients send back what servers once added to it (`annotations`, `refusal`, ...), so more fields are allowed."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | ListOf[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: ListOf[dict[str, Any]] | None = None
    tool_call_id: str | None = None


def _checked_messages(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Calls and their results find each other by the call's id, which every client has from us."""
    for at, message in enumerate(messages):
        if message.role == "tool":
            _check_given(f"messages[{at}].tool_call_id", message.tool_call_id)
        for number, call in enumerate(message.tool_calls or []):
            _check_given(f"messages[{at}].tool_calls[{number}].id", call.get("id"))
            _check_given(f"messages[{at}].tool_calls[{number}].function.name", _function_of(call).get("name"))
    return messages


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = [_function_of(tool).get("name") for tool in tools]
    for number, name in enumerate(names):
        _check_given(f"tools[{number}].function.name", name)
    check_tools_differ(names, "function.name")
    return tools


def _check_given(path: str, value: Any) -> None:
    if value is None:
        raise RequestError(f"{path} is missing; send it", param=path)
    if not isinstance(value, str) or not value:
        raise RequestError(f"{path} must be a string that is not empty, not {shown(value)}", param=path)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Some clients leave the wrapping out, as templates do too."""
    function = tool.get("function", tool)
    return function if isinstance(function, dict) else {}


Messages = Annotated[ListOf[ChatMessage], Field(min_length=1), AfterValidator(_checked_messages)]
Tools = Annotated[ListOf[dict[str, Any]], AfterValidator(_checked_tools)]


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    name: str


class FunctionChoice(BaseModel):
    """The tool that the answer has to call."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    type: Literal["function"]
    function: NamedFunction


class ChatBody(AnswerBody):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = Field(None, description="The newer name of max_tokens.")
    logprobs: bool = False
    top_logprobs: NumLogprobs | None = Field(None, description="Needs logprobs.")
    tools: Tools = Field([], description="Shown to the model if its chat template knows tools.")
    tool_choice: Literal["auto", "none", "required"] | FunctionChoice = Field(
        "auto", description="`required`, or a function: the call is begun for the model, which writes the rest."
    )
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")
    chat_template_kwargs: TemplateVariables = Field({}, description="Extension. Handed to the chat template.")
    add_generation_prompt: bool = Field(True, description="Extension.")

    @property
    def begun(self) -> str:
        """How the answer begins if it has to call a tool, else nothing."""
        if isinstance(self.tool_choice, FunctionChoice):
            return begun_call(self.tool_choice.function.name)
        return begun_call(None) if self.tool_choice == "required" else ""

    @model_validator(mode="after")
    def _together(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them", param="max_tokens")
        self._check_choice()
        return self

    def _check_choice(self) -> None:
        if not self.begun:
            return
        if not self.add_generation_prompt:
            raise RequestError(
                "tool_choice: a call cannot be demanded with add_generation_prompt: false; leave that out", param="tool_choice"
            )
        names = [_function_of(tool)["name"] for tool in self.tools]
        if isinstance(self.tool_choice, FunctionChoice):
            check_demanded_tool("tool_choice.function.name", self.tool_choice.function.name, names)
        else:
            check_demanded_tool(None, None, names)


class TokenizeBody(Body):
    """`POST /tokenize`: text, or messages as the chat route would render them."""

    model: str | None = None
    content: str | None = Field(None, description="The text. `prompt` is another name for it.")
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = []
    chat_template_kwargs: TemplateVariables = {}
    add_generation_prompt: bool = True
    add_special: bool = Field(False, description="Add the tokens that the model wants at the beginning.")
    parse_special: bool = Field(True, description="Read `<|im_end|>` and the like as the one token that they name.")
    with_pieces: bool = Field(False, description="Answer with {id, piece} for each token.")

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeBody:
        if sum(source is not None for source in (self.content, self.prompt, self.messages)) != 1:
            raise RequestError("send exactly one of content, prompt and messages", param="content")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: ListOf[TokenId]


class ModelPath(BaseModel):
    model_id: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every error of every route."""

    error: ErrorDetail
