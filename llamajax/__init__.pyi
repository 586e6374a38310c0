"""Types of what `llamajax/__init__.py` imports lazily."""

from llamajax.config.run import Config as Config
from llamajax.errors import UserError as UserError
from llamajax.library import evaluate as evaluate
from llamajax.library import generate as generate
from llamajax.library import load_config as load_config
from llamajax.library import load_model as load_model
from llamajax.library import plan as plan
from llamajax.library import preprocess as preprocess
from llamajax.library import restore as restore
from llamajax.library import setup as setup
from llamajax.library import train as train
from llamajax.library import verify as verify

__version__: str
BEGAN: float
