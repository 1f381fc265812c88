"""`px.tree`: functions of pytrees; see `ptrainx.core.tree`."""

from ptrainx.core.tree import (
    NAMESPACE,
    TreeDef,
    flatten,
    flatten_with_path,
    leaves,
    map,
    map_with_path,
    path_expr,
    path_str,
    register_dataclass,
    structure,
    unflatten,
)
from ptrainx.core.tree_where import where

__all__ = [
    "NAMESPACE",
    "TreeDef",
    "flatten",
    "flatten_with_path",
    "leaves",
    "map",
    "map_with_path",
    "path_expr",
    "path_str",
    "register_dataclass",
    "structure",
    "unflatten",
    "where",
]
