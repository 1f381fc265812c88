"""Which adapter serves which model: by the `model_type` of its `config.json`. Ours stand in the same registry."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from typing import Any

from ptrainx.checkpoint.foreign.architectures import gpt2, llama, qwen2
from ptrainx.checkpoint.foreign.tables import Adapter, Table
from ptrainx.core.errors import InputError

__all__ = ["ENTRY_POINTS", "adapter_for", "register_adapter", "table_of"]

ENTRY_POINTS = "ptrainx.adapters"
"""Entry points of installed packages: functions without arguments that register adapters."""

_registered: dict[str, Adapter] = {}
_asked: set[str] = set()
"""Names of entry points that have been called."""


def register_adapter(model_type: str, adapter: Adapter) -> Adapter:
    """Registers the adapter of models whose `config.json` has this `model_type`; it replaces an earlier one.

    Packages name a function that does so as an entry point of the group `ptrainx.adapters`.

    Args:
        model_type: as transformers has it, such as `llama`.
        adapter: makes an `Architecture` from the config; missing keys may raise KeyError.

    Returns:
        the adapter.

    >>> from ptrainx.checkpoint import Architecture, Row
    >>> def linear(config):
    ...     n = config["hidden_size"]
    ...     return Architecture("Linear", (Row("w", "proj.weight", (n, n), transposed=True),), layers=0)
    >>> register_adapter("linear", linear) is linear
    True
    """
    _registered[model_type] = adapter
    return adapter


def adapter_for(model_type: Any) -> Adapter:
    """The adapter of a `model_type`.

    Raises:
        InputError: none is registered.
    """
    if model_type not in _registered:
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
            if entry.name not in _asked:
                _asked.add(entry.name)
                entry.load()()
    if model_type not in _registered:
        raise InputError(
            "there is no adapter for this model",
            got=f"model_type {model_type!r}",
            expected=f"one of {', '.join(sorted(_registered))}",
            fix="px.checkpoint.register_adapter(model_type, adapter); or pass like= with the names in the files",
        )
    return _registered[model_type]


def table_of(config: Mapping[str, Any], adapter: str | Adapter | None = None) -> Table:
    """The table of a model.

    Args:
        config: what stands in `config.json`.
        adapter: a model type, an adapter, or None for the config's `model_type`.

    Raises:
        InputError: there is no such adapter; the config lacks what it needs.
    """
    make = adapter if callable(adapter) else adapter_for(adapter or config.get("model_type"))
    try:
        return Table(make(config))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise InputError(
            "the config does not describe such a model", got=what, fix="pass config.json's keys"
        ) from error


register_adapter("gpt2", gpt2)
register_adapter("llama", llama)
register_adapter("qwen2", qwen2)
