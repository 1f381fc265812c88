"""Checkpoints: pytrees on disk, each rank its part, there whole or not at all, restored on any mesh."""

from ptrainx.checkpoint.manager import Manager
from ptrainx.checkpoint.restore import restore
from ptrainx.checkpoint.save import save

__all__ = ["Manager", "restore", "save"]
