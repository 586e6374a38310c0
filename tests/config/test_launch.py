"""Tests of llamajax.config.launch."""

import pytest

from llamajax.config.launch import LaunchConfig
from llamajax.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"module": "train.py --x"}, "module: 'train.py --x' is not the name of a module"),
        ({"module": ""}, "module: '' is not the name of a module"),
        ({"interface": ""}, "interface: must not be empty"),
        ({"backoff_s": 61.0}, "max_backoff_s: 60.0 must not be below backoff_s=61.0"),
        ({"num_processes": 0}, "num_processes: 0 must be positive or unset"),
        ({"max_restarts": -1}, "max_restarts: -1 must not be negative"),
    ],
)
def test_what_cannot_be_is_refused(settings, line):
    with pytest.raises(ConfigError) as caught:
        LaunchConfig(**settings)
    assert str(caught.value).startswith(line)
