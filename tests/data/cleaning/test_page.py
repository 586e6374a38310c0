"""The page says what the report counts, and no text of a document becomes a part of it."""

import html
import json
import re
from html.parser import HTMLParser

from llamajax.config.cleaning import CleaningConfig, FilterConfig, NearDuplicateConfig
from llamajax.data.cleaning.page import page
from tests.data.cleaning.cleaned import entry_of, jsonl, real_texts, run_clean

HOSTILE = [
    '<script>alert("x")</script>',
    "</div></body><img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>&lt;script&gt;&amp;',
    "]]><!-- <style>body { display: none }</style>",
    "\x00\x1b[2J\u202e right to left \u2028 end",
]


class Reader(HTMLParser):
    """Tags with their attributes, and all text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_hostile_texts_and_names_are_shown_and_do_nothing(tmp_path):
    body = real_texts(1)[0]
    alike = [f"{text}\n{body}" for text in HOSTILE]
    texts = [*HOSTILE, *alike, *alike[:2]]
    config = CleaningConfig(
        filters=FilterConfig(min_words=20), exact_duplicates=True, near_duplicates=NearDuplicateConfig(enabled=True)
    )
    source = jsonl(tmp_path / "<b>&name.jsonl", texts)
    run_clean([source], config, tmp_path / "cache")
    entry = entry_of(tmp_path / "cache")
    text = (entry / "report.html").read_text()
    assert text == page(json.loads((entry / "report.json").read_text()))
    reader = read(text)
    harmless = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "dl", "div", "dt", "dd", "small", "table",
                "tr", "th", "td", "i", "mark"}  # fmt: skip
    assert {tag for tag, _ in reader.tags} == harmless
    assert {name for _, attributes in reader.tags for name in attributes} <= {
        "lang", "charset", "name", "content", "http-equiv", "class", "style",
    }  # fmt: skip
    assert "default-src 'none'" in text
    assert not re.search("https?:", text)
    shown = "".join(reader.text)
    for hostile in HOSTILE[:4]:
        assert hostile in shown
        assert html.escape(hostile) in text
    assert "document 1 of <b>&name.jsonl" in shown


def test_the_page_has_every_count(tmp_path):
    texts = real_texts(40)
    edits = [text.replace("e ", "u ", 2) for text in texts[:10]]
    config = CleaningConfig(
        filters=FilterConfig(min_words=20), exact_duplicates=True, near_duplicates=NearDuplicateConfig(enabled=True)
    )
    run_clean([jsonl(tmp_path / "a.jsonl", [*texts, *edits, *texts[:7], "short"])], config, tmp_path / "cache")
    entry = entry_of(tmp_path / "cache")
    told = json.loads((entry / "report.json").read_text())
    shown = "".join(read((entry / "report.html").read_text()).text)
    for documents, _ in [told["before"], told["left"], *told["after"].values(), *told["removed"].values()]:
        assert f"{documents:,}" in shown
    similarity, where, text, other_where, other_text = told["alike"][0]
    assert f"similarity {similarity:.3f}" in shown
    assert 0.8 <= similarity < 1
    for part in (where, text, other_where, other_text):
        assert part in shown
    assert text.replace("e ", "u ", 2) == other_text
    assert "<mark>" in (entry / "report.html").read_text()
    assert told["copies"][0][2] == told["copies"][0][4]


def test_a_page_without_removals(tmp_path):
    run_clean([jsonl(tmp_path / "a.jsonl", ["one", "two"])], CleaningConfig(exact_duplicates=True), tmp_path / "cache")
    assert "Left out" not in (entry_of(tmp_path / "cache") / "report.html").read_text().replace("left out by", "")
