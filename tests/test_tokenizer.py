"""The tokenizer: exact round trips, special tokens only where they are wanted, and sentences for broken vocabularies."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import ContextLengthError, CorruptModelError, ModelError, RequestError, UnsupportedModelError
from appliance.gguf_file import open_gguf
from appliance.text import tokenizer as tokenizer_module
from appliance.text.pretokenizers import NOT_BYTE_LEVEL, PRE_TOKENIZERS
from appliance.text.tokenizer import Tokenizer
from appliance.text.vocabulary import END_OF_TURN_TEXTS
from tests.gguf_writing import ARRAY, BOOL, F32, I32, STRING, U32
from tests.text_rig import CONTROL, NORMAL, ROOT, SPECIAL, TEXT, trained_merges, trained_tokens, write_vocabulary

MARK = "\ue000"
NUM_TOKENS = len(trained_tokens()) + len(SPECIAL)
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
TOKEN_SHARDS = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|im", "_end|>", "<|", "<", "|>", "st", "op", "stop", "a", " "]))
Load = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf")))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda *args, **changes: Tokenizer.from_gguf(open_gguf(write_vocabulary(tmp_path / "v.gguf", *args, **changes)))


def id_of(text: str) -> int:
    return (*trained_tokens(), *(text for text, _ in SPECIAL)).index(text)


@given(ANY_TEXT)
def test_decoding_gives_back_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_no_pre_tokenizer_loses_text(load: Load, pre: str) -> None:
    tokenizer = load(pre)
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special=False)) == TEXT


@given(ANY_TEXT)
def test_the_bytes_of_the_tokens_are_the_text_in_utf8(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special=False))) == text.encode()


@given(st.lists(st.integers(0, NUM_TOKENS - 1)))
def test_any_ids_decode_to_the_bytes_of_their_tokens(tokenizer: Tokenizer, ids: list[int]) -> None:
    assert tokenizer.decode(ids) == b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def test_a_text_that_cannot_fit_is_refused_unread_and_any_other_is_read(tokenizer: Tokenizer) -> None:
    limited, longest = Tokenizer(tokenizer.vocabulary, 8), max(map(len, tokenizer.vocabulary.texts))
    fits = "a" * (8 * longest - 1)
    assert limited.encode(fits) == tokenizer.encode(fits)
    with pytest.raises(ContextLengthError, match="at least 8 tokens > 7 maximum"):
        limited.encode("a" * 8 * longest)
    with pytest.raises(ContextLengthError):
        limited.encode_marked("a" * 8 * longest, MARK)


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe", "deepseek-v3", "gpt-2"])
def test_what_follows_a_text_never_takes_more_tokens_from_it_than_are_counted_out(load: Load, pre: str) -> None:
    tokenizer = load(pre)
    ends = ["", "\n", " \n \n", "'ll", "s", "12", ".\r\n", "\u3000x", "é", "\u0301", *TEXT[::40]]
    for cut in range(1, len(TEXT), 3):
        least = tokenizer.least_tokens([TEXT[:cut]])
        assert least <= min(len(tokenizer.encode(TEXT[:cut] + end, add_special=False)) for end in ends)
        assert least >= len(tokenizer.encode(TEXT[:cut], add_special=False)) - 40


@pytest.mark.parametrize("texts", [["the terms " * 4] * 100, ["the terms " * 400]])
def test_a_long_text_that_does_not_fit_is_refused_by_its_beginning(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, texts: list[str]
) -> None:
    text = "<|im_end|>".join(texts)
    num_tokens = len(tokenizer.encode(text, parse_special=True))
    limited = Tokenizer(tokenizer.vocabulary, 220)
    assert len(limited.encode(text, parse_special=True)) == num_tokens
    monkeypatch.setattr(tokenizer_module, "_LONG", 1000)
    with pytest.raises(ContextLengthError) as refused:
        limited.encode(text, parse_special=True, param="prompt")
    least = int(re.findall(r"at least (\d+) tokens", refused.value.message)[0])
    assert (refused.value.param, 220 <= least < num_tokens) == ("prompt", True)
    sparse = "a" * 4000 + " the"
    assert limited.encode(sparse) == tokenizer.encode(sparse)


def test_merges_make_fewer_tokens_than_bytes(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.encode("the terms of the license", add_special=False)) < 12


def test_a_lone_surrogate_is_read_as_a_replacement_character(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("a\ud83dz", add_special=False)) == "a\ufffdz"


@given(TOKEN_SHARDS)
def test_control_tokens_spelled_out_in_text_stay_text(tokenizer: Tokenizer, shards: list[str]) -> None:
    assert not tokenizer.control_ids & set(tokenizer.encode("".join(shards), add_special=False))


def test_control_tokens_are_parsed_on_request(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|im_start|>user", add_special=False, parse_special=True)
    assert ids[0] == id_of("<|im_start|>")
    assert tokenizer.decode(ids, skip_special=True) == "user"


def test_user_defined_tokens_are_always_parsed(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<think>", add_special=False) == [id_of("<think>")]


@pytest.mark.parametrize("pre", ["qwen2", "llama-bpe"])
def test_a_whole_word_that_is_a_control_token_stays_text(load: Load, pre: str) -> None:
    ids = load(pre).encode("stop", add_special=False)
    assert id_of("stop") not in ids


@given(TOKEN_SHARDS, TOKEN_SHARDS)
def test_protected_text_makes_no_control_token_even_with_text_behind(tokenizer: Tokenizer, shards: list[str], more: list[str]) -> None:
    texts = ["".join(shards), "".join(more)]
    joined = "".join(tokenizer.protect(text, MARK) for text in texts)
    ids = tokenizer.encode_marked(joined, MARK)
    assert not tokenizer.control_ids & set(ids)
    assert tokenizer.decode(ids) == "".join(texts)


@given(ANY_TEXT)
def test_ordinary_text_is_not_changed_by_protection(tokenizer: Tokenizer, text: str) -> None:
    ordinary = text.replace("<", "").replace("s", "")
    assert tokenizer.protect(ordinary, MARK) == ordinary


@pytest.mark.parametrize(
    ("pre", "add_bos", "add_eos", "begins", "ends"),
    [
        ("qwen2", None, None, False, False),
        ("qwen2", True, None, True, False),
        ("qwen2", None, True, False, True),
        ("llama-bpe", None, None, True, False),
        ("llama-bpe", False, None, False, False),
    ],
)
def test_bos_and_eos_are_added_as_file_and_family_say(
    load: Load, pre: str, add_bos: bool | None, add_eos: bool | None, begins: bool, ends: bool
) -> None:
    flags = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    tokenizer = load(pre, **{name: (BOOL, flag) for name, flag in flags.items() if flag is not None})
    plain = tokenizer.encode("a", add_special=False)
    bos, eos = [id_of("<|endoftext|>")] * begins, [id_of("<|im_end|>")] * ends
    assert tokenizer.encode("a") == bos + plain + eos


def test_the_ends_of_an_answer_are_those_named_and_those_well_known(tokenizer: Tokenizer) -> None:
    assert tokenizer.eos_ids == {id_of("<|im_end|>"), id_of("<|endoftext|>")}


def test_in_harmony_the_end_of_a_message_does_not_end_the_answer(load: Load) -> None:
    texts = ["<|end|>", "<|return|>", "<|call|>"]
    tokens = [*trained_tokens(), *texts]
    kinds = [NORMAL] * len(trained_tokens()) + [CONTROL] * 3
    tokenizer = load(
        tokens=(ARRAY, (STRING, tokens)), token_type=(ARRAY, (I32, kinds)), eos_token_id=None, bos_token_id=None
    )  # fmt: skip
    assert tokenizer.eos_ids == {tokens.index("<|return|>"), tokens.index("<|call|>")}
    assert tokenizer.decode([tokens.index("<|end|>")], skip_special=True) == "<|end|>"


@pytest.mark.parametrize("token_id", [-1, NUM_TOKENS, 2**40])
def test_an_id_outside_the_vocabulary_is_the_clients_error(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(RequestError, match=f"{token_id} .* 0 to {NUM_TOKENS - 1}"):
        tokenizer.decode([token_id])


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    expected = tokenizer.encode(TEXT)
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.extend(tokenizer.encode(TEXT) for _ in range(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 160


@pytest.mark.parametrize("pre", ["superbpe", "afmoe", "tiny_aya"])
def test_digits_are_grouped_from_the_right_in_linear_time(load: Load, pre: str) -> None:
    tokenizer = load(pre, merges=(ARRAY, (STRING, ["7 7", "77 7"])), tokens=(ARRAY, (STRING, [*trained_tokens()[:256], "77", "777"])),
                     token_type=None, eos_token_id=None, bos_token_id=None)  # fmt: skip
    ids = tokenizer.encode("7" * 200_000, add_special=False)
    assert [len(tokenizer.token_bytes(token_id)) for token_id in ids] == [2] + [3] * 66_666


@pytest.mark.parametrize("text", [" " * 300_000, "a" * 300_000, "\n " * 150_000, "<|" * 150_000, "'" * 300_000])
def test_monotonous_text_is_no_trap(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


MISSHAPEN: list[tuple[str, tuple[int, object] | None, str]] = [
    ("tokens", None, r"tokens is missing"),
    ("tokens", (STRING, "a"), r"tokens is .* array"),
    ("tokens", (ARRAY, (I32, [1, 2])), r"tokens is .* array"),
    ("tokens", (ARRAY, (STRING, [])), r"tokens is empty"),
    ("tokens", (ARRAY, (STRING, ["a", "b", "a"])), r"'a' twice, as ids 0 and 2"),
    ("merges", None, r"merges is missing"),
    ("merges", (ARRAY, (STRING, [trained_merges()[0], "th\u0120e"])), r"entry 1: 'th\u0120e' is not two tokens"),
    ("merges", (ARRAY, (STRING, ["t \u4e2d"])), r"entry 0: 't \u4e2d' needs the token '\u4e2d'"),
    ("merges", (ARRAY, (STRING, ["# $"])), r"entry 0: '# \$' needs the token '#\$'"),
    ("token_type", (ARRAY, (I32, [1, 1])), r"2 entries for \d+ tokens"),
    ("token_type", (ARRAY, (I32, [77] * NUM_TOKENS)), r"holds 77; token types go from 0 to 6"),
    ("token_type", (ARRAY, (F32, [1.0] * NUM_TOKENS)), r"token_type is .* whole numbers"),
    ("eos_token_id", (U32, NUM_TOKENS), rf"eos_token_id is {NUM_TOKENS}"),
    ("bos_token_id", (STRING, "1"), r"bos_token_id is '1'"),
    ("add_bos_token", (U32, 1), r"add_bos_token is 1; it must be true or false"),
]


@pytest.mark.parametrize(("name", "value", "sentence"), MISSHAPEN)
def test_a_broken_vocabulary_is_refused_with_a_sentence(load: Load, name: str, value: tuple[int, object] | None, sentence: str) -> None:
    with pytest.raises(CorruptModelError, match=sentence) as refused:
        load(**{name: value})
    assert f"v.gguf: key tokenizer.ggml.{name}" in refused.value.message


def test_adding_a_bos_that_the_file_does_not_name_is_refused(load: Load) -> None:
    with pytest.raises(CorruptModelError, match=r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"):
        load(add_bos_token=(BOOL, True), bos_token_id=None)


def test_an_unknown_pre_tokenizer_is_refused_with_names_like_it(load: Load) -> None:
    with pytest.raises(UnsupportedModelError, match=r"v\.gguf: unknown pre-tokenizer 'qwen9'.*qwen2"):
        load("qwen9")


@pytest.mark.parametrize("pre", NOT_BYTE_LEVEL)
def test_a_pre_tokenizer_that_is_not_byte_level_is_refused(load: Load, pre: str) -> None:
    with pytest.raises(UnsupportedModelError, match="does not work on bytes"):
        load(pre)


def test_a_missing_pre_tokenizer_is_refused(load: Load) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tokenizer\.ggml\.pre is missing"):
        load(pre=None)


@pytest.mark.parametrize("model", ["llama", "bert", "t5", "rwkv", "gemma4", "none"])
def test_another_kind_of_tokenizer_is_refused(load: Load, model: str) -> None:
    with pytest.raises(UnsupportedModelError, match=rf"tokenizer model '{model}' is not supported yet"):
        load(model=(STRING, model))


@given(st.lists(st.sampled_from([*trained_merges()[:3], "a b c", "", " ", "a ", " a", "\u0120 t"]), max_size=4))
def test_any_merges_end_in_a_tokenizer_or_a_sentence(tmp_path_factory: pytest.TempPathFactory, merges: list[str]) -> None:
    path = write_vocabulary(tmp_path_factory.mktemp("v") / "v.gguf", merges=(ARRAY, (STRING, merges)))
    try:
        Tokenizer.from_gguf(open_gguf(path))
    except ModelError as error:
        message = error.message
    else:
        message = f"{path} is well"
    assert message.startswith(str(path))


def test_the_page_lists_every_pre_tokenizer_and_every_end_of_turn_token() -> None:
    page = (ROOT / "docs" / "tokenizers.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`([^`\n]+)`", page))
    assert set(PRE_TOKENIZERS) | set(NOT_BYTE_LEVEL) | END_OF_TURN_TEXTS <= listed
