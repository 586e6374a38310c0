"""The builder of all HTML pages: text is escaped, only a page with a script may run one, and tags match."""

from llamajax.watch.page import Card, build_page, table, verdict
from tests.html_tags import check_tags


def page(script: str = "") -> str:
    cards = [Card("fits", verdict("no", bad=True), "of 80 GiB"), Card("MFU", verdict("40%", bad=False), "planned")]
    body = table(("a", "b"), [("1", "2"), ("3", "4")], "numbers")
    return build_page(
        "<run>: plan", heading="<run>", intro="one &middot; two", cards=cards, body=body, style=".x {}", script=script
    )


def test_titles_are_escaped_and_tags_match():
    text = page()
    check_tags(text)
    assert "<title>&lt;run&gt;: plan</title>" in text
    assert "<h1>&lt;run&gt;</h1>" in text
    assert "<p>one &middot; two</p>" in text


def test_a_page_without_a_script_may_run_none():
    assert "script" not in page()
    with_script = page("let x = 1 < 2;")
    check_tags(with_script)
    assert "script-src 'unsafe-inline'" in with_script
    assert "<script>let x = 1 < 2;</script>" in with_script


def test_cards_and_tables_hold_what_they_are_given():
    text = page()
    assert '<div><dt>fits</dt><dd><span class="bad">no</span></dd><small>of 80 GiB</small></div>' in text
    assert "<dd>40%</dd>" in text
    assert (
        '<table class="numbers"><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr><tr><td>3</td><td>4</td></tr>'
        in text
    )
    assert "<th>" not in table((), [("1",)])
    assert text.index(".cards {") < text.index(".x {}")
