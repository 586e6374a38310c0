"""Whether the tags of an HTML page match."""

import html.parser

_VOID = {"meta"}


class _Open(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in _VOID:
            self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        """Opens nothing."""

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag


def check_tags(page: str) -> None:
    """Asserts that every tag of the page is closed, in order, and that it has some."""
    parser = _Open()
    parser.feed(page)
    assert "<body>" in page
    assert parser.tags == []
