"""Sharding rules for operators that torch has none for, by operator family."""

from ptrainx.ops.sharding_rules.registry import install_sharding_rules

__all__ = ["install_sharding_rules"]
