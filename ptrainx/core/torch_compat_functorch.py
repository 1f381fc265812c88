"""Private torch names about `torch.func`: whether one of its transforms is running."""

from __future__ import annotations

from torch._C._functorch import maybe_current_level

__all__ = ["in_functorch"]


def in_functorch() -> bool:
    """Whether `torch.vmap`, `torch.func.jvp` or another of torch's function transforms is running."""
    return maybe_current_level() is not None
