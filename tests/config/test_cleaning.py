"""Which steps of cleaning are on, what they need, and that they are off where nobody asks for them."""

import dataclasses
import importlib.util
from typing import Any

import pytest

from llamajax.config.cleaning import (
    CleaningConfig,
    DecontaminationConfig,
    FilterConfig,
    LanguageConfig,
    NearDuplicateConfig,
)
from llamajax.config.data import DataConfig, SourceConfig
from tests.tiny import tiny_config

ON: dict[str, Any] = {
    "filters": FilterConfig(curly_braces=True),
    "languages": LanguageConfig(keep=("en",)),
    "decontamination": DecontaminationConfig(paths=("no/such/*.jsonl",)),
    "exact_duplicates": True,
    "near_duplicates": NearDuplicateConfig(enabled=True),
}


def test_steps_are_off_until_they_are_asked_for_and_in_order():
    assert CleaningConfig().steps == ()
    assert CleaningConfig(filters=FilterConfig(), languages=LanguageConfig(min_probability=0.9)).steps == ()
    for name, setting in ON.items():
        assert CleaningConfig(**{name: setting}).steps == (name,)
    assert CleaningConfig(**dict(reversed(ON.items()))).steps == tuple(ON)
    assert {field.name for field in dataclasses.fields(CleaningConfig)} == {*ON, "max_examples"}


@pytest.mark.parametrize("rule", sorted(vars(FilterConfig()).keys() - {"stop_words"}))
def test_any_rule_turns_filters_on(rule):
    kind = FilterConfig.__dataclass_fields__[rule].type
    value: Any = True if kind is bool else "words.txt" if rule == "bad_words" else 1
    assert FilterConfig(**{rule: value}).is_on


def test_packages_and_files_that_are_missing_are_told(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def problems(cleaning: CleaningConfig) -> list[str]:
        config = tiny_config(data=DataConfig(sources=(SourceConfig(kind="stdlib"),), seq_len=16, cleaning=cleaning))
        return [problem.partition(";")[0] for problem in config.file_problems() if "cleaning" in problem]

    assert problems(CleaningConfig()) == []
    cleaning = dataclasses.replace(CleaningConfig(**ON), filters=FilterConfig(bad_words="no/such/words.txt"))
    assert problems(cleaning) == [
        "data.cleaning.languages.keep: py3langid is not installed",
        "data.cleaning.near_duplicates.enabled: rensa is not installed",
        "data.cleaning.decontamination.paths.0: no file matches no/such/*.jsonl",
        "data.cleaning.filters.bad_words: no file matches no/such/words.txt",
    ]
