"""The generator: published vectors, JAX's bits, and blocks that equal slices of the whole."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from ptrainx.ops import random
from ptrainx.ops.random import operator, stream
from ptrainx.ops.random.distributions import DISTRIBUTIONS
from ptrainx.ops.random.operator import HASH, RANDOM, SUBKEYS
from ptrainx.ops.random.threefry import hash_, hash_ints, hash_small_, schedule, signed

jax.config.update("jax_threefry_partitionable", True)

# Random123's kat_vectors, threefry2x32 with 20 rounds: counter, key, result.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SEEDS = [0, 42, 2**32 - 1, 2**32 + 5, 2**63 + 12345]
SHAPES = [(), (1,), (7,), (3, 5), (2, 3, 4), (1001,), (37, 501), (0, 4)]
# Parameters of each distribution, for tests that run over all of them.
PARAMETERS = {
    "bits": (0.0, 1.0),
    "uniform": (-1.0, 3.0),
    "uniform64": (0.0, 1.0),
    "bernoulli": (0.3, 1.0),
    "normal": (0.0, 1.0),
    "truncated_normal": (-1.0, 2.0),
    "randint": (1000.0, 1.0),
    "dropout": (40000.0, 2.0),
}


def int32(*words: int) -> torch.Tensor:
    return torch.tensor([signed(w) for w in words], dtype=torch.int32)


def jax_key(seed: int) -> jax.Array:
    return jax.random.wrap_key_data(jnp.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], dtype=jnp.uint32))


def words_of(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key)).view(np.int32)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter, key, expected):
    assert hash_ints(key, counter) == expected
    for hash_words, key_words in ((hash_, schedule(int32(*key))), (hash_small_, int32(*key))):
        x0, x1, scratch = int32(counter[0]), int32(counter[1]), int32(0)
        hash_words(key_words, x0, x1, scratch)
        assert (x0.item(), x1.item()) == tuple(map(signed, expected))


@pytest.mark.parametrize("seed", SEEDS)
def test_split_equals_jax(seed):
    for n in (1, 2, 5, 40):
        np.testing.assert_array_equal(
            random.split(random.key(seed), n).numpy(), words_of(jax.random.split(jax_key(seed), n))
        )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("data", [0, 1, 77, 2**31, 2**32 - 1])
def test_fold_in_equals_jax(seed, data):
    expected = words_of(jax.random.fold_in(jax_key(seed), np.uint32(data)))
    np.testing.assert_array_equal(random.fold_in(random.key(seed), data).numpy(), expected)
    np.testing.assert_array_equal(random.fold_in(random.key(seed), torch.tensor(data)).numpy(), expected)


@pytest.mark.parametrize("seed", [0, 2**32 - 1])
def test_key_equals_jax(seed):
    np.testing.assert_array_equal(random.key(seed).numpy(), words_of(jax.random.key(np.uint32(seed))))


def test_fold_in_tells_all_64_bits_apart():
    numbers = [0, 1, -1, 2**32, 2**32 + 1, -(2**63), 2**63 - 1]
    keys = {tuple(random.fold_in(random.key(0), n).tolist()) for n in numbers}
    assert len(keys) == len(numbers)
    many = HASH(random.key(0), torch.tensor(numbers * 5)).view(5, 7, 2)
    assert {tuple(k) for k in many[3].tolist()} == keys


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", SEEDS[:3])
def test_bits_and_numbers_equal_jax(seed, shape):
    ours, theirs = random.key(seed), jax_key(seed)
    np.testing.assert_array_equal(
        random.bits(ours, shape).numpy(), np.asarray(jax.random.bits(theirs, shape)).view(np.int32)
    )
    np.testing.assert_array_equal(random.uniform(ours, shape).numpy(), np.asarray(jax.random.uniform(theirs, shape)))
    for p in (0.0, 0.1, 0.5, 0.9999999, 1.0):
        np.testing.assert_array_equal(
            random.bernoulli(ours, p, shape).numpy(), np.asarray(jax.random.bernoulli(theirs, p, shape))
        )
    for low, high in ((0, 2), (-5, 5), (3, 1003), (0, 65536), (0, 2**20), (-(2**31), 0)):
        np.testing.assert_array_equal(
            random.randint(ours, shape, low, high, torch.int32).numpy(),
            np.asarray(jax.random.randint(theirs, shape, low, high)),
        )


def test_uniform_bounds_and_half_dtypes_equal_jax():
    ours, theirs, shape = random.key(3), jax_key(3), (1000,)
    for low, high in ((-1.0, 1.0), (0.0, 0.02), (-3.5, 12.25)):
        expected = np.asarray(jax.random.uniform(theirs, shape, minval=low, maxval=high))
        # XLA may fuse the multiplication with the addition.
        np.testing.assert_allclose(random.uniform(ours, shape, minval=low, maxval=high).numpy(), expected, atol=3e-7)
    for dtype, theirs_dtype in ((torch.bfloat16, jnp.bfloat16), (torch.float16, jnp.float16)):
        expected = np.asarray(jax.random.uniform(theirs, shape, theirs_dtype)).astype(np.float32)
        np.testing.assert_array_equal(random.uniform(ours, shape, dtype).float().numpy(), expected)


def test_float64_uniform_equals_jax():
    with jax.enable_x64(True):
        expected = np.asarray(jax.random.uniform(jax_key(3), (500,), jnp.float64))
    np.testing.assert_array_equal(random.uniform(random.key(3), (500,), torch.float64).numpy(), expected)


def test_normal_agrees_with_jax():
    theirs = np.asarray(jax.random.normal(jax_key(3), (5000,)))
    np.testing.assert_allclose(random.normal(random.key(3), (5000,)).numpy(), theirs, rtol=1e-4, atol=1e-6)
    theirs = np.asarray(jax.random.truncated_normal(jax_key(3), -2.0, 1.0, (5000,)))
    ours = random.truncated_normal(random.key(3), -2.0, 1.0, (5000,)).numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


BLOCKS = [
    ((10,), (3,), (4,)),
    ((7, 9), (2, 0), (3, 9)),
    ((7, 9), (0, 5), (7, 4)),
    ((7, 9), (6, 8), (1, 1)),
    ((4, 6, 8), (1, 2, 3), (2, 3, 4)),
    ((4, 6, 8), (0, 2, 0), (4, 3, 8)),
    ((5, 1, 3, 2), (1, 0, 1, 0), (3, 1, 2, 2)),
    ((3, 1000), (1, 17), (2, 900)),
    ((300, 7), (100, 3), (150, 2)),
    ((6, 5), (2, 5), (3, 0)),
]


@pytest.mark.parametrize("dist", PARAMETERS)
@pytest.mark.parametrize("segment", [16, 100, 1 << 18])
def test_a_block_is_a_slice_of_the_whole(dist, segment, monkeypatch):
    key, (a, b) = random.key(11), PARAMETERS[dist]
    wholes = [RANDOM(key, s, [0] * len(s), s, dist, a, b) for s, _, _ in BLOCKS]
    monkeypatch.setattr(operator, "_CPU_SEGMENT", segment)
    monkeypatch.setattr(stream, "_SMALL", segment % 100)
    for whole, (shape, start, size) in zip(wholes, BLOCKS):
        block = RANDOM(key, shape, start, size, dist, a, b)
        expected = whole[tuple(slice(i, i + n) for i, n in zip(start, size))]
        assert block.shape == expected.shape
        assert block.is_contiguous()
        assert torch.equal(block, expected), (shape, start, size)


@pytest.mark.parametrize("segment", [64, 1 << 18])
@pytest.mark.parametrize(
    ("shape", "start", "size"),
    [
        ((1 << 34,), ((1 << 32) - 50,), (100,)),
        ((1 << 20, 1 << 20), (4095, (1 << 20) - 30), (1, 30)),
        ((1 << 20, (1 << 20) + 1), (4094, 1000), (4, 30)),
        ((1 << 40,), ((1 << 39) + 7,), (33,)),
    ],
)
def test_indices_beyond_32_bits(shape, start, size, segment, monkeypatch):
    monkeypatch.setattr(operator, "_CPU_SEGMENT", segment)
    key = random.key(2**40 + 9)
    index = torch.zeros(size, dtype=torch.int64)
    for dim, (first, n) in enumerate(zip(start, size)):
        steps = torch.arange(first, first + n) * math.prod(shape[dim + 1 :])
        index += steps.view([-1] + [1] * (len(shape) - dim - 1))
    words = tuple(w & 0xFFFFFFFF for w in key.tolist())

    def pair(i: int) -> tuple[int, int]:
        return hash_ints(words, (i >> 32, i & 0xFFFFFFFF))

    bits = [signed(pair(i)[0] ^ pair(i)[1]) for i in index.flatten().tolist()]
    assert RANDOM(key, shape, start, size, "bits", 0.0, 1.0).flatten().tolist() == bits

    def sixteen(i: int) -> int:
        return pair(i >> 2)[(i & 3) >> 1] >> 16 * (i & 1) & 0xFFFF

    kept = [1.5 if (sixteen(i) + 32768) % 65536 < 40000 else 0.0 for i in index.flatten().tolist()]
    assert RANDOM(key, shape, start, size, "dropout", 40000.0, 1.5).flatten().tolist() == kept


def test_large_arrays_equal_their_parts():
    key, n = random.key(1), (1 << 19) + 13
    for dist, (a, b) in PARAMETERS.items():
        whole = RANDOM(key, [n], [0], [n], dist, a, b)
        parts = [RANDOM(key, [n], [i], [min(9999, n - i)], dist, a, b) for i in range(0, n, 9999)]
        assert torch.equal(whole, torch.cat(parts)), dist


@pytest.mark.parametrize("dist", PARAMETERS)
def test_operator_has_a_right_fake_form(dist):
    args = (random.key(0), [6, 5], [1, 2], [3, 2], dist, *PARAMETERS[dist])
    torch.library.opcheck(RANDOM, args, test_utils=("test_schema", "test_faketensor"))
    assert RANDOM(*args).dtype == DISTRIBUTIONS[dist].dtype


def test_key_operators_have_right_fake_forms():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(HASH, (random.key(0), torch.arange(3)), test_utils=checks)
    torch.library.opcheck(SUBKEYS, (random.key(0), 5, 30), test_utils=checks)


def test_drawing_leaves_torch_generators_alone():
    before = torch.get_rng_state()
    first = random.normal(random.key(0), (100,))
    assert torch.equal(first, random.normal(random.key(0), (100,)))
    assert torch.equal(before, torch.get_rng_state())
