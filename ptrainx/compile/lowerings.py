"""Our own operators as Inductor compiles them: random draws, products by oneDNN, values that are computed once.

Importing this file imports Inductor and registers them. A draw is one pointwise kernel that fuses with its readers; its
bits are those of the eager form in `ops/random`, of which it repeats the steps: add, subtract, multiply, compare, shift
and bit casts of 32-bit numbers, multiplication and addition apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ptrainx.compile.kernels import ONEDNN_MM
from ptrainx.core import torch_compat_inductor as inductor
from ptrainx.ops.random import inverse_normal
from ptrainx.ops.random.distributions import DISTRIBUTIONS, float32, truncated_range
from ptrainx.ops.random.operator import HASH, RANDOM, SUBKEYS
from ptrainx.ops.random.threefry import PARITY, ROTATIONS, signed

__all__ = ["SETTLED", "settle_scalars"]

ops = inductor.ops
I32, I64, F32, F64 = torch.int32, torch.int64, torch.float32, torch.float64

_LIBRARY = torch.library.Library("ptrainx_inductor", "DEF")
_LIBRARY.define("settled(Tensor x) -> Tensor")
_LIBRARY.impl("settled", lambda x: x.clone(), "CompositeExplicitAutograd")
_LIBRARY.impl("settled", torch.empty_like, "Meta")
SETTLED = torch.ops.ptrainx_inductor.settled.default


def settle_scalars(graph: torch.fx.Graph) -> None:
    """Makes values of one element that larger ones read be computed once, not again for each element.

    An optimizer's bias correction, two powers of the step, would otherwise cost more than the update itself.
    """
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() != 1:
            continue
        if not node.all_input_nodes or value.device.type != "cpu":
            continue
        larger = [user for user in node.users if _numel(user) > 1]
        if larger:
            with graph.inserting_after(node):
                settled = graph.call_function(SETTLED, (node,))
            settled.meta["val"] = value
            for user in larger:
                user.replace_input_with(node, settled)


def _numel(node: torch.fx.Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, torch.Tensor) else 0


@inductor.register_lowering(SETTLED, type_promotion_kind=None)
def _settled(x: Any) -> Any:
    x.realize()
    return x


_linear = inductor.fallback_handler(torch.ops.mkldnn._linear_pointwise.default, add_to_fallback_set=False)


@inductor.register_lowering(ONEDNN_MM, type_promotion_kind=None)
def _onednn_mm(left: Any, right: Any) -> Any:
    return _linear(left, inductor.permute(right, [1, 0]), None, "none", [], "")


def _i32(value: int) -> Any:
    return ops.constant(value, I32)


def _f32(value: float) -> Any:
    return ops.constant(float32(value), F32)


def _threefry(k0: Any, k1: Any, x0: Any, x1: Any) -> tuple[Any, Any]:
    keys = (k0, k1, ops.bitwise_xor(ops.bitwise_xor(k0, k1), _i32(signed(PARITY))))
    x0, x1 = ops.add(x0, k0), ops.add(x1, k1)
    for i in range(5):
        for r in ROTATIONS[i % 2]:
            x0 = ops.add(x0, x1)
            right = ops.bitwise_and(ops.bitwise_right_shift(x1, _i32(32 - r)), _i32((1 << r) - 1))
            x1 = ops.bitwise_xor(ops.bitwise_or(ops.bitwise_left_shift(x1, _i32(r)), right), x0)
        x0 = ops.add(x0, keys[(i + 1) % 3])
        x1 = ops.add(ops.add(x1, keys[(i + 2) % 3]), _i32(i + 1))
    return x0, x1


def _words(number: Any) -> tuple[Any, Any]:
    """The upper and the lower 32 bits of an int64."""
    upper = ops.to_dtype(ops.bitwise_right_shift(number, ops.constant(32, I64)), I32, src_dtype=I64)
    return upper, ops.to_dtype(number, I32, src_dtype=I64)


def _affine(x: Any, low: float, high: float) -> Any:
    if (low, high) == (0.0, 1.0):
        return x
    return ops.maximum(ops.add(ops.mul(x, _f32(high - low)), _f32(low)), _f32(low))


def _mantissa(bits: Any) -> Any:
    return ops.bitwise_and(ops.bitwise_right_shift(bits, _i32(9)), _i32(0x7FFFFF))


def _unit(bits: Any, scale: float) -> Any:
    return ops.mul(ops.to_dtype(_mantissa(bits), F32, src_dtype=I32), _f32(scale))


def _horner(x: Any, coefficients: Sequence[float]) -> Any:
    out = _f32(coefficients[0])
    for c in coefficients[1:]:
        out = ops.add(ops.mul(out, x), _f32(c))
    return out


def _inverse_normal(u: Any) -> Any:
    """As `inverse_normal.normal_`."""
    n = inverse_normal
    t = ops.mul(ops.add(ops.neg(u), _f32(1.0)), ops.add(u, _f32(1.0)))
    bits = ops.to_dtype_bitcast(t, I32, F32)
    exponent = ops.bitwise_right_shift(ops.sub(bits, _i32(n._MANTISSA_LOW)), _i32(23))
    bits = ops.sub(bits, ops.bitwise_left_shift(exponent, _i32(23)))
    r = ops.sub(ops.to_dtype_bitcast(bits, F32, I32), _f32(1.0))
    log_mantissa = ops.mul(_horner(r, n._LOG), r)
    log = ops.add(ops.mul(ops.to_dtype(exponent, F32, src_dtype=I32), _f32(n._LN2)), log_mantissa)
    w = ops.neg(log)
    body = _horner(ops.sub(w, _f32(n._BODY_CENTRE)), n._BODY)
    tail = _horner(ops.sub(w, _f32(n._TAIL_CENTRE)), n._TAIL)
    return ops.mul(u, ops.where(ops.ge(w, _f32(n._CUT)), tail, body))


def _normal(bits: Any) -> Any:
    return _inverse_normal(ops.add(_unit(bits, 2.0**-22), _f32(-inverse_normal.LARGEST)))


def _truncated_normal(bits: Any, a: float, b: float) -> Any:
    low, high = truncated_range(a, b)
    z = _inverse_normal(ops.minimum(_affine(_unit(bits, 2.0**-23), low, high), _f32(high)))
    inf = np.float32(np.inf)
    least, most = float(np.nextafter(np.float32(a), inf)), float(np.nextafter(np.float32(b), -inf))
    return ops.minimum(ops.maximum(z, _f32(least)), _f32(most))


def _uniform64(x0: Any, x1: Any, a: float, b: float) -> Any:
    high, low = (ops.to_dtype(x, I64, src_dtype=I32) for x in (x0, x1))
    high = ops.bitwise_left_shift(ops.bitwise_and(high, ops.constant(0xFFFFFFFF, I64)), ops.constant(20, I64))
    low = ops.bitwise_and(ops.bitwise_right_shift(low, ops.constant(12, I64)), ops.constant(0xFFFFF, I64))
    unit = ops.mul(ops.to_dtype(ops.bitwise_or(high, low), F64, src_dtype=I64), ops.constant(2.0**-52, F64))
    if (a, b) == (0.0, 1.0):
        return unit
    scaled = ops.add(ops.mul(unit, ops.constant(b - a, F64)), ops.constant(a, F64))
    return ops.maximum(scaled, ops.constant(a, F64))


def _from_words(dist: str, x0: Any, x1: Any, a: float, b: float) -> Any:
    if dist == "uniform64":
        return _uniform64(x0, x1, a, b)
    bits = ops.bitwise_xor(x0, x1)
    if dist == "uniform":
        return _affine(_unit(bits, 2.0**-23), float32(a), float32(b))
    if dist == "bernoulli":
        return ops.lt(_mantissa(bits), _i32(math.ceil(float32(a) * 2.0**23)))
    if dist == "normal":
        return _normal(bits)
    if dist == "truncated_normal":
        return _truncated_normal(bits, a, b)
    return bits


def _dropout(hashed: Callable[[Any], tuple[Any, Any]], number: Any, dtype: torch.dtype, a: float, b: float) -> Any:
    """Sixteen bits of a hash that four elements share decide."""
    x0, x1 = hashed(ops.bitwise_right_shift(number, ops.constant(2, dtype)))

    def is_clear(bit: int) -> Any:
        return ops.eq(ops.bitwise_and(number, ops.constant(bit, dtype)), ops.constant(0, dtype))

    word = ops.where(is_clear(2), x0, x1)
    quarter = ops.bitwise_right_shift(ops.where(is_clear(1), ops.bitwise_left_shift(word, _i32(16)), word), _i32(16))
    return ops.where(ops.le(quarter, _i32(int(a) - 1 - 32768)), _f32(b), _f32(0.0))


_random_eagerly = inductor.fallback_handler(RANDOM, add_to_fallback_set=False)


@inductor.register_lowering(RANDOM, type_promotion_kind=None)
def _random(
    key: Any, shape: Sequence[int], start: Sequence[int], size: Sequence[int], dist: str, a: float, b: float
) -> Any:
    if DISTRIBUTIONS[dist].streams != 1:
        return _random_eagerly(key, shape, start, size, dist, a, b)
    key.realize()
    word = inductor.index_loader(key)
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    base = sum(first * stride for first, stride in zip(start, strides))
    dtype = I32 if math.prod(shape) < 1 << 31 else I64

    def inner(index: Sequence[Any]) -> Any:
        number = ops.index_expr(base + sum(i * stride for i, stride in zip(index, strides)), dtype)

        def hashed(count: Any) -> tuple[Any, Any]:
            upper, lower = (_i32(0), count) if dtype is I32 else _words(count)
            return _threefry(word(0), word(1), upper, lower)

        if dist == "dropout":
            return _dropout(hashed, number, dtype, a, b)
        return _from_words(dist, *hashed(number), a, b)

    drawn = inductor.Pointwise.create(
        device=key.get_device(), dtype=DISTRIBUTIONS[dist].dtype, inner_fn=inner, ranges=list(size)
    )
    # Computed once where it is read twice, as a mask is; it still fuses with a reader.
    drawn.realize()
    return drawn


def _keys(key: Any, ranges: list[Any], number: Callable[[Sequence[Any]], Any]) -> Any:
    """int32[*ranges, 2]: the hashes of int64 numbers."""
    key.realize()
    word = inductor.index_loader(key)

    def inner(index: Sequence[Any]) -> Any:
        x0, x1 = _threefry(word(0), word(1), *_words(number(index[:-1])))
        return ops.where(ops.eq(ops.index_expr(index[-1], I32), _i32(0)), x0, x1)

    keys = inductor.Pointwise.create(device=key.get_device(), dtype=I32, inner_fn=inner, ranges=[*ranges, 2])
    keys.realize()
    return keys


@inductor.register_lowering(HASH, type_promotion_kind=None)
def _hash(key: Any, data: Any) -> Any:
    load, dtype = data.make_loader(), data.get_dtype()
    return _keys(
        key,
        list(data.get_size()),
        lambda index: load(index) if dtype is I64 else ops.to_dtype(load(index), I64, src_dtype=dtype),
    )


@inductor.register_lowering(SUBKEYS, type_promotion_kind=None)
def _subkeys(key: Any, first: int, count: int) -> Any:
    return _keys(key, [count], lambda index: ops.index_expr(index[0] + first, I64))
