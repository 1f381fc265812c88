"""Mean loss of a text under a model, every byte but the first scored once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import model
import numpy as np
import torch
from model import Config
from torch import Tensor

import ptrainx as px
from ptrainx import P

__all__ = ["make_score", "windows"]

BYTES_A_BATCH = 4096


def make_score(specs: Any, config: Config, mesh: px.Mesh, backend: str = "graph") -> Callable[[Any, np.ndarray], float]:
    """A function `(params, text uint8 [n]) -> mean cross-entropy of the text's bytes, in nats`.

    The text is cut into windows of the model's context, so a byte is predicted from those before it in its window.

    Args:
        specs: where the parameters lie.
        config: the model's sizes.
        mesh: the rows of a batch are split over its axis `data`.
        backend: of `px.jit`.
    """

    def place(x_BTD: Tensor) -> Tensor:
        return px.reshard(x_BTD, P("data"))

    @px.jit(mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), backend=backend)
    def summed_loss(params: Any, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        tokens_BT, targets_BT, counts_BT = batch
        return (model.losses(params, tokens_BT, targets_BT, config, place) * counts_BT).sum()

    devices = mesh.shape["data"]
    rows = max(1, BYTES_A_BATCH // config.context // devices) * devices

    def score(params: Any, text: np.ndarray) -> float:
        loader = px.data.Loader(windows(text, config.context, rows), rows, mesh=mesh, shuffle=False)
        return sum(float(summed_loss(params, batch)) for batch in loader) / (len(text) - 1)

    return score


def windows(text: np.ndarray, length: int, multiple: int) -> tuple[Tensor, Tensor, Tensor]:
    """A text as (tokens int64, targets int64, counts float32), each [rows, length], filled up with zeros.

    Args:
        text: uint8 [n].
        length: bytes in a window.
        multiple: what divides the number of rows.

    Returns:
        inputs, the bytes that follow them, and 1 where a target is a byte of the text, 0 where it is filling.
    """
    if len(text) < 2:
        raise px.errors.DataError("a text of one byte can't be scored", expected="at least two bytes")
    wanted = len(text) - 1
    rows = -(-wanted // (length * multiple)) * multiple
    padded = torch.zeros(rows * length + 1, dtype=torch.int64)
    padded[: len(text)] = torch.from_numpy(text.astype(np.int64))
    counts = (torch.arange(rows * length) < wanted).float()
    return padded[:-1].view(rows, length), padded[1:].view(rows, length), counts.view(rows, length)
