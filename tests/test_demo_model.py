"""The demo model as it ships: its size and types, and its answers beside llama.cpp's on the same quantised file."""

from __future__ import annotations

import pytest

from appliance.demo import DEMO_MODEL
from appliance.gguf_file import open_gguf
from appliance.models.config import read_config
from scripts.demo_model.agree import QUESTIONS, Answers, llama_answers, num_equal, prompts_of, tandem_answers, texts_of

MAX_BYTES = 24_000_000
MIN_EXPERT_TYPES = 3
NUM_TOKENS = 32
MIN_EQUAL = 18
"""Measured: 20 of 20. Both round activations to 8 bits, llama.cpp in an order that depends on the processor."""
HARBOR = "A harbor is a sheltered port where ships can take on or discharge cargo."


@pytest.fixture(scope="module")
def ours() -> Answers:
    return tandem_answers(DEMO_MODEL, prompts_of(DEMO_MODEL), NUM_TOKENS)


@pytest.fixture(scope="module")
def theirs() -> Answers:
    return llama_answers(DEMO_MODEL, prompts_of(DEMO_MODEL), NUM_TOKENS)


def test_the_file_is_small_and_of_several_types() -> None:
    gguf = open_gguf(DEMO_MODEL)
    config = read_config(gguf)
    assert DEMO_MODEL.stat().st_size <= MAX_BYTES
    assert (config.arch, config.layers, config.experts, config.top_k, config.tied_embeddings) == ("qwen3moe", 6, 32, 4, True)
    assert len({tensor.type_name for tensor in gguf.tensors.values() if "_exps" in tensor.name}) >= MIN_EXPERT_TYPES


def test_the_card_lies_beside_it() -> None:
    assert "What is a harbor?" in (DEMO_MODEL.parent / "MODEL_CARD.md").read_text(encoding="utf-8")


def test_it_knows_what_a_harbor_is(ours: Answers, theirs: Answers) -> None:
    first = QUESTIONS.index("What is a harbor?")
    assert texts_of(DEMO_MODEL, [ours[first], theirs[first]]) == [HARBOR, HARBOR]


def test_llama_cpp_answers_the_same(ours: Answers, theirs: Answers) -> None:
    assert len(ours) == len(theirs) == len(QUESTIONS) == 20
    assert all(ours)
    assert all(theirs)
    assert num_equal(ours, theirs) >= MIN_EQUAL
