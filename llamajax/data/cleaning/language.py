"""Detects the language of a text with py3langid's model: naive Bayes over byte n-grams (Lui and Baldwin 2012)."""

import functools
from typing import Any

MIDDLE_CHARS = 1024
"""Number of characters used for detection, from the middle of a text, where there are no menus. More of them hardly change
the result and take longer."""


def language_of(text: str) -> tuple[str, float]:
    """Returns the code of the text's language and the model's probability for it; `zxx` means no language.

    Raises:
        ImportError: py3langid is not installed.
    """
    start = max(len(text) - MIDDLE_CHARS, 0) // 2
    language, probability = _identifier().classify(text[start : start + MIDDLE_CHARS])
    return language, float(probability)


def known_languages() -> list[str]:
    """Returns the language codes that the model supports, sorted."""
    return sorted(_identifier().labels)


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # pyright: ignore[reportMissingImports]  # optional

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
