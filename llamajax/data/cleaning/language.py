"""The language of a text, by the model that py3langid ships: naive Bayes over byte n-grams (Lui and Baldwin 2012)."""

import functools
from typing import Any

MIDDLE_CHARS = 1024
"""Characters that the language is told by, from the middle of a text, where there are no menus: more of them hardly change
an answer, and take longer."""


def language_of(text: str) -> tuple[str, float]:
    """Code of the language and how probable it is, by the model; `zxx` is what is no language.

    Raises:
        ImportError: py3langid is not installed.
    """
    start = max(len(text) - MIDDLE_CHARS, 0) // 2
    language, probability = _identifier().classify(text[start : start + MIDDLE_CHARS])
    return language, float(probability)


def known_languages() -> list[str]:
    """The codes that the model knows, sorted."""
    return sorted(_identifier().labels)


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # pyright: ignore[reportMissingImports]  # optional

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
