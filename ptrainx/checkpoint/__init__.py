"""Checkpoints: pytrees on disk, each rank its part, there whole or not at all, restored on any mesh."""

from ptrainx.checkpoint.async_save import SaveHandle, save_async
from ptrainx.checkpoint.hugging_face import export_hf, import_hf
from ptrainx.checkpoint.manager import Manager
from ptrainx.checkpoint.restore import restore
from ptrainx.checkpoint.save import save

__all__ = ["Manager", "SaveHandle", "export_hf", "import_hf", "restore", "save", "save_async"]
