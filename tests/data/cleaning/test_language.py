"""Languages of real texts: the first article of the Universal Declaration of Human Rights, and Python's own help."""

from pydoc_data.topics import topics

import pytest

from llamajax.data.cleaning.language import MIDDLE_CHARS, known_languages, language_of

ARTICLE_1 = {
    "en": "All human beings are born free and equal in dignity and rights. They are endowed with reason and "
    "conscience and should act towards one another in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft und Gewissen "
    "begabt und sollen einander im Geist der Brüderlichkeit begegnen.",
    "fr": "Tous les êtres humains naissent libres et égaux en dignité et en droits. Ils sont doués de raison et"
    " de conscience et doivent agir les uns envers les autres dans un esprit de fraternité.",
    "es": "Todos los seres humanos nacen libres e iguales en dignidad y derechos y, dotados como están de razón"
    " y conciencia, deben comportarse fraternalmente los unos con los otros.",
    "it": "Tutti gli esseri umani nascono liberi ed eguali in dignità e diritti. Essi sono dotati di ragione e "
    "di coscienza e devono agire gli uni verso gli altri in spirito di fratellanza.",
    "nl": "Alle mensen worden vrij en gelijk in waardigheid en rechten geboren. Zij zijn begiftigd met verstand"
    " en geweten, en behoren zich jegens elkander in een geest van broederschap te gedragen.",
    "pl": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. Są oni obdarzeni "
    "rozumem i sumieniem i powinni postępować wobec innych w duchu braterstwa.",
    "ru": "Все люди рождаются свободными и равными в своем достоинстве и правах. Они наделены разумом и "  # noqa: RUF001
    "совестью и должны поступать в отношении друг друга в духе братства.",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
}


@pytest.mark.parametrize("code", ARTICLE_1)
def test_an_article_is_in_its_language(code):
    language, probability = language_of(ARTICLE_1[code])
    assert language == code
    assert probability > 0.9
    assert language_of(ARTICLE_1[code]) == (language, probability)
    assert code in known_languages()


def test_help_texts_are_english():
    found = [language_of(text) for text in topics.values()]
    assert {language for language, _ in found} == {"en"}
    assert sum(probability > 0.5 for _, probability in found) >= 0.95 * len(found), "some are tables and grammars"


def test_of_what_is_no_language_nothing_is_sure():
    for text in ("1 2 3\n", "x = [0]\n", "..."):
        language, probability = language_of(text)
        assert language == "zxx" or probability < 0.5


def test_the_middle_decides():
    german, english = ((ARTICLE_1[code] + "\n") * 20 for code in ("de", "en"))
    assert len(german) > MIDDLE_CHARS
    assert language_of(english + german + english)[0] == "de"
    assert language_of(german + english * 2 + german)[0] == "en"
