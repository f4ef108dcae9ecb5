"""A conversation as the model wants to read it: the chat template of the model file.

messages ── plain values ── control tokens broken by marks ── template (other process) ── text ── ids
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from appliance.errors import CorruptModelError, RequestError
from appliance.gguf_file import GgufFile
from appliance.gguf_metadata import MetadataReader
from appliance.text.messages import Shape, as_parts, as_plain, map_texts, texts_of
from appliance.text.reply import without_open_think
from appliance.text.template_process import TemplateLimits, TemplateProcess
from appliance.text.tokenizer import Tokenizer

_DEFAULT, _WITH_TOOLS = "default", "tool_use"
_KEYS = {_DEFAULT: "tokenizer.chat_template", _WITH_TOOLS: "tokenizer.chat_template.tool_use"}
_TOKENS_KEY = "tokenizer.ggml.tokens"
_SPECIAL_TOKEN_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",  # GGUF's spelling
    "pad_token": "tokenizer.ggml.padding_token_id",
}
"""Variables of templates, and the keys with their ids."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Used for a file without a template whose vocabulary has ChatML's tokens."""

_PROBE = "e6a1f0c93b"
"""A message that is in no template."""
_PIECE = 1 << 18
"""Characters of a text that are looked at in one go."""


class ChatTemplate:
    """Writes conversations for one model. Thread-safe. Holds a process until it is closed."""

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], limits: TemplateLimits | None = None) -> None:
        """
        Args:
            sources: Templates by name; `default`, and perhaps `tool_use` for conversations with tools. Empty: no chat.
            special_tokens: What templates know as `bos_token`, `eos_token` and so on.
            limits: None: the usual ones.

        Raises CorruptModelError if a template cannot be compiled.
        """
        self._sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._process = TemplateProcess(sources, limits or TemplateLimits()) if sources else None
        # Templates of models that also see pictures may read content in parts only, and leave out plain text.
        self._shape = as_plain if self._shows(as_plain) or not self._shows(as_parts) else as_parts

    @classmethod
    def from_gguf(cls, gguf: GgufFile) -> ChatTemplate:
        """The template of a model file; ChatML if it has none but knows ChatML's tokens. Raises CorruptModelError."""
        reader = MetadataReader(gguf)
        tokens = reader.strings(_TOKENS_KEY) if reader.has(_TOKENS_KEY) else ()
        sources = {name: reader.text(key) for name, key in _KEYS.items() if reader.has(key)}
        if not sources and {"<|im_start|>", "<|im_end|>"} <= set(tokens):
            sources[_DEFAULT] = CHATML
        special_tokens = {
            name: tokens[reader.integer(key, 0, len(tokens) - 1)] for name, key in _SPECIAL_TOKEN_KEYS.items() if reader.has(key)
        }
        try:
            return cls(sources, special_tokens)
        except CorruptModelError as error:
            raise reader.error(error.message) from None

    @property
    def available(self) -> bool:
        """Whether this model can chat at all."""
        return self._process is not None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """The conversation as text.

        Args:
            messages: OpenAI's chat messages, as plain JSON values.
            tools: OpenAI's tool definitions.
            add_generation_prompt: End with the beginning of the model's answer.
            kwargs: Further variables of the template, such as `enable_thinking`.

        Raises RequestError if there is no template, or it refuses the conversation, or breaks a limit.
        """
        return self._run(self._variables(messages, tools, add_generation_prompt, kwargs))

    def render_to_ids(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> list[int]:
        """The conversation as token ids. Control tokens come from the template alone: spelled out in a message they are text.

        Takes and raises what `render` does. `docs/tokenizers.md` says how it works and where its limits are.
        """
        return self._to_ids(tokenizer, self._variables(messages, tools, add_generation_prompt, kwargs), "")

    def render_continued(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        continuation: str,
        /,
        **kwargs: object,
    ) -> list[int]:
        """Like `render_to_ids`, with the first words of the model's answer behind it.

        Such an answer has no reasoning: where the template has opened it, it is closed. Without words nothing is changed.
        """
        return self._to_ids(tokenizer, self._variables(messages, tools, True, kwargs), continuation)

    def close(self) -> None:
        """Ends the template's process. Idempotent."""
        if self._process is not None:
            self._process.close()

    def _to_ids(self, tokenizer: Tokenizer, variables: Mapping[str, object], continuation: str) -> list[int]:
        mark = self._unused_character({**variables, "": continuation})
        protected = {name: map_texts(value, lambda text: tokenizer.protect(text, mark)) for name, value in variables.items()}
        text = self._run(protected)
        if continuation:
            text = without_open_think(text) + tokenizer.protect(continuation, mark)
        return tokenizer.encode_marked(text, mark)

    def _variables(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        extra: Mapping[str, object],
    ) -> dict[str, object]:
        """What the template gets from the client."""
        return {
            **extra,
            "messages": [self._shape(message, f"messages[{at}]") for at, message in enumerate(messages)],
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def _run(self, variables: Mapping[str, object]) -> str:
        if self._process is None:
            raise RequestError("the model file has no chat template, so this model cannot chat; use /v1/completions", param="messages")
        name = _WITH_TOOLS if _WITH_TOOLS in self._sources and (variables["tools"] or _DEFAULT not in self._sources) else _DEFAULT
        return self._process.render(name, {**self._special_tokens, **variables})

    def _unused_character(self, variables: Mapping[str, object]) -> str:
        """A private-use character that neither the client's values nor the templates contain."""
        used = set[str]().union(*self._sources.values())
        for text in texts_of(variables):
            if not text.isascii():
                for start in range(0, len(text), _PIECE):  # in one go, others would wait for it
                    used.update(text[start : start + _PIECE])
        candidates = itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE))
        mark = next((character for character in map(chr, candidates) if character not in used), None)
        if mark is None:
            raise RequestError("the messages contain every private-use character of Unicode; leave one out", param="messages")
        return mark

    def _shows(self, shape: Shape) -> bool:
        """Whether a message in that shape comes out of the template with its text."""
        message = shape({"role": "user", "content": _PROBE}, "messages[0]")
        try:
            return _PROBE in self._run({"messages": [message], "tools": None, "add_generation_prompt": True})
        except RequestError:
            return False
