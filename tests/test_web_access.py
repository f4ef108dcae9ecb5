"""Who is answered: Host header, API keys, path prefix, CORS. Through the WSGI application, without a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest
from flask import Flask
from hypothesis import given
from hypothesis import strategies as st
from werkzeug.test import Client

from appliance.desk.config import DeskConfig, LaneConfig
from appliance.desk.desk import Desk
from appliance.errors import SettingsError
from appliance.gguf_file import open_gguf
from appliance.settings import Settings
from appliance.text.chat_template import ChatTemplate
from appliance.text.tokenizer import Tokenizer
from appliance.web.app import create_app
from appliance.web.auth import KeyRing
from appliance.web.hosts import allowed_names, host_name, is_allowed
from appliance.web.model_info import ModelInfo
from tests.fakes_web import write_vocabulary

MakeApp: TypeAlias = Callable[..., Flask]


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeApp]:
    """Makes applications over a desk that was never started, and so is loading for ever."""
    gguf = open_gguf(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "vocabulary.gguf"))
    tokenizer, template = Tokenizer.from_gguf(gguf), ChatTemplate.from_gguf(gguf)
    info = ModelInfo(name="m", context=512, vocab=320, lanes=1, created=0)

    def make(**settings: object) -> Flask:
        desk = Desk(DeskConfig(lanes=(LaneConfig("lead", "host:0", ("true",)),), loader_argv=("true",)))
        return create_app(Settings.model_validate(settings), desk, tokenizer, template, info)

    yield make
    template.close()


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8080", "127.0.0.1:9", "[::1]:8080", "lab.example", "lab.example.", "[fd00::7]:8080"]
)
def test_known_host_names_are_answered(application: MakeApp, host: str) -> None:
    client = application(allowed_hosts="lab.example, fd00::7").test_client()
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "", "127.0.0.1.evil.example:80"])
def test_unknown_host_names_are_refused(application: MakeApp, host: str) -> None:
    answer = application().test_client().get("/v1/models", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.get_json()["error"]["code"] == "host_not_allowed"


def test_probes_are_answered_under_any_host_name(application: MakeApp) -> None:
    client = application().test_client()
    assert client.get("/livez", headers={"Host": "10.1.2.3:8080"}).status_code == 200
    assert client.get("/readyz", headers={"Host": "10.1.2.3:8080"}).status_code == 503


def test_a_star_allows_every_host_name(application: MakeApp) -> None:
    client = application(allowed_hosts="*").test_client()
    assert client.get("/v1/models", headers={"Host": "anything.example"}).status_code == 200


def test_a_server_on_all_interfaces_is_reached_by_address_but_not_by_unknown_name() -> None:
    names = allowed_names(Settings(host="0.0.0.0"))
    assert names is not None
    assert is_allowed("192.168.1.7:8080", names, any_address=True)
    assert is_allowed("[fe80::1]:8080", names, any_address=True)
    assert not is_allowed("rebound.example:8080", names, any_address=True)
    assert not is_allowed("192.168.1.7:8080", names, any_address=False)


@given(st.text(max_size=40))
def test_no_host_header_breaks_the_check(text: str) -> None:
    names = allowed_names(Settings())
    assert names is not None
    assert is_allowed(text, names, any_address=True) in (True, False)
    assert host_name(text) == host_name(text).lower()


def keyed(application: MakeApp, tmp_path: Path) -> Client:
    keys = tmp_path / "keys"
    keys.write_text("# the lab\nfirst-key\n\n  second-key  \n")
    return application(api_key_file=str(keys)).test_client()


@pytest.mark.parametrize(
    "headers", [{"Authorization": "Bearer first-key"}, {"authorization": "bearer second-key"}, {"X-Api-Key": "second-key"}]
)
def test_every_key_of_the_file_is_accepted(application: MakeApp, tmp_path: Path, headers: dict[str, str]) -> None:
    assert keyed(application, tmp_path).get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}, {"X-Api-Key": "# the lab"}, {"X-Api-Key": ""}],
)
def test_anything_else_is_401(application: MakeApp, tmp_path: Path, headers: dict[str, str]) -> None:
    client = keyed(application, tmp_path)
    for path in ("/v1/models", "/status", "/metrics", "/no-such-route"):
        answer = client.get(path, headers=headers)
        assert answer.status_code == 401
        assert answer.get_json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"x-api-key": "first-key"}, {"Authorization": "Bearer first-key"}])
def test_messages_take_a_key_in_both_forms(application: MakeApp, tmp_path: Path, headers: dict[str, str]) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}]}
    assert keyed(application, tmp_path).post("/v1/messages/count_tokens", json=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("path", "headers"), [("/v1/messages", {}), ("/v1/messages/no-such-route", {}), ("/v1/models", {"anthropic-version": "2023-06-01"})]
)
def test_messages_without_a_key_are_401_in_anthropics_shape(
    application: MakeApp, tmp_path: Path, path: str, headers: dict[str, str]
) -> None:
    answer = keyed(application, tmp_path).get(path, headers=headers)
    assert answer.status_code == 401
    assert (answer.get_json()["type"], answer.get_json()["error"]["type"]) == ("error", "authentication_error")
    assert answer.headers["request-id"] == answer.get_json()["request_id"]


def test_messages_under_an_unknown_host_name_are_403_in_anthropics_shape(application: MakeApp) -> None:
    answer = application().test_client().post("/v1/messages", json={}, headers={"Host": "evil.example"})
    assert (answer.status_code, answer.get_json()["error"]["type"]) == (403, "permission_error")


def test_the_version_header_changes_nothing_on_other_routes(application: MakeApp) -> None:
    client = application().test_client()
    for path in ("/v1/chat/completions", "/v1/modelsx", "/v1/messagesx"):
        answer = client.get(path, headers={"anthropic-version": "2023-06-01"})
        assert set(answer.get_json()) == {"error"}
        assert "request-id" not in answer.headers


def test_messages_are_found_under_the_prefix(application: MakeApp) -> None:
    answer = application(url_prefix="/lab/me").test_client().get("/lab/me/v1/messages")
    assert (answer.status_code, answer.get_json()["error"]["type"]) == (405, "not_found_error")


def test_probes_and_page_need_no_key(application: MakeApp, tmp_path: Path) -> None:
    client = keyed(application, tmp_path)
    for path in ("/livez", "/readyz", "/", "/static/no-such-file"):
        with client.get(path) as answer:
            assert answer.status_code != 401


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_key_file_without_a_key_is_refused_at_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(SettingsError, match="no API key"):
        KeyRing.from_file(tmp_path / "keys")


def test_a_missing_key_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="the keys cannot be read"):
        KeyRing.from_file(tmp_path / "nowhere")


@pytest.mark.parametrize("path", ["/lab/me/v1/models", "/v1/models"])
def test_routes_answer_with_and_without_the_prefix(application: MakeApp, path: str) -> None:
    assert application(url_prefix="/lab/me").test_client().get(path).status_code == 200


@pytest.mark.parametrize("path", ["/lab/me/livez", "/livez"])
def test_probes_answer_with_and_without_the_prefix(application: MakeApp, path: str) -> None:
    assert application(url_prefix="/lab/me").test_client().get(path).status_code == 200


@pytest.mark.parametrize("path", ["/lab/meow/v1/models", "/lab/v1/models", "/lab/me/lab/me/v1/models"])
def test_what_only_resembles_the_prefix_is_404(application: MakeApp, path: str) -> None:
    assert application(url_prefix="/lab/me").test_client().get(path).status_code == 404


def test_the_bare_prefix_leads_to_the_page(application: MakeApp) -> None:
    answer = application(url_prefix="/lab/me").test_client().get("/lab/me")
    assert answer.status_code == 308
    assert answer.headers["Location"] == "/lab/me/"


def test_a_prefix_that_the_proxy_names_is_taken_off(application: MakeApp) -> None:
    client = application().test_client()
    assert client.get("/hub/u/v1/models", headers={"X-Forwarded-Prefix": "/hub/u"}).status_code == 200
    assert client.get("/v1/models", headers={"X-Forwarded-Prefix": "/hub/u"}).status_code == 200


@pytest.mark.parametrize("value", ["//evil.example", "/a\\b", "https://evil.example", "/../", "/x y"])
def test_a_forwarded_prefix_that_is_no_path_is_ignored(application: MakeApp, value: str) -> None:
    assert application().test_client().get("/v1/models", headers={"X-Forwarded-Prefix": value}).status_code == 200


def test_cors_is_off_by_default(application: MakeApp) -> None:
    answer = application().test_client().get("/v1/models", headers={"Origin": "https://chat.example"})
    assert not [name for name, _ in answer.headers if name.startswith("Access-Control")]


def test_cors_answers_only_the_configured_origin(application: MakeApp) -> None:
    client = application(cors_origins="https://chat.example").test_client()
    question = {"Origin": "https://chat.example", "Access-Control-Request-Headers": "authorization,content-type"}
    allowed = client.options("/v1/chat/completions", headers=question)
    assert allowed.headers["Access-Control-Allow-Origin"] == "https://chat.example"
    assert allowed.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    refused = client.options("/v1/chat/completions", headers={"Origin": "https://other.example"})
    assert "Access-Control-Allow-Origin" not in refused.headers


def test_every_response_has_the_protective_headers(application: MakeApp) -> None:
    client = application().test_client()
    for path in ("/", "/v1/models", "/no-such-route"):
        with client.get(path) as answer:
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_the_page_says_so_when_it_was_not_built(application: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.web.page.STATIC_FOLDER", tmp_path)
    client = application().test_client()
    answer = client.get("/")
    assert answer.status_code == 503
    assert "make setup" in answer.get_data(as_text=True)


def test_static_files_stay_inside_their_folder(application: MakeApp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "page.js").write_text("1")
    (tmp_path / "secret").write_text("2")
    monkeypatch.setattr("appliance.web.page.STATIC_FOLDER", folder)
    client = application().test_client()
    with client.get("/static/page.js") as answer:
        assert answer.get_data() == b"1"
    for path in ("/static/../secret", "/static/%2e%2e/secret", "/static//etc/passwd"):
        assert client.get(path).status_code in (308, 404)
