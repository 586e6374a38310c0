"""Licences that are not allowed, or not known, are named."""

from email.message import Message
from importlib import metadata

import pytest

from scripts import licences


@pytest.mark.parametrize(
    ("expression", "is_allowed"),
    [
        ("MIT", True),
        ("MIT AND Apache-2.0", True),
        ("GPL-3.0-only OR MIT", True),
        ("MPL-2.0 AND (Apache-2.0 OR MIT)", False),
        ("MIT AND GPL-3.0-only", False),
        ("", False),
    ],
)
def test_expressions(expression, is_allowed):
    assert licences.is_allowed(expression, ["MIT", "Apache-2.0"]) == is_allowed


@pytest.mark.parametrize(
    ("fields", "expression"),
    [
        ({"License-Expression": "MIT", "License": "all"}, "MIT"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "Apache License   Version 2.0, January 2004"}, "Apache-2.0"),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3", "License": "AGPL"}, "AGPL"),
        ({}, ""),
    ],
)
def test_metadata(fields, expression):
    class Package:
        metadata = Message()

    for key, value in fields.items():
        Package.metadata[key] = value
    found = licences.licences(Package)  # pyright: ignore[reportArgumentType]
    assert found == expression


def test_a_package_with_a_licence_that_is_not_listed_is_named():
    name = "numpy"
    (line,) = licences.problems([name], ["MIT"], {})
    assert line.startswith(f"{name} {metadata.version(name)}: licence ")
    assert licences.problems([name], ["MIT"], {name: "a reason"}) == []


def test_what_llamajax_needs_is_found_through_other_packages():
    core, _ = licences.needed(())
    assert {"jax", "transformers", "huggingface-hub"} <= core
    assert "pytest" not in core
