"""Pointwise operators, with broadcasting."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tests.ops.coverage.case import Case, ints, mask, positive, values

__all__ = ["CASES"]

X, Y, ROW, COLUMN, POSITIVE = (
    values(8, 4),
    values(8, 4, seed=1),
    values(4, seed=2),
    values(8, 1, seed=3),
    positive(8, 4),
)
BITS, MORE_BITS = ints(8, 4, below=13), ints(8, 4, below=7, seed=1)


def _foreach(name: str, *others: Any) -> Any:
    """A `_foreach_` function of a list of two."""
    fn = getattr(torch, f"_foreach_{name}")
    return lambda x, y: list(fn([x, y], *others))


UNARY = [
    "abs", "neg", "exp", "expm1", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asinh", "atan", "sigmoid", "relu",
    "sign", "sgn", "square", "erf", "erfc", "ceil", "floor", "round", "trunc", "frac", "exp2", "deg2rad", "rad2deg",
    "sinc", "positive", "signbit", "isnan", "isinf", "isfinite", "logical_not", "nan_to_num", "clone",
]  # fmt: skip
UNARY_POSITIVE = ["sqrt", "rsqrt", "log", "log2", "log10", "log1p", "reciprocal", "lgamma", "digamma", "acosh"]
UNARY_INSIDE = ["asin", "acos", "atanh", "erfinv", "logit"]
ACTIVATIONS = [
    "gelu", "silu", "mish", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign", "tanhshrink", "hardtanh",
    "hardswish", "hardsigmoid", "hardshrink", "softshrink", "logsigmoid", "relu6", "threshold",
]  # fmt: skip
BINARY = [
    "add", "sub", "mul", "maximum", "minimum", "atan2", "hypot", "fmax", "fmin", "logaddexp", "eq", "ne", "lt",
    "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "copysign",
]  # fmt: skip

CASES = [
    *(Case(name, getattr(torch, name), (X,)) for name in UNARY),
    *(Case(name, getattr(torch, name), (POSITIVE + 1 if name == "acosh" else POSITIVE,)) for name in UNARY_POSITIVE),
    *(Case(name, getattr(torch, name), (POSITIVE / 2,)) for name in UNARY_INSIDE),
    *(
        Case(f"F.{name}", (lambda x: F.threshold(x, 0.1, -1.0)) if name == "threshold" else getattr(F, name), (X,))
        for name in ACTIVATIONS
    ),
    Case("F.gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), (X,)),
    Case("F.glu", lambda x: F.glu(x, 0), (X,)),
    Case("F.prelu", lambda x, w: F.prelu(x, w), (X, values(4, seed=5))),
    *(Case(name, getattr(torch, name), (X, Y)) for name in BINARY),
    Case("div", torch.div, (X, POSITIVE)),
    Case("div, floor", lambda x, y: torch.div(x, y, rounding_mode="floor"), (X, POSITIVE)),
    Case("floor_divide", lambda x, y: torch.floor_divide(x.detach(), y.detach()), (X, POSITIVE)),
    Case("remainder", torch.remainder, (X, POSITIVE)),
    Case("fmod", torch.fmod, (X, POSITIVE)),
    Case("pow", torch.pow, (POSITIVE, Y)),
    Case("xlogy", torch.xlogy, (X, POSITIVE)),
    Case("add, row", torch.add, (X, ROW)),
    Case("mul, row", torch.mul, (X, ROW)),
    Case("sub, column", torch.sub, (X, COLUMN)),
    Case("div, outer", lambda x, y: x / (y.abs() + 1), (COLUMN, ROW)),
    Case("add, alpha", lambda x, y: torch.add(x, y, alpha=-2), (X, Y)),
    Case("add, number", lambda x: x + 3, (X,)),
    Case("sub from a number", lambda x: 1 - x, (X,)),
    Case("mul, number", lambda x: 3 * x, (X,)),
    Case("div, number", lambda x: x / 3, (X,)),
    Case("number div", lambda x: 3 / x, (POSITIVE,)),
    Case("pow, number", lambda x: x**3, (X,)),
    Case("number pow", lambda x: 2**x, (X,)),
    Case("remainder, number", lambda x: x % 0.3, (X,)),
    Case("floor_divide, number", lambda x: x.detach() // 0.3, (X,)),
    Case("add, 0-d", lambda x, s: x + s, (X, values())),
    Case("mul, 0-d", lambda x, s: x * s, (X, values())),
    Case("clamp", lambda x: x.clamp(-0.3, 0.4), (X,)),
    Case("clamp_min", lambda x: x.clamp(min=0.1), (X,)),
    Case("clamp, tensors", lambda x, low: x.clamp(low, low + 0.5), (X, ROW)),
    Case("heaviside", lambda x, y: torch.heaviside(x.detach().round(), y.detach()), (X, Y)),
    Case("lerp", torch.lerp, (X, Y, values(8, 4, seed=2))),
    Case("lerp, number", lambda x, y: torch.lerp(x, y, 0.3), (X, Y)),
    Case("addcmul", lambda x, y, z: torch.addcmul(x, y, z, value=0.5), (X, Y, ROW)),
    Case("addcdiv", lambda x, y, z: torch.addcdiv(x, y, z, value=0.5), (X, Y, POSITIVE)),
    Case("bitwise_and", torch.bitwise_and, (BITS, MORE_BITS)),
    Case("bitwise_or", torch.bitwise_or, (BITS, MORE_BITS)),
    Case("bitwise_xor", torch.bitwise_xor, (BITS, MORE_BITS)),
    Case("bitwise_not", torch.bitwise_not, (BITS,)),
    Case("bitwise shifts", lambda x, y: (x << 2) + (x >> y), (BITS, MORE_BITS)),
    Case("integer add, mul", lambda x, y: x * y + 2, (BITS, MORE_BITS)),
    Case("integer floor_divide", lambda x, y: x // (y + 1), (BITS, MORE_BITS)),
    Case("and, or, not", lambda x, y: (x & ~y) | (x ^ y), (mask(8, 4), mask(8, 4, seed=1))),
    Case("where", torch.where, (mask(8, 4), X, Y)),
    Case("where, row", torch.where, (mask(8, 1), X, ROW)),
    Case("where, number", lambda m, x: torch.where(m, x, 0.5), (mask(8, 4), X)),
    Case("where of itself", lambda x: torch.where(x > 0, x, x * 0.1), (X,)),
    Case("masked_fill", lambda x, m: x.masked_fill(m, -2.0), (X, mask(8, 4))),
    Case("masked_fill, row", lambda x, m: x.masked_fill(m, -2.0), (X, mask(4))),
    Case("tril", torch.tril, (X,)),
    Case("triu", lambda x: x.triu(1), (X,)),
    Case("isclose", lambda x, y: torch.isclose(x, y, rtol=0.5), (X, Y)),
    Case("to float32", lambda x: x.float(), (X,), tolerance=1e-6),
    Case("to bfloat16 and back", lambda x: x.bfloat16().double(), (X,)),
    Case("to int", lambda x: (x * 9).long(), (X,)),
    Case("to bool", lambda x: x.bool(), (BITS,)),
    Case("int to float", lambda x: x.double() / 3, (BITS,)),
    Case("type_as", lambda x, y: x.type_as(y), (BITS, X)),
    Case("detach", lambda x: x.detach() * x, (X,)),
    Case("zeros_like", lambda x: torch.zeros_like(x) + x, (X,)),
    Case("full_like", lambda x: torch.full_like(x, 2.0) * x, (X,)),
    Case("ones_like", lambda x: torch.ones_like(x), (X,)),
    Case("new_zeros", lambda x: x.new_zeros(8, 4) + x, (X,)),
    Case("add_", lambda x, y: (x * 2).add_(y), (X, Y)),
    Case("mul_", lambda x, y: (x * 2).mul_(y), (X, Y)),
    Case("copy_", lambda x, y: (x * 2).copy_(y) + x, (X, Y)),
    Case("relu_", lambda x: (x * 2).relu_(), (X,)),
    Case("fill_", lambda x: (x * 2).fill_(3.0) + x, (X,)),
    Case("zero_", lambda x: (x * 2).zero_() + x, (X,)),
    Case("clamp_", lambda x: (x * 2).clamp_(-1, 1), (X,)),
    Case("masked_fill_", lambda x, m: (x * 2).masked_fill_(m, 0.5), (X, mask(8, 4))),
    Case("foreach add", _foreach("add", 1.5), (X, ROW)),
    Case("foreach mul", _foreach("mul", -2.0), (X, ROW)),
    Case("foreach div", _foreach("div", 3.0), (X, ROW)),
    Case("foreach sqrt", lambda x, y: list(torch._foreach_sqrt([x.abs() + 1, y.abs() + 1])), (X, ROW)),
    Case("foreach neg, exp", lambda x, y: list(torch._foreach_exp(torch._foreach_neg([x, y]))), (X, ROW)),
    Case("foreach add of lists", lambda x, y: list(torch._foreach_add([x, y], [y, x], alpha=2)), (X, Y)),
    Case("foreach mul of lists", lambda x, y: list(torch._foreach_mul([x, y], [y, x])), (X, Y)),
    Case("foreach addcmul", lambda x, y: list(torch._foreach_addcmul([x, y], [y, x], [x, x], value=0.5)), (X, Y)),
    Case("foreach addcdiv", lambda x, y: list(torch._foreach_addcdiv([x, y], [y, x], [x.abs() + 1] * 2)), (X, Y)),
    Case("foreach lerp", lambda x, y: list(torch._foreach_lerp([x, y], [y, x], 0.3)), (X, Y)),
]
