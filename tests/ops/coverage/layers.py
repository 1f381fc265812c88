"""Softmax and losses, normalisation layers, convolutions, pooling, attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.coverage.case import Case, ints, mask, positive, values

__all__ = ["CASES"]

X, Y, BOX, W, B = values(8, 4), values(8, 4, seed=1), values(4, 8, 4), positive(4), values(4, seed=2)
CLASSES, IMAGES, SIGNAL = ints(8, below=4), values(4, 4, 8, 8), values(4, 4, 8)
IGNORED = torch.tensor([1, 2, -100, -100, -100, 0, 3, 1])
HEADS = (values(4, 4, 8, 4), values(4, 4, 8, 4, seed=1), values(4, 4, 8, 4, seed=2))
SIGNS = torch.tensor([1.0, -1.0]).repeat(4).double()


def _running(fn: Any) -> Any:
    """A normalisation in training with running statistics: its result, and the statistics afterwards."""

    def run(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> Any:
        mean, var = mean.detach().clone(), var.detach().clone()
        return fn(x, mean, var), mean, var

    return run


def _attention(**kwargs: Any) -> Any:
    return lambda q, k, v, *mask: F.scaled_dot_product_attention(q, k, v, *mask, **kwargs)


STATISTICS = (values(4, seed=4), positive(4, seed=5))
CASES = [
    Case("softmax, last", lambda x: x.softmax(-1), (X,)),
    Case("softmax, dim 0", lambda x: x.softmax(0), (X,)),
    Case("log_softmax", lambda x: x.log_softmax(1), (X,)),
    Case("log_softmax, dim 0", lambda x: x.log_softmax(0), (X,)),
    Case("F.softmin", lambda x: F.softmin(x, 1), (X,)),
    Case("F.normalize", lambda x: F.normalize(x, dim=1), (X,)),
    Case("F.normalize, dim 0", lambda x: F.normalize(x, dim=0), (X,)),
    Case("F.mse_loss", F.mse_loss, (X, Y)),
    Case("F.mse_loss, sum", lambda x, y: F.mse_loss(x, y, reduction="sum"), (X, Y)),
    Case("F.mse_loss, none", lambda x, y: F.mse_loss(x, y, reduction="none"), (X, Y)),
    Case("F.l1_loss", F.l1_loss, (X, Y)),
    Case("F.smooth_l1_loss", F.smooth_l1_loss, (X, Y)),
    Case("F.huber_loss", lambda x, y: F.huber_loss(x, y, delta=0.3), (X, Y)),
    Case("F.soft_margin_loss", lambda x, y: F.soft_margin_loss(x, y.detach().sign()), (X, Y)),
    Case(
        "F.binary_cross_entropy",
        lambda x, y: F.binary_cross_entropy(x / 2, y / 2),
        (positive(8, 4), positive(8, 4, seed=1)),
    ),
    Case("F.binary_cross_entropy_with_logits", lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()), (X, Y)),
    Case("F.cross_entropy", F.cross_entropy, (X, CLASSES)),
    Case("F.cross_entropy, ignored", F.cross_entropy, (X, IGNORED)),
    Case("F.cross_entropy, weights", lambda x, t, w: F.cross_entropy(x, t, w.detach()), (X, CLASSES, W)),
    Case("F.cross_entropy, sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), (X, CLASSES)),
    Case("F.cross_entropy, none", lambda x, t: F.cross_entropy(x, t, reduction="none"), (X, CLASSES)),
    Case("F.cross_entropy, smoothed", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), (X, CLASSES)),
    Case("F.cross_entropy, probabilities", lambda x, y: F.cross_entropy(x, y.softmax(1)), (X, Y)),
    Case("F.nll_loss", lambda x, t: F.nll_loss(x.log_softmax(1), t), (X, CLASSES)),
    Case("F.kl_div", lambda x, y: F.kl_div(x.log_softmax(1), y.softmax(1), reduction="batchmean"), (X, Y)),
    Case("F.gaussian_nll_loss", lambda x, y, v: F.gaussian_nll_loss(x, y, v), (X, Y, positive(8, 4))),
    Case("F.poisson_nll_loss", F.poisson_nll_loss, (X, Y)),
    Case("F.hinge_embedding_loss", lambda x, s: F.hinge_embedding_loss(x[:, 0], s.detach()), (X, SIGNS)),
    Case(
        "F.margin_ranking_loss",
        lambda x, y, s: F.margin_ranking_loss(x[:, 0], y[:, 0], s.detach()),
        (X, Y, SIGNS),
        whole=(2,),
    ),
    Case(
        "F.cosine_embedding_loss", lambda x, y, s: F.cosine_embedding_loss(x, y, s.detach()), (X, Y, SIGNS), whole=(2,)
    ),
    Case("F.triplet_margin_loss", F.triplet_margin_loss, (X, Y, X * Y), whole=(2,)),
    Case("F.multi_margin_loss", F.multi_margin_loss, (X, CLASSES)),
    Case("F.multilabel_soft_margin_loss", lambda x, y: F.multilabel_soft_margin_loss(x, y.sigmoid()), (X, Y)),
    Case("F.layer_norm", lambda x: F.layer_norm(x, (4,)), (BOX,)),
    Case("F.layer_norm, scale and shift", lambda x, w, b: F.layer_norm(x, (4,), w, b), (BOX, W, B)),
    Case("F.layer_norm, two dims", lambda x: F.layer_norm(x, (8, 4)), (BOX,)),
    Case("F.rms_norm", lambda x, w: F.rms_norm(x, (4,), w), (BOX, W)),
    Case("F.group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), (SIGNAL, W, B)),
    Case("F.instance_norm", lambda x: F.instance_norm(x), (SIGNAL,)),
    Case(
        "F.instance_norm, running",
        _running(lambda x, m, v: F.instance_norm(x, m, v, use_input_stats=True)),
        (SIGNAL, *STATISTICS),
    ),
    Case("F.batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), (X, W, B)),
    Case(
        "F.batch_norm, running", _running(lambda x, m, v: F.batch_norm(x, m, v, training=True)), (SIGNAL, *STATISTICS)
    ),
    Case("F.batch_norm, evaluation", lambda x, m, v: F.batch_norm(x, m.detach(), v.detach()), (SIGNAL, *STATISTICS)),
    Case("F.local_response_norm", lambda x: F.local_response_norm(x, 2), (SIGNAL,)),
    Case("F.conv1d", F.conv1d, (SIGNAL, values(8, 4, 3), values(8))),
    Case("F.conv1d, padding, stride", lambda x, w: F.conv1d(x, w, padding=1, stride=2), (SIGNAL, values(8, 4, 3))),
    Case("F.conv2d", lambda x, w, b: F.conv2d(x, w, b, padding=1), (IMAGES, values(4, 4, 3, 3), values(4))),
    Case("F.conv2d, groups", lambda x, w: F.conv2d(x, w, padding=1, groups=4), (IMAGES, values(4, 1, 3, 3))),
    Case("F.conv2d, patches", lambda x, w: F.conv2d(x, w, stride=4), (IMAGES, values(8, 4, 4, 4))),
    Case("F.conv_transpose1d", lambda x, w: F.conv_transpose1d(x, w, stride=2), (SIGNAL, values(4, 4, 3))),
    Case("F.conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGES, values(4, 2, 2, 2))),
    Case("F.max_pool1d", lambda x: F.max_pool1d(x, 2), (SIGNAL,)),
    Case("F.max_pool2d", lambda x: F.max_pool2d(x, 2), (IMAGES,)),
    Case("F.avg_pool1d", lambda x: F.avg_pool1d(x, 2), (SIGNAL,)),
    Case("F.avg_pool2d", lambda x: F.avg_pool2d(x, 2), (IMAGES,)),
    Case("F.adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 2), (IMAGES,)),
    Case("F.adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2), (IMAGES,)),
    Case("F.interpolate", lambda x: F.interpolate(x, scale_factor=2.0), (IMAGES,)),
    Case("F.interpolate, bilinear", lambda x: F.interpolate(x, size=(12, 12), mode="bilinear"), (IMAGES,)),
    Case("F.pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (IMAGES,)),
    Case("F.unfold", lambda x: F.unfold(x, 2, stride=2), (IMAGES,)),
    Case("F.fold", lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 8), 2, stride=2), (IMAGES,)),
    Case("attention", _attention(), HEADS),
    Case("attention, causal", _attention(is_causal=True), HEADS),
    Case("attention, scale", _attention(scale=0.3), HEADS),
    Case("attention, mask of booleans", _attention(), (*HEADS, mask(8, 8) | torch.eye(8).bool())),
    Case("attention, mask of the batch", _attention(), (*HEADS, mask(4, 1, 8, 8) | torch.eye(8).bool())),
    Case("attention, mask of the heads", _attention(), (*HEADS, mask(1, 4, 8, 8) | torch.eye(8).bool())),
    Case("attention, mask of each", _attention(), (*HEADS, mask(4, 4, 8, 8) | torch.eye(8).bool())),
    Case(
        "attention, bias",
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.detach()),
        (*HEADS, values(8, 8)),
    ),
    Case("attention, learnt bias", _attention(), (*HEADS, values(8, 8))),
    Case("attention, padding", _attention(), (*HEADS, mask(4, 1, 1, 8) | (torch.arange(8) == 0))),
    Case("attention, grouped", _attention(enable_gqa=True), (HEADS[0], HEADS[1][:, :2], HEADS[2][:, :2])),
    Case("attention, written out", lambda q, k, v: (q @ k.mT / 2).softmax(-1) @ v, HEADS),
]
