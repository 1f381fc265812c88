"""Normal numbers by the inverse of their distribution function, in float32, the same bits on every backend.

With u uniform on (-1, 1), z = sqrt(2) erfinv(u) is normal. As Giles does, z = u * p(w) with w = -log(1 - u*u), and p
one polynomial for the body (w < 5) and one for the tail. The logarithm is taken apart by its exponent bits, the rest is
a polynomial. Only add, subtract, multiply, compare and bit casts occur, never a library's log or sqrt, whose last bits
differ between eager kernels and compilers. The largest error over all 2**23 values that `normal` can draw is 3.3 ulp.

The coefficients are weighted Chebyshev least squares, reweighted to the smallest largest relative error (Lawson), with
sqrt(2) taken in. Source of the method: Giles, "Approximating the erfinv function", GPU Computing Gems 2, 2011.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LARGEST", "normal_"]

# The largest float32 below one: the open ends of (-1, 1).
LARGEST = 1.0 - 2.0**-24

_LN2 = math.log(2.0)
_CUT = 5.0
_BODY_CENTRE = 2.5
_TAIL_CENTRE = 10.5
# A float32's bits minus these, shifted right by 23, is the exponent that leaves a mantissa in [0.699, 1.398).
_MANTISSA_LOW = 0x3F330000

# log(1 + r) / r for r in [-0.301, 0.398]
_LOG = (
    0.09552383422851562,
    -0.14706993103027344,
    0.14833663403987885,
    -0.16513940691947937,
    0.19962197542190552,
    -0.25004008412361145,
    0.3333410322666168,
    -0.4999997019767761,
    1.0,
)
# sqrt(2) erfinv(u) / u in w - 2.5 for w in [0, 5]
_BODY = (
    -1.2432423979191753e-08,
    3.285594374347056e-08,
    6.59264799196535e-07,
    -4.8970041461871006e-06,
    -7.01923363521928e-06,
    0.00030878567486070096,
    -0.0017716445727273822,
    -0.005907717160880566,
    0.34880203008651733,
    2.1233134269714355,
)
# the same in w - 10.5 for w in [5, 16.7]
_TAIL = (
    -4.935608172162986e-11,
    7.230174237093934e-10,
    -3.150917970984324e-09,
    -7.438039517637662e-09,
    4.4318022673905944e-07,
    -1.0697183824959211e-05,
    0.0002198578731622547,
    -0.005038280040025711,
    0.21934276819229126,
    4.347583770751953,
)


def normal_(u: Tensor, spare: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Replaces u by sqrt(2) erfinv(u), and returns it.

    Args:
        u: float32[n], between -LARGEST and LARGEST.
        spare: three float32[n] to work in.
    """
    w = _minus_log(torch.neg(u, out=spare[0]).add_(1.0).mul_(torch.add(u, 1.0, out=spare[1])), *spare[1:])
    return u.mul_(_polynomials(w, *spare[1:]))


def _minus_log(t: Tensor, spare1: Tensor, spare2: Tensor) -> Tensor:
    """-log(t) for t in (0, 1], in the memory of t."""
    bits = t.view(torch.int32)
    exponent = torch.sub(bits, _MANTISSA_LOW, out=spare1.view(torch.int32)).bitwise_right_shift_(23)
    bits.sub_(exponent, alpha=1 << 23)
    r = t.sub_(1.0)
    log_mantissa = _horner(r, _LOG, spare2).mul_(r)
    return t.copy_(exponent).mul_(_LN2).add_(log_mantissa).neg_()


def _polynomials(w: Tensor, spare1: Tensor, spare2: Tensor) -> Tensor:
    """p(w): the body's polynomial, and the tail's where w >= 5, which is one element in 300."""
    body = _horner(torch.sub(w, _BODY_CENTRE, out=spare1), _BODY, spare2)
    if w.device.type == "cpu":
        return _with_tail_gathered(body, w)
    # Elsewhere the number of tail elements is not known on the host.
    return _with_tail_everywhere(body, w)


def _with_tail_gathered(body: Tensor, w: Tensor) -> Tensor:
    where = (w >= _CUT).nonzero().squeeze(-1)
    x = w[where].sub_(_TAIL_CENTRE)
    return body.index_copy_(0, where, _horner(x, _TAIL, torch.empty_like(x)))


def _with_tail_everywhere(body: Tensor, w: Tensor) -> Tensor:
    return torch.where(w >= _CUT, _horner(w - _TAIL_CENTRE, _TAIL, torch.empty_like(w)), body)


def _horner(x: Tensor, coefficients: tuple[float, ...], out: Tensor) -> Tensor:
    # Multiplication and addition stay two operations: a fused one rounds once and gives other bits.
    out.fill_(coefficients[0])
    for c in coefficients[1:]:
        out.mul_(x).add_(c)
    return out
