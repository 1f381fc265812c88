"""`px.debug`: looking inside a step while it runs."""

from ptrainx.ops.debug_print import debug_print as print

__all__ = ["print"]
