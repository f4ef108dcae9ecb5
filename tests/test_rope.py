"""Frequencies of rotary positions against transformers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from appliance.models.config import ModelConfig, RopeScaling
from appliance.models.rope import rotation

CONFIG = ModelConfig(
    arch="qwen3moe",
    name="m",
    layers=1,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=128,
    experts=4,
    top_k=2,
    expert_width=64,
    vocab=32,
    context=131072,
    rms_eps=1e-6,
    rope_base=1e6,
    rope_scaling=None,
    tied_embeddings=False,
)
YARN = RopeScaling(kind="yarn", factor=4.0, original_context=32768)


def theirs(parameters: dict[str, object]) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], float]:
    from transformers import Qwen3MoeConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = Qwen3MoeConfig(
        head_dim=CONFIG.head_dim,
        hidden_size=CONFIG.hidden,
        num_attention_heads=CONFIG.heads,
        max_position_embeddings=CONFIG.context,
        rope_parameters={"rope_theta": CONFIG.rope_base} | parameters,
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, "cpu")
    return frequencies.numpy(), float(magnitude)


def test_plain_frequencies_are_powers_of_the_base() -> None:
    expected = [CONFIG.rope_base ** (-2 * pair / CONFIG.head_dim) for pair in range(CONFIG.head_dim // 2)]
    assert rotation(CONFIG).frequencies == pytest.approx(expected, rel=1e-14)
    assert rotation(CONFIG).magnitude == 1.0


def test_linear_scaling_agrees_with_transformers() -> None:
    frequencies, magnitude = theirs({"rope_type": "linear", "factor": 2.5})
    ours = rotation(replace(CONFIG, rope_scaling=RopeScaling(kind="linear", factor=2.5, original_context=4096)))
    assert ours.frequencies == pytest.approx(frequencies, rel=1e-6)
    assert ours.magnitude == magnitude


def test_yarn_agrees_with_transformers() -> None:
    frequencies, magnitude = theirs({"rope_type": "yarn", "factor": YARN.factor, "original_max_position_embeddings": YARN.original_context})
    ours = rotation(replace(CONFIG, rope_scaling=YARN))
    assert ours.frequencies == pytest.approx(frequencies, rel=1e-6)
    assert ours.magnitude == pytest.approx(magnitude, rel=1e-12)


def test_yarn_leaves_fast_pairs_alone_and_stretches_slow_ones() -> None:
    plain, stretched = rotation(CONFIG).frequencies, rotation(replace(CONFIG, rope_scaling=YARN)).frequencies
    assert stretched[0] == plain[0]
    assert stretched[-1] == pytest.approx(plain[-1] / YARN.factor)
    assert math.isclose(rotation(replace(CONFIG, rope_scaling=YARN)).magnitude, 1 + 0.1 * math.log(YARN.factor))
