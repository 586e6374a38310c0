"""llamajax trains LLaMA-family models with JAX, Flax and XLA.

`import llamajax` is cheap: every name is imported when it is first used. `llamajax.library` documents the functions.
The modules `llamajax.train`, `plan`, `verify`, `generate`, `evaluate` and `preprocess` are the commands; as an attribute
of the package each of these names is the library function, whatever is imported: `from llamajax.train import main` reaches
the command.
"""

import importlib
import sys
import time
import types
from typing import Any

__version__ = "0.2.0"

BEGAN = time.monotonic()
"""Time when this process imported the package, by `time.monotonic()`."""

_LIBRARY = "llamajax.library"
_HOMES = {
    "Config": "llamajax.config.run", "UserError": "llamajax.errors", "load_config": _LIBRARY, "train": _LIBRARY,
    "plan": _LIBRARY, "verify": _LIBRARY, "generate": _LIBRARY, "evaluate": _LIBRARY, "load_model": _LIBRARY,
    "restore": _LIBRARY, "preprocess": _LIBRARY, "setup": _LIBRARY,
}  # fmt: skip
"""Names that the package offers, and the module of each. `__init__.pyi` declares their types."""


class _Package(types.ModuleType):
    """A package that keeps its library functions when commands of the same names are imported."""

    def __getattr__(self, name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOMES[name]), name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _HOMES or not isinstance(value, types.ModuleType):  # the import of a module sets it on its package
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_HOMES})


sys.modules[__name__].__class__ = _Package
