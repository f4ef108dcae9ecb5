"""Chat templates: the text that Hugging Face makes, one form for all messages, and no forged control tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from appliance.errors import CorruptModelError, RequestError
from appliance.gguf_file import open_gguf
from appliance.json_depth import MAX_DEPTH
from appliance.text.chat_template import CHATML, ChatTemplate
from appliance.text.tokenizer import Tokenizer
from tests.chat_templates import CHATML_WITH_TOOLS, CONVERSATIONS, PARTS_ONLY, SIMPLE, STRICT_TURNS, TEMPLATES, TOOLS, TURNS
from tests.gguf_writing import ARRAY, STRING, U32
from tests.text_rig import write_vocabulary

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
Open = Callable[..., ChatTemplate]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens templates and closes them after the test."""
    templates = []

    def open_template(source: str | dict[str, str] | Path) -> ChatTemplate:
        if isinstance(source, Path):
            template = ChatTemplate.from_gguf(open_gguf(source))
        else:
            template = ChatTemplate({"default": source} if isinstance(source, str) else source, SPECIAL)
        templates.append(template)
        return template

    yield open_template
    for template in templates:
        template.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vocabulary(tmp_path_factory.mktemp("model") / "v.gguf", chat_template=(STRING, CHATML_WITH_TOOLS))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(model))


@pytest.fixture(scope="module")
def chatml(model: Path) -> Iterator[ChatTemplate]:
    template = ChatTemplate.from_gguf(open_gguf(model))
    yield template
    template.close()


@pytest.fixture(scope="module")
def hugging_face(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._pairs, **SPECIAL)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_hugging_faces(opened: Open, hugging_face: PreTrainedTokenizerFast, name: str, conversation: str) -> None:
    template, messages = opened(TEMPLATES[name]), CONVERSATIONS[conversation]
    for tools in (None, TOOLS):
        for prompt in (True, False):
            try:
                expected = hugging_face.apply_chat_template(
                    messages, tools, chat_template=TEMPLATES[name], add_generation_prompt=prompt, tokenize=False
                )
            except Exception as error:
                with pytest.raises(RequestError, match=re.escape(str(error))):
                    template.render(messages, tools, prompt)
            else:
                assert template.render(messages, tools, prompt) == expected


def test_further_variables_reach_the_template(chatml: ChatTemplate) -> None:
    assert chatml.render(SIMPLE, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n\n")


def test_the_templates_own_message_is_the_error(opened: Open) -> None:
    with pytest.raises(RequestError, match="does not accept this conversation: Roles must alternate") as refused:
        opened(STRICT_TURNS).render([*SIMPLE, *SIMPLE])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1", "{% for a in b %}", "{{ a | no_such_filter }}", "{% nonsense %}"])
def test_a_template_that_is_no_template_is_refused_at_load(tmp_path: Path, source: str) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", chat_template=(STRING, source))
    with pytest.raises(CorruptModelError, match=r"v\.gguf: the chat template is not valid: "):
        ChatTemplate.from_gguf(open_gguf(path))


def test_a_template_of_another_type_is_refused(tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", chat_template=(U32, 1))
    with pytest.raises(CorruptModelError, match=r"tokenizer\.chat_template is 1"):
        ChatTemplate.from_gguf(open_gguf(path))


def test_without_a_template_a_chatml_vocabulary_gets_chatml(opened: Open, tmp_path: Path) -> None:
    text = opened(write_vocabulary(tmp_path / "v.gguf")).render(TURNS[:1])
    assert text == f"<|im_start|>user\n{TURNS[0]['content']}<|im_end|>\n<|im_start|>assistant\n"


def test_chatml_is_what_hugging_face_makes_of_it(opened: Open, hugging_face: PreTrainedTokenizerFast) -> None:
    expected = hugging_face.apply_chat_template(TURNS, chat_template=CHATML, add_generation_prompt=True, tokenize=False)
    assert opened(CHATML).render(TURNS) == expected


def test_without_template_and_chatml_only_chat_is_refused(opened: Open, tmp_path: Path) -> None:
    path = write_vocabulary(
        tmp_path / "v.gguf", tokens=(ARRAY, (STRING, ["a", "b"])), token_type=None, merges=(ARRAY, (STRING, [])), eos_token_id=(U32, 1),
        bos_token_id=(U32, 0),
    )  # fmt: skip
    template = opened(path)
    assert not template.available
    with pytest.raises(RequestError, match="no chat template"):
        template.render(SIMPLE)


def test_special_tokens_of_the_file_are_variables(opened: Open, tmp_path: Path) -> None:
    path = write_vocabulary(tmp_path / "v.gguf", chat_template=(STRING, "{{ bos_token }} {{ eos_token }} {{ pad_token }}."))
    assert opened(path).render(SIMPLE) == "<|endoftext|> <|im_end|> ."


def test_the_template_for_tools_is_used_with_tools(opened: Open) -> None:
    template = opened({"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert [template.render(SIMPLE), template.render(SIMPLE, TOOLS)] == ["plain", "größe"]


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize("source", [CHATML, PARTS_ONLY])
def test_text_parts_and_one_text_are_the_same_to_every_template(opened: Open, source: str) -> None:
    template = opened(source)
    text = template.render([{"role": "user", "content": PARTS}])
    assert "one\ntwo" in text
    assert text == template.render([{"role": "user", "content": "one\ntwo"}])


def test_missing_content_is_empty_text(opened: Open) -> None:
    assert opened("[{{ messages[0].content }}]").render([{"role": "assistant", "content": None}]) == "[]"


@pytest.mark.parametrize("content", [[{"type": "image_url", "image_url": {"url": "x"}}], [3], {"text": "x"}, 7, [{"type": "text"}]])
def test_content_that_is_no_text_is_the_clients_error(chatml: ChatTemplate, content: object) -> None:
    with pytest.raises(RequestError) as refused:
        chatml.render([{"role": "user", "content": "x"}, {"role": "user", "content": content}])
    assert refused.value.param is not None
    assert refused.value.param.startswith("messages[1].content")
    assert refused.value.param in refused.value.message


def test_arguments_in_json_text_become_objects(chatml: ChatTemplate) -> None:
    def called_with(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return chatml.render([*SIMPLE, {"role": "assistant", "content": None, "tool_calls": [call]}])

    assert called_with(json.dumps({"a": "é"})) == called_with({"a": "é"})
    assert "not json" in called_with("not json")


SHARDS = st.lists(
    st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im", "_end|>", "<|", "<", "|>", "stop", "sto", "p", " a", "\n", "\ue000"])
)


@settings(max_examples=30, deadline=None)
@given(st.lists(SHARDS.map("".join), min_size=1, max_size=4), SHARDS.map("".join))
def test_messages_cannot_forge_control_tokens(chatml: ChatTemplate, tokenizer: Tokenizer, contents: list[str], name: str) -> None:
    messages = [{"role": "user", "content": content} for content in contents]
    tools = [{"type": "function", "function": {"name": name, "description": contents[0], "parameters": {name: name}}}]
    ids = chatml.render_to_ids(tokenizer, messages, tools)
    harmless = [{"role": "user", "content": "x"} for _ in contents]
    expected = chatml.render_to_ids(tokenizer, harmless, TOOLS)
    control = tokenizer.control_ids
    assert [token for token in ids if token in control] == [token for token in expected if token in control]
    assert tokenizer.decode(ids) == chatml.render(messages, tools)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_ordinary_conversations_have_the_ids_of_their_text(chatml: ChatTemplate, tokenizer: Tokenizer, conversation: str) -> None:
    messages = CONVERSATIONS[conversation]
    text = chatml.render(messages, TOOLS)
    assert chatml.render_to_ids(tokenizer, messages, TOOLS) == tokenizer.encode(text, add_special=False, parse_special=True)


@pytest.mark.parametrize("depth", [MAX_DEPTH, 900, 50_000])
def test_arguments_nested_too_deeply_stay_text(chatml: ChatTemplate, depth: int) -> None:
    arguments = '{"a":' + "[" * depth + "]" * depth + "}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    text = chatml.render([*SIMPLE, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert "[" * depth in text


def test_escapes_in_arguments_hide_no_control_token(chatml: ChatTemplate, tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": "\\u003c|im_end|>"}'}}
    ids = chatml.render_to_ids(tokenizer, [*SIMPLE, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert tokenizer.decode(ids).count("<|im_end|>") == 3
    assert [tokenizer.decode([token]) for token in ids if token in tokenizer.control_ids].count("<|im_end|>") == 2


def test_a_lone_surrogate_reaches_the_model_as_a_replacement_character(chatml: ChatTemplate, tokenizer: Tokenizer) -> None:
    assert "a\ufffdb" in tokenizer.decode(chatml.render_to_ids(tokenizer, [{"role": "user", "content": "a\ud83db"}]))
