"""Starting and ending worker processes."""

from ptrainx.runtime.failure import RankFailedError
from ptrainx.runtime.launch import launch
from ptrainx.runtime.script import run_script

__all__ = ["RankFailedError", "launch", "run_script"]
