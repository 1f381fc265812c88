"""Whether what a step returns can take the place of what it was given."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ptrainx.compile.stages import Lowered
from ptrainx.compile.trace import Argument, Output
from ptrainx.core import tree as px_tree
from ptrainx.mesh.placement import trace_placements

__all__ = ["tell_misplaced_successors"]


class _Leaf:
    """An output as a leaf of a tree."""

    def __init__(self, output: Output):
        self.output = output


def tell_misplaced_successors(name: str, donated: Mapping[str, Any], lowered: Lowered) -> None:
    """Warns of a donated argument whose like in the result is placed otherwise: the next call can't take it.

    The successor of an argument is the result, or the first element of it, that has the argument's structure, shapes
    and dtypes.

    Args:
        name: of the function.
        donated: parameter name -> the argument.
        lowered: the program.
    """
    graph, mesh = lowered.graphs[0], lowered.program.mesh
    result = px_tree.unflatten(graph.out_tree, [_Leaf(output) for output in graph.outputs])
    candidates = [result, *(result if isinstance(result, (tuple, list)) else ())]
    arguments = {a.path: a for a in lowered.program.arguments}
    for called, value in donated.items():
        pairs, treedef = px_tree.flatten_with_path(value)
        given = [arguments[px_tree.path_expr(path, called)] for path, _ in pairs]
        outputs = next((found for c in candidates if (found := _outputs_like(c, treedef, given)) is not None), ())
        moved = [
            f"{a.path} is donated at {a.spec}, {o.path} comes out at {o.spec}"
            for a, o in zip(given, outputs)
            if trace_placements(a.spec, mesh) != trace_placements(o.spec, mesh)
        ]
        if moved:
            warnings.warn(
                f"{name}: {'; '.join(moved)}. Give out_specs the specs of the argument, or the next call is traced "
                "again or refused.",
                stacklevel=4,
            )


def _outputs_like(candidate: Any, treedef: Any, given: list[Argument]) -> list[Output] | None:
    leaves, structure = px_tree.flatten(candidate)
    outputs = [leaf.output for leaf in leaves]
    fits = structure == treedef and all((a.shape, a.dtype) == (o.shape, o.dtype) for a, o in zip(given, outputs))
    return outputs if fits else None
