"""Private torch names about the world of processes: what DTensor remembers of it, whether a mesh is still in it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import _redistribute as redistribute
from torch.distributed.tensor._api import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo

from ptrainx.core import torch_compat as tc

__all__ = ["clear_dtensor_caches", "groups_are_alive"]


def clear_dtensor_caches() -> None:
    """Makes DTensor forget what it has worked out about meshes.

    Its caches hold specs with the mesh object they were first seen on, and take a mesh of a later world with the same
    ranks for an equal key.
    """
    # Imported when it is needed: it brings torch's compiler with it, which costs a second.
    from torch.distributed.tensor import debug

    debug._clear_sharding_prop_cache()
    caches = (
        (redistribute, "clear_redistribute_planner_cache"),
        (getattr(redistribute, "_gen_transform_infos", None), "cache_clear"),
        (MeshTopoInfo.build_from_mesh, "cache_clear"),
        (getattr(DTensor._op_dispatcher.sharding_propagator, "_propagate_tensor_meta_cached", None), "cache_clear"),
    )
    for holder, name in caches:
        clear = getattr(holder, name, None)
        if clear is not None:
            clear()


def groups_are_alive(device_mesh: Any) -> bool:
    """Whether the process groups of a torch DeviceMesh are those that its names stand for now.

    A later world gives the same names to its own groups, so the objects are compared, not the names.
    """
    if not torch.distributed.is_initialized():
        return False
    groups = getattr(device_mesh, "_pg_registry", {})
    names = getattr(device_mesh, "_dim_group_names", [])
    return all(
        tc.group_is_registered(name) and (name not in groups or tc.resolve_process_group(name) is groups[name])
        for name in names
    )
