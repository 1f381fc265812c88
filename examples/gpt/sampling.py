"""Text from a model, byte by byte."""

from __future__ import annotations

from typing import Any

import model
import torch
from model import Config

import ptrainx as px

__all__ = ["generate"]


@torch.no_grad()
def generate(
    params: Any, config: Config, key: torch.Tensor, length: int, prompt: bytes = b"\n\n", temperature: float = 0.8
) -> bytes:
    """Draws bytes, each from the model's distribution after the last `context` ones.

    Args:
        params: parameters as plain tensors (see `px.device_get`).
        config: the model's sizes.
        key: random key.
        length: how many bytes.
        prompt: what they follow, at least one byte.
        temperature: below 1, likely bytes become likelier.

    Returns:
        the bytes, without the prompt.
    """
    written = list(prompt)
    for chance in px.random.uniform(key, (length,)):
        seen = torch.tensor([written[-config.context :]])
        scores = model.logits(params, seen, config)[0, -1] / temperature
        below = scores.softmax(-1).cumsum(-1)
        written.append(min(int((below < chance).sum()), model.VOCABULARY - 1))
    return bytes(written[len(prompt) :])
