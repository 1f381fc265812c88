"""`px.errors`: every error that the library raises on purpose; see `ptrainx.core.errors` for the tree."""

from ptrainx.core.errors import *  # noqa: F403
from ptrainx.core.errors import __all__ as __all__
