"""Checkpoints: pytrees on disk, each rank its part, there whole or not at all, restored on any mesh."""

from ptrainx.checkpoint.async_save import SaveHandle, save_async
from ptrainx.checkpoint.manager import Manager
from ptrainx.checkpoint.restore import restore
from ptrainx.checkpoint.save import save

__all__ = ["Manager", "SaveHandle", "restore", "save", "save_async"]
