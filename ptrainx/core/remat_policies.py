"""Which values of a rematerialized function are saved for its backward, as JAX names these policies.

A policy is a function of an operator's name (`"aten::mm"`) and of the name that `checkpoint_name` has given its result
(or None): True saves the result, False computes it again. Source: `jax.checkpoint_policies`.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = [
    "Policy",
    "dots_saveable",
    "everything_saveable",
    "nothing_saveable",
    "save_only_these_names",
]

Policy = Callable[[str, str | None], bool]

_DOTS = {
    "aten::addmm",
    "aten::baddbmm",
    "aten::bmm",
    "aten::convolution",
    "aten::mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
}


def nothing_saveable(operator: str, name: str | None) -> bool:
    """Saves nothing but the function's arguments: least memory, everything computed twice."""
    return False


def everything_saveable(operator: str, name: str | None) -> bool:
    """Saves everything: as without `remat`."""
    return True


def dots_saveable(operator: str, name: str | None) -> bool:
    """Saves the results of matrix products, convolutions and attention, and computes what is cheap again."""
    return operator in _DOTS


def save_only_these_names(*names: str) -> Policy:
    """Saves the values that `checkpoint_name` has given one of these names.

    >>> save_only_these_names("mlp")("aten::mm", "mlp")
    True
    """
    chosen = frozenset(names)

    def policy(operator: str, name: str | None) -> bool:
        return name in chosen

    return policy
