"""Checkpoints: pytrees on disk, each rank its part, there whole or not at all, restored on any mesh."""

from ptrainx.checkpoint.async_save import SaveHandle, save_async
from ptrainx.checkpoint.foreign.dcp import dcp_shapes, import_dcp
from ptrainx.checkpoint.foreign.export_dcp import export_dcp
from ptrainx.checkpoint.foreign.export_hugging_face import export_hf
from ptrainx.checkpoint.foreign.hugging_face import hf_shapes, import_hf
from ptrainx.checkpoint.foreign.registry import register_adapter
from ptrainx.checkpoint.foreign.tables import Architecture, Row
from ptrainx.checkpoint.manager import Manager
from ptrainx.checkpoint.restore import restore
from ptrainx.checkpoint.save import save

__all__ = [
    "Architecture",
    "Manager",
    "Row",
    "SaveHandle",
    "dcp_shapes",
    "export_dcp",
    "export_hf",
    "hf_shapes",
    "import_dcp",
    "import_hf",
    "register_adapter",
    "restore",
    "save",
    "save_async",
]
