"""The page in a real browser: a talk, its end, a new one, a token, and what a model writes that looks like a page itself."""

import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamajax.generation.completion import TextStream
from tests.conftest import processes_of
from tests.runs import free_address
from tests.serving.served import Running, make_served

_FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--window-size=1000,800",
]  # fmt: skip
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # WebDriver's name of a reference

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromedriver") and shutil.which("chromium")), reason="needs Debian's chromium-driver"
    ),
]


class Browser:
    """A window of Chromium, by the WebDriver protocol."""

    def __init__(self, address: str, folder: str) -> None:
        self._address = f"http://{address}"
        self._folder = Path(folder)
        command = ["chromedriver", f"--port={address.rpartition(':')[2]}"]
        # Chromium leaves a directory for its lock where temporary files are.
        environment = os.environ | {"TMPDIR": folder}
        self._process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        options = {"args": [*_FLAGS, f"--user-data-dir={folder}/profile"], "binary": shutil.which("chromium")}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        for _ in range(100):
            try:
                self._session = self._ask("POST", "/session", {"capabilities": capabilities})["sessionId"]
                break
            except urllib.error.URLError:  # it does not listen yet
                time.sleep(0.1)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._address + path, data, {"content-type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["value"]

    def do(self, method: str, path: str, body: Any = None) -> Any:
        return self._ask(method, f"/session/{self._session}{path}", body)

    def run(self, script: str) -> Any:
        return self.do("POST", "/execute/sync", {"script": f"return {script}", "args": []})

    def find(self, selector: str) -> str:
        return self.do("POST", "/element", {"using": "css selector", "value": selector})[_ELEMENT]

    def type(self, selector: str, text: str) -> None:
        self.do("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self.do("POST", f"/element/{self.find(selector)}/click", {})

    def wait(self, script: str) -> None:
        deadline = time.monotonic() + 30
        while not self.run(script):
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.02)

    def close(self) -> None:
        try:
            self.do("DELETE", "")
        finally:
            self._process.kill()
            self._process.wait()
        deadline = time.monotonic() + 10
        while processes := processes_of(self._folder):
            assert time.monotonic() < deadline, f"the browser left running: {processes}"
            time.sleep(0.02)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return make_served(tmp_path_factory.mktemp("served"))


@pytest.fixture
def browser() -> Iterator[Browser]:
    with tempfile.TemporaryDirectory() as folder:
        browser = Browser(free_address(), folder)
        yield browser
        browser.close()


STATE, TALK, SEND = (f"document.getElementById('{name}').textContent" for name in ("state", "talk", "send"))


def test_a_talk_in_the_browser(served, browser, monkeypatch):
    with Running(served) as running:
        browser.do("POST", "/url", {"url": running.url})
        browser.wait("document.querySelectorAll('#model option').length === 1")
        browser.run("(document.getElementById('temperature').value = 0, document.getElementById('max_tokens').value = 9)")
        browser.type("#text", "the model\ue007")  # Enter
        browser.wait(f"{SEND} === 'Send' && {STATE}.includes('tokens/s')")
        asked = {"messages": [{"role": "user", "content": "the model"}], "temperature": 0, "max_tokens": 9}
        answer = running.post("/v1/chat/completions", **asked)
        said = answer["choices"][0]["message"]["content"]
        assert browser.run("document.querySelector('article.assistant p').textContent") == said
        assert browser.run(STATE).startswith(f"{answer['usage']['completion_tokens']} tokens, ")

        sent = []
        monkeypatch.setattr(running.server, "log", sent.append)
        browser.type("#text", "which one")
        browser.click("#send")
        browser.wait(f"document.querySelectorAll('article').length === 4 && {SEND} === 'Send'")
        assert "200" in sent[-1]

        # A page that a model writes is text.
        monkeypatch.setattr(TextStream, "push", lambda self, token: "<img src=x onerror=\"document.title='bad'\">")
        browser.click("#new")
        assert browser.run(TALK) == ""
        browser.type("#text", "a\ue007")
        browser.wait(f"{SEND} === 'Send' && {TALK}.includes('onerror')")
        assert browser.run("document.title") == "llamajax"
        assert browser.run("document.querySelectorAll('#talk img').length") == 0

        # Stop ends an answer, and its slot.
        browser.click("#new")
        browser.run("document.getElementById('max_tokens').value = 60")
        step = served.engine.step
        monkeypatch.setattr(served.engine, "step", lambda: (time.sleep(0.1), step()))
        browser.type("#text", "a\ue007")
        browser.wait(f"{SEND} === 'Stop' && document.querySelector('article.assistant p')?.textContent")
        browser.click("#send")
        browser.wait(f"{STATE}.includes('stopped')")
        running.wait_until_idle()
        wrong = [line for line in browser.do("POST", "/se/log", {"type": "browser"}) if line["level"] == "SEVERE"]
        assert wrong == []


def test_the_page_asks_for_the_token(served, browser):
    with Running(served, token="secret") as running:
        browser.do("POST", "/url", {"url": running.url})
        browser.wait(f"{STATE}.includes('Enter the token')")
        browser.type("#token", "secret\ue004")  # Tab
        browser.wait("document.querySelectorAll('#model option').length === 1")
        browser.run("document.getElementById('max_tokens').value = 5")
        browser.type("#text", "the\ue007")
        browser.wait(f"{SEND} === 'Send' && {STATE}.includes('tokens/s')")
        assert "secret" not in browser.run("document.documentElement.outerHTML")


def test_a_model_without_a_template_continues_texts(served, browser, monkeypatch):
    monkeypatch.setattr(served, "template", None)
    with Running(served) as running:
        browser.do("POST", "/url", {"url": running.url})
        browser.wait(f"{STATE}.includes('no chat template')")
        browser.run("(document.getElementById('temperature').value = 0, document.getElementById('max_tokens').value = 9)")
        browser.type("#text", "the model\ue007")
        browser.wait(f"{SEND} === 'Send' && {STATE}.includes('tokens/s')")
        found = running.post("/v1/completions", prompt="the model", temperature=0, max_tokens=9)["choices"][0]["text"]
        assert browser.run("document.querySelector('article.assistant p').textContent") == found


def test_names_of_controls_are_read_out(served, browser):
    """Every control has a name for screen readers, and the tree of the page has the roles that it should."""
    with Running(served) as running:
        browser.do("POST", "/url", {"url": running.url})
        browser.wait("document.querySelectorAll('#model option').length === 1")
        browser.run("document.getElementById('settings').open = true")
        for selector in ("#model", "#new", "#system", "#temperature", "#max_tokens", "#token", "#text", "#send"):
            assert browser.do("GET", f"/element/{browser.find(selector)}/computedlabel"), selector
        assert browser.do("GET", f"/element/{browser.find('#talk')}/computedrole") == "log"
        assert browser.do("GET", f"/element/{browser.find('#state')}/computedrole") == "status"
