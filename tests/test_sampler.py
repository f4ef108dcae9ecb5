"""The sampler against Hugging Face's logits processors, against Philox written out, and against statistics."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from appliance.engine.logits import ArrayRow, Logits
from appliance.engine.sampler import RandomNumbers, Sampler, largest
from appliance.errors import EngineError, RequestError
from appliance.protocol import Sampling
from tests.choice_reference import Rule, kept
from tests.op_rig import every_isa

PROMPT = [3, 9, 9, 27]


SAMPLINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.3),
    Sampling(temperature=5.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=7),
    Sampling(temperature=1.0, top_p=0.5),
    Sampling(temperature=0.8, top_p=0.999),
    Sampling(temperature=1.0, min_p=0.02),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=1.0, repetition_penalty=0.7),
    Sampling(temperature=1.0, logit_bias={5: 4.0, 11: -20.0}),
    Sampling(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logit_bias={5: 2.0}),
    Sampling(temperature=2.0, top_k=500, top_p=0.95, min_p=0.1, repetition_penalty=1.1),
]


def random_logits(vocab: int, seed: int) -> Logits:
    return (np.random.default_rng(seed).standard_normal(vocab) * 3).astype(np.float32)


def rule_of(sampling: Sampling, prompt: list[int] = PROMPT, answer: tuple[int, ...] = ()) -> Rule:
    """What the module's docstring says, for the reference."""
    bias, counts = sampling.logit_bias, Counter(answer)
    penalties = {token: sampling.presence_penalty + sampling.frequency_penalty * count for token, count in counts.items()}
    repeated = {*prompt, *answer} if sampling.repetition_penalty != 1 else set()
    changes = {
        token: (bias.get(token, 0.0), sampling.repetition_penalty if token in repeated else 1.0, penalties.get(token, 0.0))
        for token in {*bias, *penalties, *repeated}
    }
    min_offset = sampling.temperature * np.log(sampling.min_p) if sampling.min_p else -np.inf
    return Rule(sampling.temperature, sampling.top_k, sampling.top_p, min_offset, changes)


def probabilities(sampling: Sampling, logits: Logits, prompt: list[int] = PROMPT, answer: tuple[int, ...] = ()) -> np.ndarray:
    found = kept(logits, rule_of(sampling, prompt, answer))
    result = np.zeros(len(logits))
    result[found.ids] = np.array(found.weights, dtype=np.float64) / sum(found.weights)
    return result


def oracle_probabilities(sampling: Sampling, logits: Logits, tokens: list[int]) -> np.ndarray:
    processors = LogitsProcessorList()
    if sampling.logit_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.logit_bias.items()]))
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    scores = processors(torch.LongTensor([tokens]), torch.from_numpy(logits.copy())[None])
    return torch.softmax(scores[0].double(), dim=-1).numpy()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=repr)
@pytest.mark.parametrize("vocab", [37, 3000])
def test_probabilities_are_those_of_hugging_face(sampling: Sampling, vocab: int) -> None:
    for seed in range(5):
        logits = random_logits(vocab, seed)
        ours = probabilities(sampling, logits, answer=(4, 4, 30))
        theirs = oracle_probabilities(sampling, logits, [*PROMPT, 4, 4, 30])
        far = (ours == 0) & (theirs < 2.0**-39)
        assert np.array_equal(ours > 0, (theirs > 0) & ~far)
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("isa", every_isa())
@pytest.mark.parametrize(
    "sampling",
    [
        *SAMPLINGS,
        Sampling(temperature=1.0, top_k=3000),
        Sampling(temperature=1.0, top_k=10**9),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=100.0),
        Sampling(temperature=100.0, top_p=0.3, min_p=0.9),
        Sampling(temperature=1e-30),
    ],
    ids=repr,
)
def test_the_native_module_draws_what_the_reference_draws(sampling: Sampling, isa: str) -> None:
    """At both sides of every edge between two tokens."""
    for seed, vocab in ((1, 37), (2, 3000)):
        logits = random_logits(vocab, seed)
        logits[5:9] = logits[17]  # as likely as each other
        rule = rule_of(sampling, answer=(4, 4, 30))
        expected, chooser = kept(logits, rule), rule.chooser()
        for fraction in expected.edges()[:: 1 if vocab < 100 else 29]:
            chooser.set_fraction(fraction)
            assert chooser.choose(logits, isa) == expected.drawn(fraction), fraction


def test_the_sampler_tells_the_card_what_it_does_itself() -> None:
    sampling = Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.1, logit_bias={7: 1.0}, seed=3)
    sampler, logits, answer = Sampler(sampling, 300, PROMPT), random_logits(300, 2), []
    for position in range(4, 90):
        chooser = sampler.chooser(position)
        assert chooser is not None
        token = chooser.choose(logits)
        assert token == kept(logits, rule_of(sampling, answer=tuple(answer))).drawn(RandomNumbers(3).at(position))
        assert sampler.choose(ArrayRow(logits), position).token == token
        assert sampler.choose(ArrayRow(logits, chosen=17), position).token == 17, "the card's own choice"
        answer.append(token)
        sampler.accept(token)


def test_the_likeliest_token_needs_no_chooser() -> None:
    assert Sampler(Sampling(), 10, [1]).chooser(1) is None
    for sampling in (
        Sampling(temperature=0.1),
        Sampling(logit_bias={1: 2.0}),
        Sampling(repetition_penalty=2.0),
        Sampling(presence_penalty=1),
    ):
        assert Sampler(sampling, 10, [1]).chooser(1) is not None


@pytest.mark.parametrize("repetition", [1e-45, 1e-300, 10.0])
def test_changes_beyond_all_reason_still_give_a_token(repetition: float) -> None:
    logits = random_logits(50, 3)
    sampler = Sampler(Sampling(temperature=1.0, repetition_penalty=repetition, logit_bias={4: 1e9, 5: -1e9}), 50, [3, 4, 5, 6])
    assert 0 <= sampler.choose(ArrayRow(logits), 9).token < 50


def test_presence_and_frequency_count_the_answer_and_not_the_prompt() -> None:
    logits = random_logits(40, 1)
    ours = probabilities(Sampling(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25), logits, answer=(9, 4, 9))
    expected = logits.astype(np.float64)
    expected[9] -= 0.5 + 2 * 0.25
    expected[4] -= 0.5 + 0.25
    expected = np.exp(expected) / np.exp(expected).sum()
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_each_penalty_works_without_the_others() -> None:
    logits = np.zeros(4, dtype=np.float32)
    presence = probabilities(Sampling(temperature=1.0, presence_penalty=1.0), logits, [0], (2, 2))
    frequency = probabilities(Sampling(temperature=1.0, frequency_penalty=1.0), logits, [0], (2, 2))
    assert presence[2] / presence[0] == pytest.approx(np.exp(-1))
    assert frequency[2] / frequency[0] == pytest.approx(np.exp(-2))


def test_greedy_takes_the_lowest_of_equally_large_logits() -> None:
    logits = np.array([1, 7, 3, 7, 7], dtype=np.float32)
    assert Sampler(Sampling(), 5, [0]).choose(ArrayRow(logits), 1).token == 1


def test_greedy_obeys_bias_and_penalties() -> None:
    logits = np.array([1, 7, 3, 6.5, 2], dtype=np.float32)
    assert Sampler(Sampling(logit_bias={2: 10.0}), 5, [0]).choose(ArrayRow(logits), 1).token == 2
    sampler = Sampler(Sampling(frequency_penalty=1.0), 5, [1, 1, 1])
    assert sampler.choose(ArrayRow(logits), 3).token == 1
    sampler.accept(1)
    assert sampler.choose(ArrayRow(logits), 4).token == 3


def test_a_tiny_temperature_is_greedy() -> None:
    logits = random_logits(500, 3)
    for temperature in (1e-6, 1e-30, 5e-324):
        assert Sampler(Sampling(temperature=temperature), 500, [0]).choose(ArrayRow(logits), 9).token == int(np.argmax(logits))


def test_top_p_of_zero_and_min_p_of_one_leave_the_likeliest() -> None:
    logits = random_logits(500, 4)
    for sampling in (Sampling(temperature=3.0, top_p=0.0), Sampling(temperature=3.0, min_p=1.0)):
        assert np.flatnonzero(probabilities(sampling, logits)).tolist() == [int(np.argmax(logits))]


def test_of_equal_logits_top_k_and_top_p_keep_the_lower_ids() -> None:
    logits = np.array([0, 5, 5, 5, 5, 9], dtype=np.float32)
    assert np.flatnonzero(probabilities(Sampling(temperature=1.0, top_k=3), logits)).tolist() == [1, 2, 5]
    assert np.flatnonzero(probabilities(Sampling(temperature=100.0, top_p=0.5), logits)).tolist() == [1, 2, 5]


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=1.0, seed=5), Sampling(temperature=1.0, seed=5, top_p=0.9, min_p=0.02)], ids=repr
)
def test_drawn_tokens_follow_their_probabilities(sampling: Sampling) -> None:
    """Pearson's chi-square; a fair sampler fails it once in a thousand seeds, and this seed is fixed."""
    logits = random_logits(12, 8) / np.float32(2)
    expected = probabilities(sampling, logits, [0])
    num_draws = 5000
    sampler = Sampler(sampling, 12, [0])
    counts = Counter(sampler.choose(ArrayRow(logits), position).token for position in range(num_draws))
    assert set(counts) <= set(np.flatnonzero(expected))
    chi_square = sum((counts[token] - num_draws * p) ** 2 / (num_draws * p) for token, p in enumerate(expected) if p > 0)
    assert chi_square < 31.26, "99.9 % quantile for 11 degrees of freedom"


def test_seeds_and_positions_give_independent_numbers() -> None:
    numbers = np.array([[RandomNumbers(seed).at(position) for position in range(200)] for seed in range(20)]) / 2**53
    assert len(np.unique(numbers)) == numbers.size
    assert abs(numbers.mean() - 0.5) < 4 * np.sqrt(1 / 12 / numbers.size)
    histogram, _ = np.histogram(numbers, bins=16, range=(0, 1))
    expected = numbers.size / 16
    assert ((histogram - expected) ** 2 / expected).sum() < 37.7, "99.9 % quantile for 15 degrees of freedom"


def philox4x64(key: int, counter: int) -> int:
    """First word of Philox4x64-10 as its paper writes it."""
    mask = 2**64 - 1
    words, keys = [(counter >> 64 * i) & mask for i in range(4)], [(key >> 64 * i) & mask for i in range(2)]
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(product1 >> 64) ^ words[1] ^ keys[0], product1 & mask, (product0 >> 64) ^ words[3] ^ keys[1], product0 & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


def test_the_philox_written_out_here_gives_the_published_vector() -> None:
    assert philox4x64(0, 0) == 0x16554D9ECA36314C


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_the_random_number_is_that_of_philox(seed: int, position: int) -> None:
    numbers = RandomNumbers(seed)
    for offset in (0, 1, 63, 64, 2, 200):
        assert numbers.at(position + offset) == philox4x64(seed, position + offset + 1) >> 11


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.integers(0, 60),
    top_p=st.floats(0, 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-100, 100), max_size=3),
    seed=st.integers(0, 2**64 - 1),
)


@given(samplings, st.lists(st.floats(-1e4, 1e4, width=32), min_size=50, max_size=50), st.lists(st.integers(0, 49), max_size=5))
def test_any_settings_give_a_token_and_leave_the_logits_alone(sampling: Sampling, values: list[float], answer: list[int]) -> None:
    logits = np.array(values, dtype=np.float32)
    before = logits.copy()
    sampler = Sampler(sampling, 50, [1, 2, 3], top_logprobs=2)
    again = Sampler(sampling, 50, [1, 2, 3], top_logprobs=2)
    for token in answer:
        sampler.accept(token)
        again.accept(token)
    choice = sampler.choose(ArrayRow(logits), 8)
    assert 0 <= choice.token < 50
    assert choice == again.choose(ArrayRow(logits), 8)
    assert np.array_equal(logits, before)
    if sampling.temperature > 0:
        assert choice.token in kept(logits, rule_of(sampling, [1, 2, 3], tuple(answer))).ids


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=30), st.integers(1, 35))
def test_largest_agrees_with_a_stable_sort(values: list[int], count: int) -> None:
    by_value = sorted(range(len(values)), key=lambda index: -values[index])
    assert largest(np.array(values, dtype=np.float32), count).tolist() == sorted(by_value[:count])


def test_logprobs_are_of_the_raw_logits_and_likeliest_first() -> None:
    logits = random_logits(300, 6)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), dim=-1)
    choice = Sampler(Sampling(temperature=0.5, top_k=3, logit_bias={200: 60.0}), 300, [0], top_logprobs=4).choose(ArrayRow(logits), 7)
    assert choice.token == 200
    assert choice.logprobs is not None
    assert choice.logprobs.logprob == pytest.approx(float(expected[200]), rel=1e-6)
    top = torch.topk(expected, 4)
    assert [token for token, _ in choice.logprobs.top] == top.indices.tolist()
    assert [value for _, value in choice.logprobs.top] == pytest.approx(top.values.tolist(), rel=1e-6)


def test_logprobs_come_only_when_asked_for() -> None:
    logits = random_logits(30, 6)
    assert Sampler(Sampling(), 30, [0]).choose(ArrayRow(logits), 1).logprobs is None
    only_chosen = Sampler(Sampling(), 30, [0], top_logprobs=0).choose(ArrayRow(logits), 1).logprobs
    assert only_chosen is not None
    assert only_chosen.top == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e35])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_p=0.9)], ids=repr)
def test_damaged_logits_are_an_engine_error(bad: float, sampling: Sampling) -> None:
    logits = random_logits(1000, 7)
    logits[500] = bad
    with pytest.raises(EngineError, match="position 12"):
        Sampler(sampling, 1000, [0]).choose(ArrayRow(logits), 12)


@pytest.mark.parametrize("bias", [{50: 1.0}, {-1: 1.0}, {3: float("nan")}, {3: float("inf")}, {3: 1e300}])
def test_a_senseless_bias_is_refused(bias: dict[int, float]) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        Sampler(Sampling(logit_bias=bias), 50, [0])
