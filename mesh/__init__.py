"""Where a program runs: meshes, partition specs, and values placed by them."""

from ptrainx.mesh.mesh import AbstractMesh, Mesh, ambient_mesh, make_mesh
from ptrainx.mesh.partition_spec import P, PartitionSpec
from ptrainx.mesh.placement import placements_of, spec_of
from ptrainx.mesh.spec_tree import match_rules
from ptrainx.mesh.transfer import block_until_ready, device_get, device_put, from_process_local
from ptrainx.mesh.visualize import ShardingView, visualize_sharding
from ptrainx.mesh.world import World, current_world, initialize, shutdown

__all__ = [
    "AbstractMesh",
    "Mesh",
    "P",
    "PartitionSpec",
    "ShardingView",
    "World",
    "ambient_mesh",
    "block_until_ready",
    "current_world",
    "device_get",
    "device_put",
    "from_process_local",
    "initialize",
    "make_mesh",
    "match_rules",
    "placements_of",
    "shutdown",
    "spec_of",
    "visualize_sharding",
]
