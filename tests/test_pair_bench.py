"""The benchmark of two cards: its model is used evenly, its numbers are those of the streams, and what it could not measure is named."""

from __future__ import annotations

import json
import sys
import time
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from appliance.desk.config import DeskConfig, LaneConfig
from appliance.desk.status import PairPhase
from appliance.gguf_file import open_gguf
from appliance.memory.loader import Loader
from appliance.settings import load_settings
from scripts.bench_pair import parse_slots
from scripts.card_bench.limits import Bandwidths
from scripts.host_bench.model import BenchModel, write_model
from scripts.pair_bench.arena import write_arena
from scripts.pair_bench.children import run_child
from scripts.pair_bench.limits import TokenBytes, one_limit, two_limit
from scripts.pair_bench.llama import read_rates
from scripts.pair_bench.model import evenness, pair_model
from scripts.pair_bench.page import aims, page
from scripts.pair_bench.plot import plot
from scripts.pair_bench.record import Deadline, NotMeasuredError, Record
from scripts.pair_bench.rows import Sizes, measure_alone
from scripts.pair_bench.streams import Stream, bench_of, with_slots
from tests.arena_rig import shm_folder
from tests.gguf_writing import ModelShape
from tests.random_models import RandomModel, open_runner, prefill

SMALL = ModelShape(layers=3, hidden=512, heads=4, kv_heads=2, head_dim=64, experts=32, top_k=4, width=256, vocab=2000, context=256)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> BenchModel:
    written = pair_model(tmp_path_factory.mktemp("pair") / "m.gguf", SMALL)
    write_model(written)
    return written


def test_random_tokens_use_all_experts_alike(model: BenchModel) -> None:
    for layer in range(SMALL.layers):
        found = evenness(model.path, layer, SMALL.top_k)
        assert found["least"] > 0.8
        assert found["most"] < 1.2


def test_greedy_text_counts(model: BenchModel) -> None:
    with shm_folder() as shm_dir, open_runner(RandomModel(model.path, SMALL), shm_dir, slots=8) as runner:
        row = prefill(runner, [7, 1200], num_logits=1)[-1]
        text = []
        for step in range(6):
            text.append(int(row.argmax()))
            row = runner.run([text[-1]], 2 + step, 1)[-1].values()
            runner.between_windows()
    assert text == list(range(1201, 1207))


def test_gate_up_and_down_have_types_of_their_own(model: BenchModel) -> None:
    tensors = open_gguf(model.path).tensors
    assert {tensors[f"blk.2.ffn_{name}_exps.weight"].type_name for name in ("gate", "up")} == {"IQ3_S"}
    assert tensors["blk.2.ffn_down_exps.weight"].type_name == "IQ4_NL"


def test_the_arena_is_what_the_loader_would_have_written(model: BenchModel) -> None:
    with shm_folder() as shm_dir:
        path = write_arena(model.path, shm_dir)
        written = path.stat().st_mtime_ns
        loader = Loader(open_gguf(model.path), shm_dir, StringIO())
        loader.fill()
        loader.verify()
        assert path.stat().st_mtime_ns == written
        assert write_arena(model.path, shm_dir) == path


def test_rates_and_gaps_are_those_between_two_times() -> None:
    stream = Stream(0.0, [1.0, 1.1, 1.2, 2.0, 2.5, 3.0])
    assert stream.rate(2.0) == pytest.approx(2.0)
    assert stream.rate(last_s=1.2) == pytest.approx(10.0)
    assert stream.rate(2.1, 2.6) is None
    assert stream.longest_gap_s(0.0, 1.15) == pytest.approx(0.1)
    assert stream.longest_gap_s(1.5, 1.6) == pytest.approx(0.8)


def test_a_plot_shows_both_streams() -> None:
    drawn = plot(Stream(0.0, [0.1, 0.2, 0.3, 0.9]), Stream(0.25, [0.5, 0.7, 1.0]))
    assert drawn.count("<polyline") == 2


@pytest.mark.parametrize(("text", "slots"), [(None, (None, None)), ("30", (30, 30)), ("0.35,0.46", (35, 46)), ("5,7", (5, 7))])
def test_slots_are_counts_or_shares(text: str | None, slots: tuple[int | None, ...]) -> None:
    assert parse_slots(text, 100) == slots


@pytest.mark.parametrize("text", ["0", "1,2,3", "x"])
def test_other_slots_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"slots|invalid literal"):
        parse_slots(text, 100)


def test_each_lane_gets_its_own_slots_and_the_lead_the_helpers() -> None:
    settings = json.dumps({"slots": 9, "context": 64})
    lead = LaneConfig("lead", "host:0", ("engine", "--settings", settings, "--peer-device", "host:1", "--peer-slots", "9"))
    helper = LaneConfig("helper", "host:1", ("engine", "--settings", settings))
    changed = with_slots(DeskConfig((lead, helper), ()), (3, 5))
    assert [json.loads(lane.argv[2]) for lane in changed.lanes] == [{"slots": 3, "context": 64}, {"slots": 5, "context": 64}]
    assert changed.lanes[0].argv[-2:] == ("--peer-slots", "5")
    assert with_slots(DeskConfig((lead, helper), ()), (None, None)).lanes == (lead, helper)


def test_every_row_is_in_the_file_at_once_and_others_are_named(tmp_path: Path) -> None:
    record = Record(tmp_path / "pair.json", {"cores": 2}, ["a", "b", "c"])
    record.measure("a", lambda: {"tokens_per_s": 1.0})
    found = json.loads((tmp_path / "pair.json").read_text())
    assert found["rows"] == {"a": {"tokens_per_s": 1.0}}
    assert set(found["not_measured"]) == {"b", "c"}
    record.miss(["a", "b"], "no time was left")
    found = json.loads((tmp_path / "pair.json").read_text())
    assert found["not_measured"] == {"b": "no time was left", "c": "the run ended before"}


def test_a_row_that_fails_is_no_row(tmp_path: Path) -> None:
    def fails() -> dict[str, object]:
        raise NotMeasuredError("the engine died")

    record = Record(tmp_path / "pair.json", {}, ["a"])
    with pytest.raises(NotMeasuredError):
        record.measure("a", fails)
    assert record.rows == {}


def test_a_child_is_stopped_at_its_limit_and_what_it_found_stays(tmp_path: Path) -> None:
    script = "import time; print('RESULT {\"a\": 1}', flush=True); time.sleep(60)"
    start = time.monotonic()
    ended = run_child("child", [sys.executable, "-c", script], tmp_path / "log.txt", 4)
    assert time.monotonic() - start < 30
    assert ended.result == "stopped at its limit"
    assert ended.found == {"a": 1}
    assert "[child] RESULT" in (tmp_path / "log.txt").read_text()


def test_a_child_without_time_is_not_started(tmp_path: Path) -> None:
    ended = run_child("child", ["/nowhere"], tmp_path / "log.txt", 1)
    assert ended.note == "not started: no time was left"


def test_a_child_that_fails_says_its_last_words(tmp_path: Path) -> None:
    ended = run_child("child", [sys.executable, "-c", "print('no GPU'); raise SystemExit(3)"], tmp_path / "log.txt", 60)
    assert ended.note == "FAILED with code 3: no GPU"


def test_limits_of_a_pair_are_those_of_its_slowest_part() -> None:
    at = Bandwidths(card=1000.0, pcie=10.0, host=20.0)
    token = TokenBytes(dense=100, experts=1000)
    assert one_limit(token, 1.0, 0.0, at) == pytest.approx(1000 / 1100)
    assert one_limit(token, 0.5, 0.5, at) == pytest.approx(1000 / 600)
    assert one_limit(token, 0.4, 0.4, at) == pytest.approx(40 / 200)
    assert two_limit(token, 0.5, 0.5, at) == pytest.approx(2 * 1000 / 1100)
    assert two_limit(token, 0.4, 0.4, at) == pytest.approx(2 * 40 / 400)


def test_llamas_rates_are_medians_by_number_of_sequences() -> None:
    lines = [
        "",
        *(f'{{"pl": {num}, "speed_tg": {rate}, "speed_pp": 7.0}}' for num, rate in ((1, 3.0), (2, 8.0), (1, 5.0), (2, 6.0), (1, 4.0))),
    ]
    rates = read_rates(lines)
    assert rates["one_tokens_per_s"] == 4.0
    assert rates["two_tokens_per_s"] == 7.0
    assert read_rates(["noise"]) == {"not_measured": "it printed no results"}


def pair_results() -> dict[str, object]:
    span = {"seconds": 1.0, "tokens_per_s": 80.0, "of_before": 0.9, "longest_gap_s": 0.05}
    parts = {"detach_s": 0.1, "wake_s": 0.2, "prompt_s": 0.3}
    wake = {"first": {"before": span, "while both run": span}, "second_first_token_s": 0.6, "of_which": parts}
    rows = {
        "alone, helper asleep": {"tokens_per_s": 300.0, "runs": [300.0], "counters": {"own": 3, "peer": 1}},
        "one after the other": {"together_tokens_per_s": 200.0},
        "wake": wake,
        "two, with link": {"together_tokens_per_s": 400.0, "counters": {"own": 9, "host": 1}},
        "two, without link": {"together_tokens_per_s": 300.0, "counters": {"own": 5, "host": 5}},
        "fits: two, lanes apart": {"together_tokens_per_s": 800.0, "each_tokens_per_s": 400.0},
        "halves: two, with link": {"together_tokens_per_s": 500.0, "each_tokens_per_s": 250.0},
    }
    missing = {"alone, one card": "no time was left"}
    about = {"experts": 100, "slots": [35, 46]}
    model = {"layers": 48, "bytes_per_token": 3 * 10**9, "expert_bytes_per_token": 10**9}
    llama = {
        "experts of 9 layers on the CPU": {"one_tokens_per_s": 100.0, "two_tokens_per_s": 100.0},
        "experts of 0 layers on the CPU": {"two_tokens_per_s": 400.0},
    }
    return {"pair": {"about": about, "rows": rows, "not_measured": missing}, "model": model, "llama": llama, "stages": {}}


def test_ratios_stand_beside_what_they_should_be() -> None:
    found = {aim.what: aim for aim in aims(pair_results())}
    assert found["two at once / one after the other"].is_met
    assert found["two at once: with / without link"].value == pytest.approx(4 / 3)
    assert found["rows of the host pool: with / without link"].value == pytest.approx(0.2)
    assert found["two at once / llama.cpp's two, caps on"].value == pytest.approx(4.0)
    assert found["one request / llama.cpp's one, caps on"].value == pytest.approx(3.0)
    assert found["two at once / llama.cpp's two, everything on cards"].value == pytest.approx(2.0)
    assert found["link, us per layer"].value == pytest.approx(1500 / 48)
    assert not found["link, us per layer"].is_met
    assert found["one request: pair / plain peer tier"].value is None


def test_the_page_has_every_row_and_what_is_missing() -> None:
    text = page(pair_results())
    for row in ("alone, helper asleep", "two, with link", "fits: two, lanes apart"):
        assert f"| {row} |" in text
    assert "own 75%, peer 25%" in text
    assert "* alone, one card: no time was left" in text
    assert "detach 0.1 s, wake 0.2 s, prompt 0.3 s" in text


def test_an_empty_run_has_a_page_too() -> None:
    assert "not measured" in page({})


def test_a_stream_of_a_real_desk_is_timed(model: BenchModel) -> None:
    with shm_folder() as shm_dir:
        options = {"model": model.path, "cards": "host:0", "shm_dir": shm_dir, "state_dir": shm_dir / "state", "context": 128, "chunk": 32}
        with bench_of(load_settings(options, environment={}), (20, 20), 8, Deadline(120)) as bench:
            row = measure_alone(bench, Sizes(tokens=12, repeat=1))
            bench.wait_for(PairPhase.ASLEEP)
    assert row["tokens_per_s"] > 0
    assert row["counters"]["own"] + row["counters"].get("host", 0) >= 12 * SMALL.top_k * SMALL.layers
    assert np.isfinite(row["first_token_s"])
