"""The sample order: a permutation for every length, as the published construction defines it, uniform over seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from ptrainx.core.errors import InputError
from ptrainx.data.permutation import Permutation, SampleOrder, splitmix64

WORD = (1 << 64) - 1


def mix(z: int) -> int:
    """SplitMix64's output function, on Python integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def sample_at(position: int, n: int, seed: int, epoch: int) -> int:
    """The documented construction, one position at a time."""
    golden = 0x9E3779B97F4A7C15
    state = (mix((seed + golden) & WORD) + epoch) & WORD
    keys = [mix((state + (i + 1) * golden) & WORD) for i in range(24)]
    rows = next(r for r in itertools.count(math.isqrt(n)) if r * r >= n)
    columns = math.ceil(n / rows)
    while True:
        row, column = divmod(position, columns)
        for i, key in enumerate(keys):
            if i % 2 == 0:
                row = (row + ((mix((column + key) & WORD) >> 32) * rows >> 32)) % rows
            else:
                column = (column + ((mix((row + key) & WORD) >> 32) * columns >> 32)) % columns
        position = row * columns + column
        if position < n:
            return position


def test_splitmix64_gives_the_published_stream():
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert splitmix64(1234567, 5).tolist() == published


@pytest.mark.parametrize(("seed", "epoch"), [(0, 0), (1, 5), (2**63 - 1, 1000)])
def test_every_length_up_to_300_is_permuted(seed, epoch):
    for n in range(1, 301):
        assert np.array_equal(np.sort(Permutation(n, seed, epoch)(np.arange(n))), np.arange(n)), n


@pytest.mark.parametrize("n", [1000, 4096, 65537])
def test_larger_lengths_are_permuted(n):
    assert np.array_equal(np.sort(Permutation(n, 7)(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 5, 12, 300, 10**6, 10**12, 2**62])
def test_agrees_with_the_construction_one_position_at_a_time(n):
    positions = np.unique(np.linspace(0, n - 1, 20).astype(np.int64))
    got = Permutation(n, 3, 4)(positions)
    assert got.tolist() == [sample_at(int(p), n, 3, 4) for p in positions]


def test_positions_keep_their_shape():
    order = Permutation(100, 0)
    assert np.array_equal(order(np.arange(12).reshape(3, 4)).ravel(), order(np.arange(12)))
    assert order(np.arange(0)).shape == (0,)
    assert order(np.int64(5)) == order(np.array([5]))[0]


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = {tuple(Permutation(50, seed, epoch)(np.arange(50))) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("n", [3, 4, 5])
def test_all_orders_of_a_few_samples_are_equally_likely(n):
    orders = math.factorial(n)
    draws = 20 * orders
    counts = dict.fromkeys(itertools.permutations(range(n)), 0)
    for seed in range(draws):
        counts[tuple(Permutation(n, seed)(np.arange(n)).tolist())] += 1
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("kind", ["seed", "epoch"])
@pytest.mark.parametrize("n", [10, 37, 64])
def test_each_sample_is_equally_likely_at_each_position(n, kind):
    draws = 1000
    table = np.zeros((n, n))
    for i in range(draws):
        order = Permutation(n, i, 0) if kind == "seed" else Permutation(n, 0, i)
        table[np.arange(n), order(np.arange(n))] += 1
    # Rows and columns of the table have fixed sums, which leaves (n-1)^2 degrees of freedom.
    statistic = ((table - draws / n) ** 2 / (draws / n)).sum() * (n - 1) / n
    assert stats.chi2.sf(statistic, (n - 1) ** 2) > 1e-4


def test_neighbours_are_not_related():
    n = 20_000
    order = Permutation(n, 0)(np.arange(n))
    assert stats.spearmanr(np.arange(n), order).pvalue > 1e-4
    assert stats.spearmanr(order[:-1], order[1:]).pvalue > 1e-4
    steps = np.diff(order) % n
    assert stats.kstest(steps / n, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("wrong", [{"n": 0}, {"n": 2**62 + 1}, {"seed": -1}, {"epoch": -1}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(InputError, match=r"no permutation for these numbers\n.*n=.*\n.*1 <= n <= 2\*\*62"):
        Permutation(**{"n": 10, "seed": 0, "epoch": 0, **wrong})


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_order_taken_in_pieces_is_the_order(shuffle):
    n, rng = 10_000, np.random.default_rng(0)
    whole = [Permutation(n, 5, epoch)(np.arange(n)) if shuffle else np.arange(n) for epoch in range(3)]
    order = SampleOrder(n, 5, shuffle)
    for _ in range(200):
        epoch, (start, stop) = int(rng.integers(3)), sorted(int(i) for i in rng.integers(0, n + 1, 2))
        stop = min(stop, start + int(rng.choice([1, 16, 5000])))
        assert np.array_equal(order.take(epoch, start, stop), whole[epoch][start:stop])
