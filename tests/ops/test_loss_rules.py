"""Losses over sharded values have one device's value and gradient, whatever dim is split."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import ptrainx as px
from ptrainx import P

X = torch.linspace(0.1, 0.9, 48).reshape(8, 6)
Y = X.flip(0, 1).roll(1, 1).contiguous()
SIGNS = torch.tensor([1.0, -1.0]).repeat(4)
CLASSES = torch.arange(8) % 6
IGNORED = torch.tensor([1, 2, -100, -100, -100, 0, 3, 4])  # unevenly over the shards

LOSSES = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda x, y, reduction: F.huber_loss(x, y, reduction=reduction, delta=0.2),
    "binary cross-entropy": F.binary_cross_entropy,
    "binary cross-entropy with logits": F.binary_cross_entropy_with_logits,
    "soft margin": lambda x, y, reduction: F.soft_margin_loss(x, (y - 0.5).sign(), reduction=reduction),
    "cosine embedding": lambda x, y, reduction: F.cosine_embedding_loss(x, y, SIGNS, reduction=reduction),
    "kl": lambda x, y, reduction: F.kl_div(x.log(), y, reduction="batchmean" if reduction == "mean" else reduction),
    "cross-entropy": lambda x, y, reduction: F.cross_entropy(x, CLASSES, reduction=reduction),
    "cross-entropy with ignored targets": lambda x, y, reduction: F.cross_entropy(x, IGNORED, reduction=reduction),
    "cross-entropy with weights": lambda x, y, reduction: F.cross_entropy(x, CLASSES, y[0], reduction=reduction),
    "cross-entropy, weights, ignored, smoothed": lambda x, y, reduction: F.cross_entropy(
        x, IGNORED, Y[0], reduction=reduction, label_smoothing=0.1
    ),
    "negative log-likelihood": lambda x, y, reduction: F.nll_loss(x.log(), IGNORED, Y[1], reduction=reduction),
    "cross-entropy of probabilities": lambda x, y, reduction: F.cross_entropy(x, y.softmax(1), reduction=reduction),
}


# A rank of the first has ignored targets only; the second has an axis that splits nothing.
SPLITS = [
    (P("data"), {"data": 4}),
    (P(None, "data"), {"data": 2, "model": 2}),
    (P("model", "data"), {"data": 2, "model": 2}),
]


@pytest.mark.parametrize(("reduction", "backend"), [("mean", "graph"), ("sum", "graph"), ("mean", "eager")])
@pytest.mark.parametrize(("spec", "axes"), SPLITS, ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_one_device(name, reduction, spec, axes, backend):
    def loss(x, y):
        return LOSSES[name](x, y, reduction=reduction)

    mesh = px.make_mesh(axes, simulate=True)
    value, gradient = px.jit(px.value_and_grad(loss), mesh=mesh, in_specs=spec, backend=backend)(X, Y)
    x = X.clone().requires_grad_()
    expected = loss(x, Y)
    expected.backward()
    torch.testing.assert_close(value, expected.detach(), rtol=2e-5, atol=1e-6)
    torch.testing.assert_close(px.device_get(gradient), x.grad, rtol=2e-5, atol=1e-6)
