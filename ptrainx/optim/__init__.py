"""Optimizers as pure functions, in optax's shape: transformations, chains of them, and schedules."""

from ptrainx.optim.adam_rule import ScaleByAdamState, scale_by_adam
from ptrainx.optim.alias import adagrad, adam, adamw, lion, momentum, rmsprop, sgd
from ptrainx.optim.base import EmptyState, GradientTransformation, Schedule, apply_updates, identity
from ptrainx.optim.clipping import clip, clip_by_global_norm, global_norm
from ptrainx.optim.combine import MaskedState, chain, masked
from ptrainx.optim.inject import InjectHyperparamsState, inject_hyperparams
from ptrainx.optim.lion_rule import ScaleByLionState, scale_by_lion
from ptrainx.optim.loss_scale import DynamicLossScale, LossScaleState, all_finite
from ptrainx.optim.master import MasterState, with_master
from ptrainx.optim.momentum_rule import TraceState, trace
from ptrainx.optim.rms_rule import ScaleByRmsState, ScaleByRssState, scale_by_rms, scale_by_rss
from ptrainx.optim.scaling import (
    ScaleByScheduleState,
    add_decayed_weights,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
)
from ptrainx.optim.schedules import (
    constant,
    constant_schedule,
    cosine_decay,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    warmup_cosine_decay,
    warmup_cosine_decay_schedule,
)

__all__ = [
    "DynamicLossScale",
    "EmptyState",
    "GradientTransformation",
    "InjectHyperparamsState",
    "LossScaleState",
    "MaskedState",
    "MasterState",
    "ScaleByAdamState",
    "ScaleByLionState",
    "ScaleByRmsState",
    "ScaleByRssState",
    "ScaleByScheduleState",
    "Schedule",
    "TraceState",
    "adagrad",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "apply_updates",
    "chain",
    "clip",
    "clip_by_global_norm",
    "constant",
    "constant_schedule",
    "cosine_decay",
    "cosine_decay_schedule",
    "exponential_decay",
    "global_norm",
    "identity",
    "inject_hyperparams",
    "join_schedules",
    "linear_schedule",
    "lion",
    "masked",
    "momentum",
    "piecewise_constant_schedule",
    "rmsprop",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_rms",
    "scale_by_rss",
    "scale_by_schedule",
    "sgd",
    "trace",
    "warmup_cosine_decay",
    "warmup_cosine_decay_schedule",
    "with_master",
]
