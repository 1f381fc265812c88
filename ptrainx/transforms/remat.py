"""`remat`: compute a function's intermediate values again in the backward instead of keeping them.

Inside a jitted step it only marks what the function computes; the pass `recompute` does the work in the graph. There
recomputed dropout masks are the same, since they are functions of their keys, and parameters that the function gathers
(`px.reshard(w, P())` under ZeRO-3) are gathered once more instead of being kept whole. Outside it is torch's
checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ptrainx.core import remat_policies
from ptrainx.core import torch_compat as tc
from ptrainx.core import tree as px_tree
from ptrainx.core.errors import InputError
from ptrainx.core.remat_policies import Policy, everything_saveable, nothing_saveable
from ptrainx.core.trace_context import current_trace, running_aside

__all__ = ["checkpoint_name", "remat"]

_NAMED = ("nothing_saveable", "everything_saveable", "dots_saveable")


def remat(fn: Callable[..., Any] | None = None, policy: Policy | str | None = None) -> Any:
    """A function like `fn` whose gradient needs less memory, for more computation.

    Usable as a decorator, with or without arguments, on the body of a `scan`, and inside another `remat` (a value is
    then saved if all policies around it save it). Values that leave `fn` are kept, as its arguments are.

    Args:
        fn: a pure function of pytrees.
        policy: what to save: a function of (operator's name, name given by `checkpoint_name` or None), one of
            `px.checkpoint_policies`, or its name. None is `nothing_saveable`. Outside a jitted step there are two
            policies only: `everything_saveable`, and all others, which save nothing.

    Raises:
        InputError: an unknown policy.

    >>> remat(lambda x: x.sin().sin())(torch.tensor(0.0))
    tensor(0.)
    """
    chosen = _policy(policy)
    if fn is None:
        return lambda fn: remat(fn, chosen)

    @functools.wraps(fn)
    def rematerialized(*args: Any, **kwargs: Any) -> Any:
        trace = current_trace()
        if trace is not None and tc.proxy_mode() is not None:
            with trace.rematerialized(chosen):
                return fn(*args, **kwargs)
        if running_aside() is not None:  # what is kept is up to a remat around that
            return fn(*args, **kwargs)
        if chosen is everything_saveable or not _differentiated((args, kwargs)):
            return fn(*args, **kwargs)
        return checkpoint(fn, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return rematerialized


def _policy(policy: Policy | str | None) -> Policy:
    if policy is None:
        return nothing_saveable
    if callable(policy):
        return policy
    if policy in _NAMED:
        return getattr(remat_policies, policy)
    raise InputError(
        f"remat has no policy {policy!r}",
        expected=f"one of {', '.join(map(repr, _NAMED))}, or a function of (operator, name)",
        fix="px.checkpoint_policies.save_only_these_names('a', 'b') saves values by name",
    )


def _differentiated(tree: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in px_tree.leaves(tree)
    )


def checkpoint_name(x: Any, name: str) -> Any:
    """The same value, known to policies of `remat` by a name.

    Args:
        x: a tensor, or a pytree of tensors.
        name: for `px.checkpoint_policies.save_only_these_names`.

    >>> checkpoint_name(torch.tensor(1.0), "residual")
    tensor(1.)
    """
    trace = current_trace()
    if trace is None or tc.proxy_mode() is None:
        return x
    with trace.marked(name=name):
        return px_tree.map(lambda leaf: leaf.view_as(leaf), px_tree.map(trace.as_global, x))
