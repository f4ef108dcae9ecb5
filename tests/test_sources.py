"""Models from a hub: what is chosen, resumed, checked and refused, against a hub on loopback."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import CorruptModelError, MemoryBudgetError, ModelError, SettingsError
from appliance.settings import Settings
from appliance.sources import resolve, store
from appliance.sources.choice import SourceFile, choose_model, group_models
from appliance.sources.fetch import read_token
from appliance.sources.hub import Hub, part_path
from appliance.sources.reference import HubReference, parse_folder_choice, parse_hub_reference
from appliance.sources.store import ModelStore
from tests.fake_hub import COMMIT, FakeHub, fake_hub

ONE = HubReference("owner", "repo", "main", "Q4_K_M")
CONTENT = random.Random(7).randbytes(3_000_001)
FILES = {"README.md": b"hello", "m-Q8_0.gguf": b"x" * 10, "m-Q4_K_M.gguf": CONTENT, "mmproj-m-Q4_K_M.gguf": b"eyes"}


def ignore(_done: int, _total: int) -> None:
    """Progress that nobody wants."""


def fetch(folder: Path, hub: FakeHub, reference: HubReference = ONE, token: str | None = None) -> Path:
    return ModelStore(folder).fetch(reference, Hub(hub.url, token, first_wait_s=0.001), ignore)


def names(*paths: str) -> list[SourceFile]:
    return [SourceFile(path, 1 << 20) for path in paths]


# What is meant


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://owner/repo", HubReference("owner", "repo", "main", None)),
        ("hf://owner/repo:Q4_K_M", HubReference("owner", "repo", "main", "Q4_K_M")),
        ("hf://o.w-n_er/re.po-GGUF@v1/beta:UD-IQ3_S", HubReference("o.w-n_er", "re.po-GGUF", "v1/beta", "UD-IQ3_S")),
    ],
)
def test_a_reference_is_read_from_the_setting(text: str, expected: HubReference) -> None:
    reference = parse_hub_reference(Settings(model=Path(text)).model or Path())
    assert reference == expected
    assert parse_hub_reference(Path(str(reference))) == expected


@pytest.mark.parametrize(
    "text", ["hf://owner", "hf://", "hf://owner/repo/file", "hf://../repo", "hf://owner/repo:", "hf://owner/repo@a..b"]
)
def test_a_reference_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="hf://owner/repo"):
        parse_hub_reference(Path(text))


def test_a_path_is_no_reference() -> None:
    for path in ("/models/hf:/x", "model.gguf", "hf/owner/repo"):
        assert parse_hub_reference(Path(path)) is None


def test_a_folder_with_a_word_is_a_choice_unless_that_is_its_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    assert parse_folder_choice(tmp_path / "a:Q4_K_M") == (tmp_path / "a", "Q4_K_M")
    assert parse_folder_choice(tmp_path / "b:Q4_K_M") is None
    (tmp_path / "a:Q4_K_M").mkdir()
    assert parse_folder_choice(tmp_path / "a:Q4_K_M") is None


def test_a_word_is_whole() -> None:
    files = names("m-Q4_K_M.gguf", "m-Q4_K.gguf", "m-IQ4_XS.gguf", "m-Q4_0.gguf")
    assert choose_model(files, "q4_k", "x").name == "m-Q4_K"
    with pytest.raises(ModelError, match="holds no model whose name has Q4_XS"):
        choose_model(files, "Q4_XS", "x")


def test_the_plain_quantisation_goes_before_the_one_with_a_longer_name() -> None:
    files = names("m-UD-Q4_K_XL.gguf", "m-Q4_K_XL.gguf")
    assert choose_model(files, "Q4_K_XL", "x").name == "m-Q4_K_XL"
    assert choose_model(files, "UD-Q4_K_XL", "x").name == "m-UD-Q4_K_XL"
    assert choose_model(files[:1], "Q4_K_XL", "x").name == "m-UD-Q4_K_XL"


def test_all_shards_are_chosen_in_order_also_from_a_folder_of_their_own() -> None:
    files = names("Q4_K_M/m-00002-of-00002.gguf", "Q8_0/m-00001-of-00001.gguf", "Q4_K_M/m-00001-of-00002.gguf")
    chosen = choose_model(files, "Q4_K_M", "x")
    assert [file.path for file in chosen.files] == ["Q4_K_M/m-00001-of-00002.gguf", "Q4_K_M/m-00002-of-00002.gguf"]


def test_a_missing_shard_is_refused() -> None:
    with pytest.raises(ModelError, match="number 2 is missing"):
        choose_model(names("m-00001-of-00003.gguf", "m-00003-of-00003.gguf"), None, "x")


def test_several_models_are_listed_with_their_sizes() -> None:
    with pytest.raises(ModelError, match=r"holds 2 models; name one by :QUANT: m-A \(1\.00 MiB\), m-B"):
        choose_model(names("m-B.gguf", "m-A.gguf", "imatrix-m.gguf", "mmproj-F16.gguf"), None, "x")


@pytest.mark.parametrize("path", ["../m.gguf", "/etc/m.gguf", "a/../../m.gguf", "./m.gguf", "a//m.gguf"])
def test_a_path_that_leads_out_of_the_folder_is_refused(path: str) -> None:
    with pytest.raises(ModelError, match="leads out of its folder"):
        choose_model(names(path), None, "x")


def test_a_source_without_a_model_is_refused() -> None:
    with pytest.raises(ModelError, match="x holds no GGUF model"):
        choose_model(names("README.md", "mmproj-F16.gguf"), None, "x")


@given(st.lists(st.text(alphabet="abQ4_-.0", min_size=1, max_size=12).map(lambda text: f"{text}.gguf"), unique=True, max_size=8))
def test_every_whole_model_is_in_exactly_one_group(paths: list[str]) -> None:
    groups = group_models(names(*paths), "x")
    assert sorted(file.path for group in groups for file in group.files) == sorted(path for path in paths if Path(path).suffix == ".gguf")


# Getting it


def test_a_model_is_fetched_whole_and_found_again_without_the_hub(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub:
        path = fetch(tmp_path, hub)
    assert path == tmp_path / "owner" / "repo" / COMMIT / "m-Q4_K_M.gguf"
    assert path.read_bytes() == CONTENT
    assert ModelStore(tmp_path).find(ONE) == path
    assert [found.name for found in path.parent.iterdir()] == ["m-Q4_K_M.gguf"]


def test_a_second_fetch_asks_the_hub_nothing(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub:
        fetch(tmp_path, hub)
        asked = len(hub.requests)
        fetch(tmp_path, hub)
        assert len(hub.requests) == asked


def test_all_shards_are_fetched(tmp_path: Path) -> None:
    shards = {f"big/m-Q4_K_M-0000{n}-of-00003.gguf": CONTENT[n * 100 : n * 100 + 1000 + n] for n in (1, 2, 3)}
    seen: list[tuple[int, int]] = []
    with fake_hub(shards) as hub:
        path = ModelStore(tmp_path).fetch(ONE, Hub(hub.url, None), lambda done, total: seen.append((done, total)))
    assert path.name == "m-Q4_K_M-00001-of-00003.gguf"
    assert {found.name: found.read_bytes() for found in path.parent.iterdir()} == {Path(n).name: c for n, c in shards.items()}
    assert seen == sorted(seen)
    assert seen[-1] == (3006, 3006)


def test_a_broken_connection_is_resumed_where_it_broke(tmp_path: Path) -> None:
    with fake_hub(FILES, break_after=1_000_000, breaks_left=2) as hub:
        assert fetch(tmp_path, hub).read_bytes() == CONTENT
        ranges = hub.served_ranges("m-Q4_K_M.gguf")
    assert ranges[0] is None
    starts = [int(str(given).removeprefix("bytes=").rstrip("-")) for given in ranges[1:]]
    assert starts == sorted(starts)
    assert starts[0] > 0


def test_what_another_run_has_left_is_resumed(tmp_path: Path) -> None:
    part = part_path(tmp_path / "owner" / "repo" / COMMIT / "m-Q4_K_M.gguf")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:2_000_000])
    with fake_hub(FILES) as hub:
        assert fetch(tmp_path, hub).read_bytes() == CONTENT
        assert hub.served_ranges("m-Q4_K_M.gguf") == ["bytes=2000000-"]


@pytest.mark.parametrize("behaviour", ["ignores_ranges", "wrong_range"])
def test_a_store_that_cannot_resume_is_read_anew(tmp_path: Path, behaviour: str) -> None:
    part = part_path(tmp_path / "owner" / "repo" / COMMIT / "m-Q4_K_M.gguf")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:1000])
    with fake_hub(FILES, **{behaviour: True}) as hub:
        assert fetch(tmp_path, hub).read_bytes() == CONTENT


def test_a_rest_that_is_longer_than_the_file_is_no_longer_believed(tmp_path: Path) -> None:
    part = part_path(tmp_path / "owner" / "repo" / COMMIT / "m-Q4_K_M.gguf")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT + b"more")
    with fake_hub(FILES) as hub:
        with pytest.raises(CorruptModelError, match="SHA-256"):
            fetch(tmp_path, hub)
        assert fetch(tmp_path, hub).read_bytes() == CONTENT


def test_a_file_with_another_hash_is_removed_and_never_used(tmp_path: Path) -> None:
    with fake_hub(FILES, corrupt=True) as hub:
        with pytest.raises(CorruptModelError, match="the hub says"):
            fetch(tmp_path, hub)
        assert ModelStore(tmp_path).find(ONE) is None
        assert list((tmp_path / "owner" / "repo" / COMMIT).iterdir()) == []
        hub.corrupt = False
        assert fetch(tmp_path, hub).read_bytes() == CONTENT


def test_a_hub_that_stays_away_ends_in_a_sentence_and_keeps_what_is_there(tmp_path: Path) -> None:
    with fake_hub(FILES, status=503) as hub:
        with pytest.raises(ModelError, match=r"answered 503 .* start again to go on"):
            fetch(tmp_path, hub)
        hub.status = None
        hub.break_after, hub.breaks_left = 1_000_000, 1
        fetch(tmp_path, hub)


def test_too_little_room_is_refused_before_anything_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _path: usage._replace(free=2_000_000))
    with fake_hub(FILES) as hub:
        with pytest.raises(MemoryBudgetError, match=r"needs 2\.86 MiB more in .* but 1\.91 MiB are free") as caught:
            fetch(tmp_path, hub)
        assert not hub.served_ranges("m-Q4_K_M.gguf")
    assert caught.value.param == "models_dir"


def test_room_is_needed_only_for_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_path(tmp_path / "owner" / "repo" / COMMIT / "m-Q4_K_M.gguf")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:2_000_000])
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda _path: usage._replace(free=1_100_000))
    with fake_hub(FILES) as hub:
        assert fetch(tmp_path, hub).read_bytes() == CONTENT


def test_a_file_that_was_cut_afterwards_is_not_used(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub:
        path = fetch(tmp_path, hub)
        os.truncate(path, 100)
        assert ModelStore(tmp_path).find(ONE) is None
        assert fetch(tmp_path, hub).read_bytes() == CONTENT


def test_a_damaged_record_counts_as_none(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub:
        fetch(tmp_path, hub)
    for text in ("", "{", "[]", '{"version": 2}', '{"version": 1, "files": []}'):
        (tmp_path / "owner" / "repo" / "main--Q4_K_M.json").write_text(text)
        assert ModelStore(tmp_path).find(ONE) is None


def test_a_private_repository_is_read_with_the_token_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_secret\n")
    with fake_hub(FILES, token="hf_secret") as hub:
        with pytest.raises(ModelError, match=r"no repository owner/repo without a token.*hub_token_file"):
            fetch(tmp_path, hub)
        with pytest.raises(ModelError, match="no repository owner/repo for this token"):
            fetch(tmp_path, hub, token="wrong")
        assert fetch(tmp_path, hub, token=read_token(tmp_path / "token")).read_bytes() == CONTENT


def test_a_gated_repository_says_where_its_terms_are(tmp_path: Path) -> None:
    with (
        fake_hub(FILES, token="t", gated=True) as hub,
        pytest.raises(ModelError, match=f"terms to be accepted: do so at {hub.url}/owner/repo"),
    ):
        fetch(tmp_path, hub)


def test_what_the_hub_does_not_have_is_named(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub:
        with pytest.raises(ModelError, match="has no repository owner/other"):
            fetch(tmp_path, hub, HubReference("owner", "other", "main", None))
        with pytest.raises(ModelError, match="no branch, tag or commit 'v9'"):
            fetch(tmp_path, hub, HubReference("owner", "repo", "v9", None))
        with pytest.raises(ModelError, match=r"holds 2 models; name one by :QUANT"):
            fetch(tmp_path, hub, HubReference("owner", "repo", "main", None))


def test_a_hub_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"http://127\.0\.0\.1:9 cannot be read for owner/repo"):
        ModelStore(tmp_path).fetch(ONE, Hub("http://127.0.0.1:9", None, first_wait_s=0.001), ignore)


@pytest.mark.parametrize("content", ["", "two words", "\n"])
def test_a_token_file_without_one_token_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(SettingsError, match="one access token"):
        read_token(tmp_path / "token")


def test_a_folder_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(SettingsError, match="models_dir /proc/x cannot be written"):
        ModelStore(Path("/proc/x")).fetch(ONE, Hub("http://127.0.0.1:9", None), ignore)


# From the setting to the path


def test_the_setting_leads_to_the_fetched_file_and_progress_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    with fake_hub(FILES) as hub:
        settings = Settings(model=Path("hf://owner/repo:Q4_K_M"), models_dir=tmp_path, hub_url=hub.url)
        assert resolve.needs_fetching(settings)
        resolved = resolve.resolve_model(settings, lambda load: told.append(f"{load.stage} {load.done_bytes}/{load.total_bytes}"))
    assert resolved.model is not None
    assert resolved.model.read_bytes() == CONTENT
    assert told[-1] == f"download {len(CONTENT)}/{len(CONTENT)}"
    assert not resolve.needs_fetching(settings)
    assert resolve.resolve_model(settings).model == resolved.model


def test_the_fetching_process_tells_its_reason(tmp_path: Path) -> None:
    with fake_hub(FILES) as hub, pytest.raises(ModelError, match="holds no model whose name has Q2_K"):
        resolve.resolve_model(Settings(model=Path("hf://owner/repo:Q2_K"), models_dir=tmp_path, hub_url=hub.url))


def test_a_quantisation_is_chosen_from_a_folder(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("m-Q8_0.gguf", "sub/m-Q4_K_M-00001-of-00002.gguf", "sub/m-Q4_K_M-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    resolved = resolve.resolve_model(Settings(model=Path(f"{tmp_path}:Q4_K_M")))
    assert resolved.model == tmp_path / "sub/m-Q4_K_M-00001-of-00002.gguf"


def test_without_a_model_the_mounted_one_is_taken_and_else_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolve, "MOUNTED_MODELS", tmp_path / "models")
    assert resolve.resolve_model(Settings()).model == resolve.with_model(Settings()).model
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "m.gguf").write_bytes(b"GGUF")
    assert resolve.resolve_model(Settings()).model == tmp_path / "models"
