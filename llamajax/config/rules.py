"""The rules that settings obey, and how a broken one is told."""

from llamajax.errors import ConfigError


def require(*rules: tuple[bool, str]) -> None:
    """Raises `ConfigError` with one `key: rule; remedy` line for every rule that does not hold."""
    broken = [message for holds, message in rules if not holds]
    if broken:
        raise ConfigError("\n".join(broken))
