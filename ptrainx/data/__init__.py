"""Data onto a mesh: sharded, shuffled, resumable loading; text as bytes."""

from ptrainx.data.loader import EndlessLoaderError, Loader
from ptrainx.data.permutation import Permutation
from ptrainx.data.text import ByteWindows, python_stdlib_files, read_bytes

__all__ = ["ByteWindows", "EndlessLoaderError", "Loader", "Permutation", "python_stdlib_files", "read_bytes"]
