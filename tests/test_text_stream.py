"""Text as it streams: whole characters only, stop strings wherever the tokens cut them, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import RequestError
from appliance.gguf_file import open_gguf
from appliance.text.text_stream import TextStream
from appliance.text.tokenizer import Tokenizer
from tests.text_rig import SPECIAL, trained_tokens, write_vocabulary

NUM_TOKENS = len(trained_tokens()) + len(SPECIAL)
IM_END = len(trained_tokens()) + 1
IDS = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40)
FEW_LETTERS = st.text("abc😀", max_size=30)
STOPS = st.lists(st.text("abc😀", min_size=1, max_size=5), max_size=4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_gguf(open_gguf(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf")))


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte to the token that is only that byte."""
    return {raw[0]: token_id for token_id in range(256) if len(raw := tokenizer.token_bytes(token_id)) == 1}


def cut_at_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The slow oracle: look at the text after every character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(IDS, st.data())
def test_the_deltas_are_the_decoded_text(tokenizer: Tokenizer, ids: list[int], data: st.DataObject) -> None:
    stream = TextStream(tokenizer)
    deltas = []
    rest = ids
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        deltas.append(stream.feed(rest[:count]))
        rest = rest[count:]
    assert "".join([*deltas, stream.finish()]) == tokenizer.decode(ids, skip_special=True)


@given(FEW_LETTERS, STOPS)
def test_text_is_cut_at_the_stop_string_that_is_complete_first(
    tokenizer: Tokenizer, byte_ids: dict[int, int], text: str, stops: list[str]
) -> None:
    stream = TextStream(tokenizer, stops)
    deltas = [stream.feed([byte_ids[byte]]) for byte in text.encode()]
    assert ("".join([*deltas, stream.finish()]), stream.stop) == cut_at_stop(text, stops)


@given(FEW_LETTERS, STOPS)
def test_how_the_text_is_spread_over_tokens_makes_no_difference(
    tokenizer: Tokenizer, byte_ids: dict[int, int], text: str, stops: list[str]
) -> None:
    one, other = TextStream(tokenizer, stops), TextStream(tokenizer, stops)
    at_once = one.feed(tokenizer.encode(text, add_special=False)) + one.finish()
    by_byte = "".join([other.feed([byte_ids[byte]]) for byte in text.encode()]) + other.finish()
    assert (at_once, one.stop) == (by_byte, other.stop)


@given(FEW_LETTERS, STOPS)
def test_no_more_is_held_back_than_a_stop_string_may_need(
    tokenizer: Tokenizer, byte_ids: dict[int, int], text: str, stops: list[str]
) -> None:
    stream = TextStream(tokenizer, stops)
    shown = "".join(stream.feed([byte_ids[byte]]) for byte in text.encode())
    held = text[len(shown) :]
    assert stream.stopped or held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_half_a_character_is_held_until_it_is_whole(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    stream = TextStream(tokenizer)
    assert [stream.feed([byte_ids[byte]]) for byte in "🦙".encode()] == ["", "", "", "🦙"]


def test_half_a_character_at_the_end_becomes_a_replacement_character(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    stream = TextStream(tokenizer)
    assert stream.feed([byte_ids[0xF0], byte_ids[0x9F]]) == ""
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_no_text(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    stream = TextStream(tokenizer)
    assert stream.feed([byte_ids[ord("a")], IM_END, byte_ids[ord("b")]]) == "ab"


def test_nothing_follows_a_stop_string(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    stream = TextStream(tokenizer, ["b"])
    a, b = byte_ids[ord("a")], byte_ids[ord("b")]
    assert [stream.feed([a, b, a]), stream.feed([a]), stream.finish()] == ["a", "", ""]
    assert stream.stop == "b"


def test_an_empty_stop_string_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="stop string is empty") as refused:
        TextStream(tokenizer, ["a", ""])
    assert refused.value.param == "stop"


def test_an_id_outside_the_vocabulary_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=str(NUM_TOKENS)):
        TextStream(tokenizer).feed([NUM_TOKENS])
