"""Settings: three sources, one model, and errors that name what is wrong."""

from pathlib import Path

import pytest

from appliance.errors import SettingsError
from appliance.settings import Settings, load_settings, parse_cards

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
        ({"TANDEM_PORT": "70000"}, ["port", "70000", "the environment", "65535"]),
        ({"TANDEM_CARDS": "tpu:0"}, ["tpu:0", "host:N"]),
        ({"TANDEM_CARDS": "host:0,cuda:0"}, ["mixes"]),
        ({"TANDEM_CONTEXT": "100", "TANDEM_CHUNK": "200"}, ["chunk (200)", "context (100)"]),
        ({"TANDEM_CONFIG": "/does/not/exist.yaml"}, ["/does/not/exist.yaml"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_value_and_source(environment: dict[str, str], words: list[str]) -> None:
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


def test_cards_are_one_or_two_different_ones_of_a_kind() -> None:
    assert parse_cards("host:0, host:1") == ("host:0", "host:1")
    for wrong in ("host:0,host:0", "host:0,host:1,host:2", "host", "host:x", ""):
        with pytest.raises(ValueError, match=r"."):
            parse_cards(wrong)


def test_every_setting_stands_in_its_page_with_its_default() -> None:
    rows = {line.split("|")[1].strip(" `"): line for line in DOCS.read_text().splitlines() if line.startswith("| `")}
    assert set(rows) == set(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        assert (field.description or "") in rows[name], name
        shown = "" if field.default in (None, "", ()) else str(field.default)
        assert rows[name].split("|")[2].strip(" `") == shown, name
