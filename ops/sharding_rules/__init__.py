"""Sharding rules for operators that torch has none for, or wrong ones, by operator family."""

from ptrainx.ops.sharding_rules.install import install_sharding_rules
from ptrainx.ops.sharding_rules.registry import register_sharding, rules_version

__all__ = ["install_sharding_rules", "register_sharding", "rules_version"]
