"""The page in Chromium, against the real server with the demo model."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.real_server import RealServer, real_server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LIMIT_MS = 30_000
SCREENSHOTS = os.environ.get("PAGE_SCREENSHOTS")
"""A folder for pictures that a person may look at."""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    with real_server() as started:
        yield started


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


@pytest.fixture
def page(browser: Browser, server: RealServer) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 860})
    tab = context.new_page()
    problems = watch(tab, server.url)
    open_page(tab, server.url)
    yield tab
    context.close()
    assert problems == []


def watch(tab: Page, origin: str) -> list[str]:
    """Notes what must not happen: script errors, refusals by the content policy, requests to other origins."""
    problems: list[str] = []
    tab.on("pageerror", lambda error: problems.append(f"script error: {error}"))
    tab.on("console", lambda message: problems.append(f"console: {message.text}") if message.type == "error" else None)
    tab.on("request", lambda request: problems.append(f"left the origin: {request.url}") if not request.url.startswith(origin) else None)
    return problems


def open_page(tab: Page, url: str) -> None:
    tab.set_default_timeout(LIMIT_MS)
    tab.goto(url + "/")
    expect(tab.get_by_role("status")).to_have_text("ready")


@contextmanager
def busy_lanes(server: RealServer, count: int) -> Iterator[None]:
    """Keeps `count` lanes at work with answers through the API until the block is left: their engines stand still in the middle,
    since a quick machine is through with the longest answer in a second."""
    body = {"prompt": "a", "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 1}
    with ExitStack() as streams:
        stopped: set[int] = set()
        while len(stopped) < count:
            num_finished = server.status()["counters"]["finished"]
            response = streams.enter_context(httpx2.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60))
            assert response.status_code == 200
            status = server.wait_for(
                lambda s, before=num_finished: busy_engines(s) - stopped or s["counters"]["finished"] > before,  # type: ignore[misc]
                "an answer begun, or ended already",
            )
            for pid in busy_engines(status) - stopped:
                os.kill(pid, signal.SIGSTOP)
                streams.callback(os.kill, pid, signal.SIGCONT)
                stopped.add(pid)
        yield
    server.wait_until_both_idle()


def busy_engines(status: dict[str, Any]) -> set[int]:
    """In the middle of an answer, so that all that `/status` tells of it is there."""
    return {lane["pid"] for lane in status["lanes"] if lane["request"] is not None and lane["request"]["generated_tokens"] > 0}


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def set_option(page: Page, label: str, value: str) -> None:
    if not page.get_by_label(label).is_visible():
        page.get_by_text("Options", exact=True).click()
    page.get_by_label(label).fill(value)


def picture(page: Page, name: str) -> None:
    if SCREENSHOTS:
        page.screenshot(path=str(Path(SCREENSHOTS) / f"{name}.png"))


def test_a_chat_streams_and_shows_its_speed_and_the_tiers(page: Page) -> None:
    set_option(page, "Temperature", "0")
    ask(page, "What is a harbor?")
    expect(page.locator("article.assistant")).to_contain_text("sheltered port")
    expect(page.locator(".footnote")).to_contain_text("tok/s")
    expect(page.locator(".lane").first.locator(".legend")).to_contain_text("own")
    picture(page, "chat")


def test_a_second_question_goes_on_in_the_same_conversation(page: Page) -> None:
    set_option(page, "Temperature", "0")
    ask(page, "What is a river?")
    expect(page.locator(".footnote")).to_have_count(1)
    ask(page, "What else?")
    expect(page.locator(".footnote")).to_have_count(2)
    expect(page.locator(".footnote").last).to_contain_text("prompt tokens reused")


def test_stop_ends_the_answer_and_frees_the_lane(page: Page, server: RealServer) -> None:
    with busy_lanes(server, 1):
        for _ in range(20):  # the demo model's answers are short: one of a few is caught in the middle
            ask(page, "What is a city?")
            page.get_by_label("Message").press("Escape")
            expect(page.get_by_role("button", name="Send")).to_be_visible()
            if page.locator(".footnote", has_text="stopped").count():
                break
        expect(page.locator(".footnote", has_text="stopped")).to_have_count(1)


def test_while_one_lane_is_busy_a_chat_runs_on_the_other(page: Page, server: RealServer) -> None:
    with busy_lanes(server, 1):
        ask(page, "What is a harbor?")
        expect(page.locator(".footnote")).to_contain_text("tok/s")
        lanes = server.status()["lanes"]
        assert sorted(lane["request"] is None for lane in lanes) == [False, True], "the first stream ended too early to tell"
        assert all(lane["context_used"] > 0 for lane in lanes)


def test_while_both_lanes_are_busy_a_chat_is_told_its_place(page: Page, server: RealServer) -> None:
    with busy_lanes(server, 2):
        ask(page, "What is a harbor?")
        expect(page.locator(".waiting")).to_have_text("Waiting for a lane: place 1 in line")
        picture(page, "queued")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".footnote")).to_have_text("stopped")


def test_a_new_chat_is_empty(page: Page) -> None:
    ask(page, "What is a dog?")
    expect(page.locator(".footnote")).to_have_count(1)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article.assistant")).to_have_count(0)
    expect(page.get_by_text("Ask something.")).to_be_visible()


def test_markup_in_an_answer_stays_harmless(page: Page) -> None:
    page.evaluate(
        "sessionStorage.setItem('messages', JSON.stringify([{role: 'assistant', content: '<img src=https://elsewhere.example/x.png>**bold**'}]))"
    )
    page.reload()
    expect(page.get_by_role("status")).to_have_text("ready")
    expect(page.locator("article.assistant strong")).to_have_text("bold")
    expect(page.locator("article.assistant img")).to_have_count(0)


def test_the_page_works_behind_a_path_prefix(browser: Browser) -> None:
    with real_server("--url-prefix", "/notebook/me", "--cards", "host:0,host:1") as server:
        context = browser.new_context()
        tab = context.new_page()
        open_page(tab, server.url + "/notebook/me")
        set_option(tab, "Temperature", "0")
        ask(tab, "What is a harbor?")
        expect(tab.locator("article.assistant")).to_contain_text("harbor")
        context.close()
