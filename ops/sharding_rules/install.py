"""Registers our sharding rules and those of installed packages, once a process, when the first trace needs them."""

from __future__ import annotations

import functools

from ptrainx.ops.sharding_rules.attention import register_attention_rules
from ptrainx.ops.sharding_rules.losses import register_loss_rules
from ptrainx.ops.sharding_rules.reductions import register_reduction_rules
from ptrainx.ops.sharding_rules.registry import registered_by_packages
from ptrainx.ops.sharding_rules.shifts import register_shift_rules

__all__ = ["install_sharding_rules"]


@functools.cache
def install_sharding_rules() -> None:
    """Makes DTensor know our rules; does nothing the second time."""
    register_attention_rules()
    register_loss_rules()
    register_reduction_rules()
    register_shift_rules()
    registered_by_packages()
