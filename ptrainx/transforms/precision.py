"""`Precision`: in which dtypes values are stored, computed with, summed over a mesh, and returned.

A policy is applied to a function. What goes in is cast where it lies: of a sharded parameter the shard is cast, and a
gather behind it carries the narrow dtype. Gradients find the policy by themselves (`core/reductions`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import InputError
from ptrainx.core.reductions import reduce_in
from ptrainx.mesh.spec_tree import SpecTree
from ptrainx.transforms.reshard import reshard

__all__ = ["Precision"]

F = TypeVar("F", bound=Callable[..., Any])

_DTYPES = {
    torch.float32: ("f32", "float32", "fp32"),
    torch.bfloat16: ("bf16", "bfloat16"),
    torch.float16: ("f16", "float16", "fp16", "half"),
    torch.float64: ("f64", "float64", "fp64"),
}
_NAMES = {name: dtype for dtype, names in _DTYPES.items() for name in names}
_SHORT = ", ".join(names[0] for names in _DTYPES.values())


@dataclasses.dataclass(frozen=True)
class Precision:
    """A policy of dtypes, applied to a function: `policy(fn)`.

    The function gets its floating-point arguments in `compute` and its floating-point results are cast to `output`;
    integers, bools and keys pass as they are. The cast is differentiable: gradients come back in their argument's own
    dtype. So parameters that are kept in float32 stay so, and their copies in `compute` live in the step alone. A
    sharded argument is cast before it is gathered.

    What is owed over mesh axes by the gradients of arguments is summed in `reduce`, whatever the placement: in an
    all-reduce, in a reduce-scatter, and once after the loop of `accumulate_grads`, which itself adds up in the wider of
    `reduce` and the parameters' dtype. Sums of activations over a mesh axis, as tensor parallelism has them, are part
    of the computation and go in `compute`.

    Apply it to the function that is differentiated, or to functions that this one calls; of several policies the widest
    `reduce` counts. Inside, the function's own casts stand: `x.float()` is float32.

    Args:
        params: of stored parameters, for `cast_to_params`.
        compute: of arguments inside the function.
        reduce: of sums of gradients over mesh axes.
        output: of results.

    Raises:
        InputError: a setting is no floating-point dtype; the message names all of them.

    >>> policy = Precision(compute=torch.bfloat16)
    >>> print(policy)
    params=f32,compute=bf16,reduce=f32,output=f32
    >>> policy(lambda x: x * x)(torch.tensor(1.01))  # in bfloat16 the next number above 1 is 1.0078
    tensor(1.0156)

    Source: Micikevicius et al., "Mixed Precision Training", 2018, https://arxiv.org/abs/1710.03740; the form is that of
    jmp (DeepMind), `reduce` that of torch's FSDP2.
    """

    params: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduce: torch.dtype = torch.float32
    output: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in vars(self).items() if value not in _DTYPES}
        if wrong:
            strings = any(isinstance(value, str) for value in wrong.values())
            raise InputError(
                f"Precision: {', '.join(wrong)} cannot be computed with",
                got=", ".join(f"{name}={value!r}" for name, value in wrong.items()),
                expected=f"torch dtypes: {', '.join(str(dtype) for dtype in _DTYPES)}",
                fix="px.Precision.parse reads names of dtypes" if strings else "choose one of them, such as bfloat16",
            )

    @classmethod
    def parse(cls, text: str) -> Precision:
        """The policy that a text describes.

        Args:
            text: settings by name, `"params=f32,compute=bf16,reduce=f32,output=f32"`, those left out in float32; or one
                dtype alone, `"bf16"`, which is that of `compute`.

        Raises:
            InputError: an unknown setting or dtype, or one setting twice; the message names all of them.

        >>> Precision.parse("compute=bf16,reduce=bf16").reduce
        torch.bfloat16
        """
        pairs = [part.partition("=") for part in text.split(",")]
        if len(pairs) == 1 and not pairs[0][1]:
            pairs = [("compute", "=", text)]
        known = [field.name for field in dataclasses.fields(cls)]
        settings = [(name.strip(), value.strip()) for name, _, value in pairs]
        named = [name for name, _ in settings]
        wrong = [
            f"{name}={value}"
            for name, value in settings
            if name not in known or value not in _NAMES or named.count(name) > 1
        ]
        if wrong:
            raise InputError(
                f"no such precision: {text!r}",
                got=", ".join(wrong),
                expected=f"each of {', '.join(known)} at most once, with one of {_SHORT}",
                fix='write "bf16", or "params=f32,compute=bf16,reduce=f32,output=f32"',
            )
        return cls(**{name: _NAMES[value] for name, value in settings})

    def __str__(self) -> str:
        return ",".join(f"{name}={_DTYPES[dtype][0]}" for name, dtype in vars(self).items())

    def __call__(self, fn: F) -> F:
        """`fn` under this policy; usable as a decorator."""

        @functools.wraps(fn)
        def with_policy(*args: Any, **kwargs: Any) -> Any:
            with reduce_in(self.reduce) as reduction:

                def enter(leaf: Any) -> Any:
                    cast = _cast(leaf, self.compute)
                    if isinstance(leaf, DTensor) and cast is not leaf:
                        reduction.remember(cast, leaf)
                    return cast

                args, kwargs = px_tree.map(enter, (args, kwargs))
                return self.cast_to_output(fn(*args, **kwargs))

        return with_policy  # type: ignore[return-value]

    def cast_to_params(self, tree: Any) -> Any:
        """A tree with its floating-point tensors in the dtype of stored parameters.

        >>> Precision(params=torch.bfloat16).cast_to_params({"w": torch.ones(1), "n": 3})
        {'w': tensor([1.], dtype=torch.bfloat16), 'n': 3}
        """
        return px_tree.map(lambda leaf: _cast(leaf, self.params), tree)

    def cast_to_compute(self, tree: Any) -> Any:
        """A tree with its floating-point tensors in the dtype of computations."""
        return px_tree.map(lambda leaf: _cast(leaf, self.compute), tree)

    def cast_to_output(self, tree: Any) -> Any:
        """A tree with its floating-point tensors in the dtype of results."""
        return px_tree.map(lambda leaf: _cast(leaf, self.output), tree)

    def reshard(self, tree: Any, specs: SpecTree) -> Any:
        """`px.reshard` with owed sums paid in `reduce`, for gradients that were left unreduced.

        Args:
            tree: values that owe sums over mesh axes, such as the gradients of `px.grad(..., reduce=False)`.
            specs: as for `px.reshard`.

        Returns:
            the tree, each leaf at its placement and in its own dtype.
        """
        moved = reshard(px_tree.map(self._owed, tree), specs)
        return px_tree.map(lambda new, old: _cast(new, getattr(old, "dtype", new.dtype)), moved, tree)

    def _owed(self, leaf: Any) -> Any:
        owes = isinstance(leaf, DTensor) and any(placement.is_partial() for placement in leaf.placements)
        return _cast(leaf, self.reduce) if owes else leaf


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
