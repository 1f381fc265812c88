"""The distributions, against scipy's."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch

from ptrainx.ops import random
from ptrainx.ops.random import inverse_normal
from ptrainx.ops.random.inverse_normal import LARGEST, normal_

N = 200_000
# Keys are fixed, so that a test passes always or never; a true distribution fails for one key in a thousand.
LEAST_P = 1e-3

CONTINUOUS = {
    "uniform": (lambda k: random.uniform(k, (N,)), scipy.stats.uniform()),
    "uniform in [-2, 5)": (lambda k: random.uniform(k, (N,), minval=-2.0, maxval=5.0), scipy.stats.uniform(-2, 7)),
    "uniform, float64": (lambda k: random.uniform(k, (N,), torch.float64), scipy.stats.uniform()),
    "normal": (lambda k: random.normal(k, (N,)), scipy.stats.norm()),
    "truncated at 2 sigma": (lambda k: random.truncated_normal(k, -2.0, 2.0, (N,)), scipy.stats.truncnorm(-2, 2)),
    "truncated on one side": (
        lambda k: random.truncated_normal(k, 1.5, float("inf"), (N,)),
        scipy.stats.truncnorm(1.5, np.inf),
    ),
    "truncated, narrow": (lambda k: random.truncated_normal(k, -0.01, 0.03, (N,)), scipy.stats.truncnorm(-0.01, 0.03)),
    "truncated, wide": (lambda k: random.truncated_normal(k, -9.0, 9.0, (N,)), scipy.stats.norm()),
}


@pytest.mark.parametrize("case", CONTINUOUS)
@pytest.mark.parametrize("seed", [1, 2])
def test_kolmogorov_smirnov(case, seed):
    sample, expected = CONTINUOUS[case]
    assert scipy.stats.kstest(sample(random.key(seed)).double().numpy(), expected.cdf).pvalue > LEAST_P


@pytest.mark.parametrize("case", CONTINUOUS)
def test_moments(case):
    sample, expected = CONTINUOUS[case]
    values = sample(random.key(5)).double().numpy()
    assert abs(values.mean() - expected.mean()) < 5 * expected.std() / N**0.5
    assert values.std() == pytest.approx(expected.std(), rel=0.02)


def test_bounds_are_kept():
    for low, high in ((-2.0, 2.0), (0.5, 0.6), (-3.0, float("-inf")), (1.5, float("inf"))):
        low, high = min(low, high), max(low, high)
        z = random.truncated_normal(random.key(4), low, high, (N,))
        assert low < z.min()
        assert z.max() < high
        assert z.isfinite().all()
    u = random.uniform(random.key(4), (N,), minval=-1.0, maxval=3.0)
    assert u.min() >= -1.0
    assert u.max() < 3.0


@pytest.mark.parametrize("span", [2, 10, 1000, 65536, 100_003, 3 << 30, (1 << 40) - 1, 1 << 33])
def test_randint_is_even(span):
    values = random.randint(random.key(span), (N,), -7, span - 7).numpy() + 7
    assert values.min() >= 0
    assert values.max() < span
    cells = min(span, 96)
    edges = [span * i // cells for i in range(cells + 1)]
    counts = np.histogram(values, bins=np.array(edges, dtype=np.float64) - 0.5)[0]
    assert scipy.stats.chisquare(counts, np.diff(edges) / span * N).pvalue > LEAST_P
    residues = np.bincount(values % 7, minlength=7)[: min(span, 7)]
    expected = np.array([(span - r + 6) // 7 for r in range(min(span, 7))]) / span * N
    assert scipy.stats.chisquare(residues, expected).pvalue > LEAST_P


@pytest.mark.parametrize("p", [0.001, 0.25, 0.9])
def test_bernoulli_rate(p):
    hits = int(random.bernoulli(random.key(6), p, (N,)).sum())
    assert scipy.stats.binomtest(hits, N, p).pvalue > LEAST_P


def test_bernoulli_with_a_tensor_of_probabilities():
    p = torch.tensor([0.1, 0.5, 0.8])
    hits = random.bernoulli(random.key(6), p, (N, 3)).sum(0)
    for n, q in zip(hits.tolist(), p.tolist()):
        assert scipy.stats.binomtest(n, N, q).pvalue > LEAST_P
    assert random.bernoulli(random.key(6), p).shape == (3,)


def test_each_bit_is_fair():
    words = random.bits(random.key(8), (N,)).numpy().view(np.uint32)
    ones = np.array([(words >> b & 1).sum() for b in range(32)])
    assert scipy.stats.chisquare(np.stack([ones, N - ones], 1).ravel(), np.full(64, N / 2)).pvalue > LEAST_P


def test_keys_and_neighbours_are_uncorrelated():
    a, b = (random.normal(k, (N,)) for k in random.split(random.key(9)))
    for x, y in ((a, b), (a[1:], a[:-1]), (a[: N // 2], a[N // 2 :])):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 5 / len(x) ** 0.5


def test_normal_is_exact_to_a_few_ulp():
    # Every value that normal() can take its u from, thinned in the body: u = (4 m + 1) / 2**24 - 1.
    tail = np.arange(1 << 15)
    m = np.concatenate([tail, np.arange(1 << 15, (1 << 23) - (1 << 15), 5), (1 << 23) - 1 - tail])
    u = (4.0 * m + 1) * 2.0**-24 - 1
    expected = scipy.special.ndtri((1 + u) / 2)
    ours = torch.from_numpy(u.astype(np.float32))
    z = normal_(ours, tuple(torch.empty_like(ours) for _ in range(3))).double().numpy()
    ulp = np.abs(z - expected) / np.spacing(np.abs(expected).astype(np.float32))
    assert ulp.max() < 3.5
    assert ulp.mean() < 0.6
    assert (np.diff(z[np.argsort(m)]) >= 0).all()


def test_normal_at_the_ends_and_around_zero():
    u = torch.tensor([-LARGEST, LARGEST, 0.0, 1e-30, -1e-7])
    z = normal_(u.clone(), tuple(torch.empty(5) for _ in range(3)))
    expected = np.sqrt(2) * scipy.special.erfinv(u.double().numpy())
    np.testing.assert_allclose(z.numpy(), expected, rtol=5e-7)


def test_both_ways_to_take_the_tail_agree():
    w = torch.linspace(0.0, 16.6, 10_001)
    body = torch.ones_like(w)
    gathered = inverse_normal._with_tail_gathered(body.clone(), w)
    assert torch.equal(gathered, inverse_normal._with_tail_everywhere(body, w))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_dtypes_are_the_rounded_float32_numbers(dtype):
    key = random.key(7)
    assert torch.equal(random.normal(key, (50,), dtype), random.normal(key, (50,)).to(dtype))
    whole = random.truncated_normal(key, -2, 2, (50,))
    assert torch.equal(random.truncated_normal(key, -2, 2, (50,), dtype), whole.to(dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_randint_dtypes_hold_the_same_numbers(dtype):
    key = random.key(7)
    values = random.randint(key, (500,), 3, 100, dtype)
    assert values.dtype == dtype
    assert torch.equal(values.long(), random.randint(key, (500,), 3, 100))
    assert torch.equal(random.randint(key, (9,), 0, 256, torch.uint8).long(), random.randint(key, (9,), 0, 256))
