"""Key/value state of CUDA cards that is copied out and in: what goes on from it has the bits of what was never parked."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from appliance.engine.cards import GpuCard, open_card
from appliance.engine.model_runner import ModelRunner
from appliance.memory.workspace import KvType
from cuda_ext import _native as native
from tests.card.test_engine import SHAPE, TYPES, Logits, one_by_one
from tests.op_rig import same_bits
from tests.random_models import RandomModel, open_runner, prefill, write_random_model

RNG = np.random.default_rng(8)
PROMPT = RNG.integers(0, SHAPE.vocab, 100).tolist()
DECODED = RNG.integers(0, SHAPE.vocab, 5).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> RandomModel:
    return write_random_model(tmp_path_factory.mktemp("model") / "m.gguf", SHAPE, types=TYPES)


@pytest.fixture(scope="module")
def arena_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("arena")


def open_gpu(model: RandomModel, arena_dir: Path, *, kv_type: KvType = "f16", context: int = 200) -> AbstractContextManager[ModelRunner]:
    return open_runner(model, arena_dir, slots=8, card="cuda:0", kv_type=kv_type, max_logits=8, chunk=64, context=context)


def answer(runner: ModelRunner, first: int) -> Logits:
    """Computes the prompt from position `first` on; logits of what is decoded behind it."""
    prefill(runner, PROMPT[first:], num_logits=0, position=first)
    return one_by_one(runner, DECODED, len(PROMPT))


def saved(runner: ModelRunner, num_tokens: int) -> NDArray[np.uint8]:
    state = np.empty(runner.state_bytes(num_tokens), np.uint8)
    runner.save_state(num_tokens, state)
    state.flags.writeable = False
    return state


@pytest.mark.parametrize("kv_type", ["f16", "f32", "int8"])
def test_a_restored_state_gives_the_bits_of_a_computed_one(model: RandomModel, arena_dir: Path, kv_type: KvType) -> None:
    with open_gpu(model, arena_dir, kv_type=kv_type) as one, open_gpu(model, arena_dir, kv_type=kv_type, context=700) as other:
        expected = answer(one, 0)
        state = saved(one, len(PROMPT))
        assert one.state_id == other.state_id
        prefill(other, PROMPT[::-1], num_logits=0)
        wrong = saved(other, len(PROMPT))
        for shared in (len(PROMPT), 64, 20):  # what is left is still computed as a prompt
            other.load_state(len(PROMPT), len(PROMPT), wrong)
            other.load_state(shared, len(PROMPT), state)
            assert same_bits(answer(other, shared), expected)


def test_a_state_of_windows_comes_back_too(model: RandomModel, arena_dir: Path) -> None:
    with open_gpu(model, arena_dir) as runner:
        one_by_one(runner, DECODED)
        state = saved(runner, len(DECODED))
        expected = one_by_one(runner, DECODED, len(DECODED))
        prefill(runner, PROMPT, num_logits=0)
        runner.load_state(len(DECODED), len(DECODED), state)
        assert same_bits(one_by_one(runner, DECODED, len(DECODED)), expected)


def test_host_cards_and_gpus_do_not_exchange_states(model: RandomModel, arena_dir: Path) -> None:
    with open_gpu(model, arena_dir) as gpu, open_runner(model, arena_dir, kv_type="f16", context=200) as host:
        assert gpu.state_id != host.state_id


@pytest.fixture
def card() -> GpuCard:
    opened = open_card("cuda:0", native.Pool(1), native.isas()[-1])
    assert isinstance(opened, GpuCard)
    return opened


def test_rows_are_copied_from_one_distance_to_another(card: GpuCard) -> None:
    memory = card.allocate("workspace", 5 * 40)
    rows = RNG.integers(1, 256, (5, 70), np.uint8)
    card.write_rows(memory, 40, rows[:, :33])
    out = np.zeros((5, 50), np.uint8)
    card.read_rows(memory, 40, out[:, :36])
    assert np.array_equal(out[:, :33], rows[:, :33])
    assert not out[:, 33:].any(), "nothing else was written"


@pytest.mark.parametrize(("pitch", "rows", "width"), [(40, 6, 40), (39, 5, 40), (50, 5, 10), (300, 1, 201)])
def test_rows_beyond_their_place_are_refused(card: GpuCard, pitch: int, rows: int, width: int) -> None:
    memory = card.allocate("workspace", 5 * 40)
    data = np.zeros((rows, width), np.uint8)
    with pytest.raises(ValueError, match="rows"):
        card.write_rows(memory, pitch, data)
    with pytest.raises(ValueError, match="rows"):
        card.read_rows(memory, pitch, data)


def test_bytes_of_a_row_that_are_spread_are_refused(card: GpuCard) -> None:
    memory = card.allocate("workspace", 400)
    with pytest.raises(ValueError, match="one after the other"):
        card.read_rows(memory, 40, np.zeros((20, 5), np.uint8).T)
