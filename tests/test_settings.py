"""Settings: three sources, one model, and errors that name what is wrong."""

import re
from pathlib import Path

import pytest

from appliance.errors import SettingsError
from appliance.settings import Settings, load_settings, parse_cards, setting_fields

DOCS = Path(__file__).parent.parent / "docs" / "settings.md"


def test_the_command_line_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("port: 1001\nchunk: 64\ncontext: 512\n")
    settings = load_settings({"port": 1003, "chunk": None}, environment={"TANDEM_PORT": "1002", "TANDEM_CHUNK": "32"}, config=file)
    assert (settings.port, settings.chunk, settings.context) == (1003, 32, 512)


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("allowed_hosts: [one.example, two.example]\n")
    assert load_settings(environment={"TANDEM_CONFIG": str(file)}).allowed_hosts == ("one.example", "two.example")


def test_a_list_in_the_environment_is_separated_by_commas() -> None:
    assert load_settings(environment={"TANDEM_ALLOWED_HOSTS": "a.example, b.example"}).allowed_hosts == ("a.example", "b.example")


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings(environment={"TANDEM_PORT": ""}).port == Settings().port


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"TANDEM_PROT": "1"}, ["TANDEM_PROT", "TANDEM_PORT"]),
        ({"TANDEM_ELASTIC": "true"}, ["TANDEM_ELASTIC is not a setting; did you mean TANDEM_ELASTIC_ENABLED?"]),
        ({"TANDEM_PORT": "70000"}, ["TANDEM_PORT = '70000'", "65535"]),
        ({"TANDEM_DRAIN_S": "inf"}, ["TANDEM_DRAIN_S", "inf", "finite"]),
        ({"TANDEM_DRAIN_S": "1e10"}, ["TANDEM_DRAIN_S", "it must be at most 1000000000"]),
        ({"TANDEM_REQUEST_TIMEOUT_S": "1e400"}, ["TANDEM_REQUEST_TIMEOUT_S", "finite"]),
        ({"TANDEM_ISA": "sse"}, ["TANDEM_ISA = 'sse': it must be 'auto', 'portable', 'avx2' or 'avx512'"]),
        ({"TANDEM_ELASTIC_ENABLED": "maybe"}, ["TANDEM_ELASTIC_ENABLED = 'maybe': it must be true or false"]),
        ({"TANDEM_CARDS": "tpu:0"}, ["tpu:0", "host:N"]),
        ({"TANDEM_CARDS": "host:0,cuda:0"}, ["mixes"]),
        ({"TANDEM_CONTEXT": "100", "TANDEM_CHUNK": "200"}, ["TANDEM_CHUNK = 200", "TANDEM_CONTEXT = 100"]),
        (
            {"TANDEM_DEFAULT_MAX_TOKENS": "200", "TANDEM_MAX_TOKENS_LIMIT": "100"},
            ["TANDEM_DEFAULT_MAX_TOKENS = 200 is larger than TANDEM_MAX_TOKENS_LIMIT = 100"],
        ),
        (
            {"TANDEM_PEER_CHECK": "require", "TANDEM_CARDS": "host:0,host:1"},
            ["TANDEM_PEER_CHECK = require needs two GPUs to try, but TANDEM_CARDS = host:0,host:1"],
        ),
        ({"TANDEM_PEER_CHECK": "require", "TANDEM_CARDS": "cuda:0"}, ["needs two GPUs to try, but TANDEM_CARDS = cuda:0"]),
        ({"TANDEM_CONFIG": "/does/not/exist.yaml"}, ["/does/not/exist.yaml"]),
    ],
)
def test_a_wrong_setting_is_named_as_it_was_written_with_its_value(environment: dict[str, str], words: list[str]) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(environment=environment)
    for word in words:
        assert word in caught.value.message


@pytest.mark.parametrize("text", ["prot: 1\n", "- a\n", "port: [\n"])
def test_a_wrong_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=r"tandem\.yaml"):
        load_settings(environment={}, config=file)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"port: [\nx: 1\n", "is not valid YAML at line 3 column 1, in what begins at line 1 column 7; look at indentation"),
        (b"port: 1\n\tx: 2\n", "is not valid YAML at line 2 column 1; look at indentation (spaces, no tabs)"),
        (b"a: \x01\n", "is not valid YAML; look at"),
        (b"a: \xff\n", "is no text in UTF-8; save it as that"),
        (b"a: " + b"[" * 5000, "is nested too deeply"),
    ],
)
def test_a_file_that_is_no_yaml_is_told_where_in_words_of_ours(tmp_path: Path, content: bytes, sentence: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_bytes(content)
    with pytest.raises(SettingsError) as caught:
        load_settings(environment={}, config=file)
    assert f"{file} {sentence}" in caught.value.message
    assert "<" not in caught.value.message


def test_a_limit_below_the_default_length_needs_no_word_on_that() -> None:
    settings = load_settings({"max_tokens_limit": 100}, environment={})
    assert load_settings(settings.model_dump(exclude={"elastic"}), environment={}).max_tokens_limit == 100


ORIGINS = ["*", "null", "http://lab.example", "https://lab.example:8443", "http://127.0.0.1:3000", "http://[::1]:8080", "app://x"]
NO_ORIGINS = ["lab.example", "https://lab.example/", "https://lab.example/app", "https://Lab.example", "https://*.example", "http://a:80"]
HOSTS = ["*", "lab.example", "LAB.example.", "lab.example:8080", "10.0.0.7", "fd00::7", "[fd00::7]:8080", "tandem_1"]
NO_HOSTS = ["https://lab.example", "lab.example/app", "*.example", "lab example", "lab.example:http", "a:1:2/"]


@pytest.mark.parametrize(("name", "good", "bad"), [("cors_origins", ORIGINS, NO_ORIGINS), ("allowed_hosts", HOSTS, NO_HOSTS)])
def test_what_no_browser_sends_is_refused(name: str, good: list[str], bad: list[str]) -> None:
    pattern = Settings.model_json_schema()["properties"][name]["items"]["pattern"]
    assert getattr(load_settings({name: good}, environment={}), name) == tuple(good)
    assert all(re.fullmatch(pattern, value) for value in good)
    for value in bad:
        with pytest.raises(SettingsError, match=f"--{name.replace('_', '-')} = '{re.escape(value)}': it can never match; write "):
            load_settings({name: ["*", value]}, environment={})
        assert value == "http://a:80" or not re.fullmatch(pattern, value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("port: 1\nchunk: 64\nport: 2\n", "port stands twice, in lines 1 and 3; leave one out"),
        ("elastic:\n  enabled: true\n  hold_s: 1\n  hold_s: 2\n", "elastic.hold_s stands twice, in lines 3 and 4; leave one out"),
        ("elastic: {enabled: true}\nelastic: {hold_s: 1}\n", "elastic stands twice, in lines 1 and 2; leave one out"),
        (
            "elastic: {enabled: true, hold_s: 1}\nelastic_hold_s: 2\n",
            "elastic.hold_s in line 1 and elastic_hold_s in line 2 are the same setting; leave one out",
        ),
    ],
)
def test_what_stands_twice_in_a_file_is_refused_with_both_lines(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(environment={}, config=file)
    assert caught.value.message == f"{file}: {sentence}"


def test_a_setting_is_named_as_the_one_who_is_obeyed_wrote_it(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("shm_dir: a\nport: 1001\nelastic: {enabled: true, hold_s: 5}\n")
    settings = load_settings({"port": "1003"}, environment={"TANDEM_PORT": "1002", "TANDEM_CHUNK": "32"}, config=file)
    assert settings.as_written("port = 1003, chunk = 32, elastic_hold_s and shm_dir, but no port, max_queue or /etc/shm_dir/x") == (
        f"--port = 1003, TANDEM_CHUNK = 32, elastic.hold_s ({file}) and shm_dir ({file}), but no port, max_queue or /etc/shm_dir/x"
    )
    for wrong, named in (
        ("shm_dir: {a: 1}", f"shm_dir ({file}) = an object: it must be a path"),
        ("allowed_hosts: {a: 1}", f"allowed_hosts ({file}) = an object: it must be a list"),
        ("allowed_hosts: [[5]]", f"allowed_hosts ({file}) = a list: it must be a string"),
        ("port:", f"port ({file}) = null: it must be a whole number"),
        ("port: true", f"port ({file}) = 'true': it must be a whole number"),
        ("port: 1:30", f"port ({file}) = '1:30': it must be a whole number"),
        ("drain_s: yes", f"drain_s ({file}) = 'yes': it must be a number"),
        ("elastic: {enabled: x}", f"elastic.enabled ({file}) = 'x': it must be true or false"),
    ):
        file.write_text(f"{wrong}\n")
        with pytest.raises(SettingsError) as caught:
            load_settings(environment={}, config=file)
        assert caught.value.message.startswith(named)


def test_the_elastic_block_is_one_mapping_in_the_file_and_flat_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("elastic: {enabled: true, hold_s: 5, bar_s: 7}\n")
    settings = load_settings({"elastic_hold_s": 6.0}, environment={"TANDEM_ELASTIC_LINK": "false"}, config=file)
    elastic = settings.elastic
    assert (elastic.enabled, elastic.hold_s, elastic.bar_s, elastic.link, elastic.peer) == (True, 6.0, 7.0, False, True)
    assert not Settings().elastic.enabled


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"TANDEM_CARDS": "host:0"}, "TANDEM_ELASTIC_ENABLED needs two cards, but TANDEM_CARDS = host:0"),
        ({"TANDEM_SLOTS": "0"}, "TANDEM_ELASTIC_ENABLED needs expert slots to share, but TANDEM_SLOTS = 0"),
        ({"TANDEM_ELASTIC_PEER": "0", "TANDEM_ELASTIC_LINK": "0"}, "without TANDEM_ELASTIC_PEER and TANDEM_ELASTIC_LINK"),
        ({"TANDEM_ELASTIC_LINK": "0", "TANDEM_ELASTIC_LINK_THREADS": "4"}, "TANDEM_ELASTIC_LINK_THREADS = 4 has no effect while TANDEM_EL"),
        ({"TANDEM_ELASTIC_HOLD_THREADS": "4", "TANDEM_POOL_THREADS": "4"}, "TANDEM_ELASTIC_HOLD_THREADS = 4 leaves the lead none"),
        ({"TANDEM_ELASTIC_HOLD_S": "-1"}, "TANDEM_ELASTIC_HOLD_S = '-1'"),
        ({"TANDEM_ELASTIC_HOLD_S": "inf"}, "TANDEM_ELASTIC_HOLD_S = 'inf'"),
        ({"TANDEM_ELASTIC_WAKE_LIMIT_S": "0.001"}, "it must be at least 1"),
        ({"TANDEM_ELASTIC_HOLD": "1"}, "did you mean TANDEM_ELASTIC_HOLD_S"),
    ],
)
def test_a_pair_that_makes_no_sense_is_refused_with_a_sentence(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        load_settings(environment={"TANDEM_ELASTIC_ENABLED": "true", **environment})


def test_elastic_settings_without_a_word_on_elastic_enabled_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text("elastic: {bar_s: 7}\n")
    with pytest.raises(SettingsError) as caught:
        load_settings({"elastic_hold_s": "5"}, environment={"TANDEM_ELASTIC_LINK": "false"}, config=file)
    assert caught.value.message == (
        f"elastic.bar_s ({file}) and TANDEM_ELASTIC_LINK and --elastic-hold-s have no effect while elastic_enabled is off; "
        "set elastic_enabled to true, or to false to keep them for later"
    )
    for switch in (True, False):
        assert load_settings({"elastic_enabled": switch}, environment={}, config=file).elastic.bar_s == 7


@pytest.mark.parametrize("text", ["elastic: yes please\n", "elastic: {holds: 1}\n", "elastic_enabled: x\n"])
def test_a_wrong_block_in_the_file_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError, match="elastic"):
        load_settings(environment={}, config=file)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("elastic: true\n", "{file}: elastic must hold a mapping of settings such as {{enabled: true}}, not 'true'"),
        ("- port\n", "{file} must hold a mapping of settings, not a list"),
    ],
)
def test_what_is_no_mapping_in_the_file_is_told_as_it_was_written(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "tandem.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load_settings(environment={}, config=file)
    assert caught.value.message == sentence.format(file=file)


def test_cards_are_one_or_two_different_ones_of_a_kind() -> None:
    assert parse_cards("host:0, host:1") == ("host:0", "host:1")
    for wrong in ("host:0,host:0", "cuda:1,cuda:01", "host:0,host:1,host:2", "host", "host:x", ""):
        with pytest.raises(ValueError, match=r"."):
            parse_cards(wrong)


def test_every_setting_stands_in_its_page_with_its_default() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in DOCS.read_text().splitlines() if line.startswith("| `")}
    assert set(rows) == set(setting_fields())
    for name, field in setting_fields().items():
        assert (field.description or "") in rows[name], name
        shown = "" if field.default in (None, "", ()) else str(field.default)
        assert rows[name].split("|")[2].strip(" `") == shown, name
