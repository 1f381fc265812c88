"""Keys and dropout as a user meets them: errors, gradients, and global values on a simulated mesh."""

from __future__ import annotations

import warnings

import pytest
import scipy.stats
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ptrainx.core import torch_compat as tc
from ptrainx.core.errors import InputError
from ptrainx.mesh import P, device_get, device_put, make_mesh
from ptrainx.ops import random
from ptrainx.ops.random.distributions import keep_count
from ptrainx.ops.random.draw import block_of, draw

KEY = random.key(0)
BAD_KEY = "make one with px.random.key(0), and more with px.random.split(key)"
ERRORS = [
    (lambda: random.normal(0, (3,)), ("px.random.normal", "int 0", BAD_KEY)),
    (lambda: random.normal((2, 3)), ("px.random.normal", "tuple (2, 3)", BAD_KEY)),
    (lambda: random.uniform(torch.zeros(2), (3,)), ("px.random.uniform", "f32[2]", "i32[2]", BAD_KEY)),
    (lambda: random.bits(torch.zeros(3, dtype=torch.int32)), ("i32[3]", BAD_KEY)),
    (lambda: random.split(random.split(KEY)), ("i32[2,2], several keys", "k1, k2 = px.random.split(key)")),
    (lambda: random.dropout(None, torch.ones(3), 0.1), ("px.random.dropout", "NoneType", BAD_KEY)),
    (lambda: random.split(KEY, 0), ("num is not a positive integer", "int 0")),
    (lambda: random.split(KEY, 1.5), ("float 1.5",)),
    (lambda: random.key("a"), ("seed", "str 'a'", "fold_in")),
    (lambda: random.key(1.0), ("float 1.0",)),
    (lambda: random.key(True), ("bool True",)),
    (lambda: random.key(2**64), (str(2**64), "-2**63 to 2**64 - 1")),
    (lambda: random.fold_in(KEY, 0.5), ("data is not an integer", "float 0.5")),
    (lambda: random.fold_in(KEY, torch.ones(2)), ("f32[2]", "0-d integer tensor")),
    (lambda: random.fold_in(KEY, torch.arange(3)), ("i64[3]", "px.random.split(key, n)")),
    (lambda: random.normal(KEY, (3, -1)), ("shape", "(3, -1)")),
    (lambda: random.normal(KEY, 2.5), ("shape", "2.5")),
    (lambda: random.truncated_normal(KEY, -1, 1, "ab"), ("shape", "'ab'", "order of arguments")),
    (lambda: random.uniform(KEY, (2,), torch.int64), ("torch.int64", "float32")),
    (lambda: random.uniform(KEY, (2,), minval=2.0, maxval=1.0), ("not an interval", "2.0 and 1.0")),
    (lambda: random.uniform(KEY, (2,), maxval=float("inf")), ("not an interval", "inf")),
    (lambda: random.uniform(KEY, (2,), maxval=torch.ones(2)), ("not an interval", "(high - low) + low")),
    (lambda: random.truncated_normal(KEY, 6.0, 7.0, (2,)), ("lower=6.0, upper=7.0", "float32 values between them")),
    (lambda: random.truncated_normal(KEY, 1.0, 1.0, (2,)), ("about 0 float32 values",)),
    (lambda: random.randint(KEY, (2,), 5, 5), ("minval=5, maxval=5", "0 < maxval - minval")),
    (lambda: random.randint(KEY, (2,), 0, 300, torch.int8), ("torch.int8", "from -128 to 127")),
    (lambda: random.randint(KEY, (2,), 0, 2**41), ("2**40",)),
    (lambda: random.randint(KEY, (2,), 0, 2.5), ("maxval=2.5",)),
    (lambda: random.randint(KEY, (2,), 0, 5, torch.float32), ("torch.float32", "int64")),
    (lambda: random.bernoulli(KEY, 1.5), ("p is not a probability", "1.5")),
    (lambda: random.bernoulli(KEY, float("nan")), ("nan",)),
    (lambda: random.dropout(KEY, torch.ones(3), 1.0), ("rate is not in [0, 1)", "1.0", "rate = 1 - p")),
    (lambda: random.dropout(KEY, torch.ones(3), -0.1), ("-0.1",)),
    (lambda: random.dropout(KEY, torch.ones(3), torch.tensor(0.1)), ("f32[]", "a Python number")),
    (lambda: random.dropout(KEY, torch.arange(3), 0.1), ("not a tensor of floats", "i64[3]")),
    (lambda: random.dropout(KEY, [1.0], 0.1), ("not a tensor of floats", "list")),
]


@pytest.mark.parametrize("case", range(len(ERRORS)))
def test_errors_say_what_is_wrong(case):
    call, expected = ERRORS[case]
    with pytest.raises(InputError) as error:
        call()
    for words in expected:
        assert words in str(error.value)


def test_shapes_and_keywords():
    assert random.normal(KEY).shape == ()
    assert random.normal(KEY, 3).shape == (3,)
    assert random.uniform(KEY, torch.Size([2, 0])).shape == (2, 0)
    assert torch.equal(
        random.uniform(KEY, (4,), torch.float32, -1.0, 1.0),
        random.uniform(key=KEY, shape=(4,), minval=-1.0, maxval=1.0),
    )
    assert torch.equal(
        random.truncated_normal(KEY, -1, 1, (4,)), random.truncated_normal(KEY, shape=(4,), upper=1, lower=-1)
    )


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_dropout_keeps_the_mean(rate):
    n = 400_000
    y = random.dropout(random.key(3), torch.ones(n), rate)
    q = keep_count(rate) / 65536
    assert q == pytest.approx(1 - rate, abs=2**-17)
    assert torch.equal(y.unique(), torch.tensor([0.0, 1 / q]))
    assert scipy.stats.binomtest(int((y != 0).sum()), n, q).pvalue > 1e-3
    assert float(y.mean()) == pytest.approx(1.0, abs=5 * ((1 - q) / q / n) ** 0.5)


def test_dropout_of_neighbours_is_independent():
    kept = (random.dropout(random.key(4), torch.ones(400_000), 0.5) != 0).float()
    for lag in (1, 2, 3, 4):
        pairs = torch.stack([kept[lag:], kept[:-lag]])
        assert abs(float(torch.corrcoef(pairs)[0, 1])) < 5 / 400_000**0.5


def test_dropout_is_a_function_of_the_key():
    x = torch.randn(33, 7, generator=torch.Generator().manual_seed(0))
    assert torch.equal(random.dropout(KEY, x, 0.5), random.dropout(KEY, x, 0.5))
    assert not torch.equal(random.dropout(KEY, x, 0.5), random.dropout(random.key(1), x, 0.5))
    assert torch.equal(random.dropout(KEY, x, 0.0), x)
    assert torch.equal(random.dropout(KEY, x.t(), 0.5), random.dropout(KEY, x.t().contiguous(), 0.5))
    # The rate only moves the threshold: what a higher rate keeps, a lower one keeps.
    high, low = (random.dropout(KEY, torch.ones(1000), rate) != 0 for rate in (0.7, 0.2))
    assert not (high & ~low).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_dropout_gradient_is_the_mask(dtype):
    x = torch.randn(50, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    y = random.dropout(KEY, x, 0.25)
    (grad,) = torch.autograd.grad(y.sum(), x)
    mask = random.dropout(KEY, torch.ones(50, 9), 0.25) != 0
    scale = torch.tensor(65536 / keep_count(0.25), dtype=torch.float64).to(dtype)
    assert y.dtype == grad.dtype == dtype
    assert torch.equal(grad, mask * scale)
    torch.testing.assert_close(
        y, x * mask * (65536 / keep_count(0.25)), rtol=1e-2 if dtype.itemsize < 4 else 1e-6, atol=0
    )


def test_dropout_has_second_derivatives():
    x = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: random.dropout(KEY, x, 0.4), x)
    assert torch.autograd.gradgradcheck(lambda x: random.dropout(KEY, x, 0.4) ** 2, x)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(data=4, model=2, simulate=True)


DRAWS = {
    "bits": lambda k: random.bits(k, (6, 5)),
    "uniform": lambda k: random.uniform(k, (6, 5), minval=-1.0, maxval=1.0),
    "uniform, bfloat16": lambda k: random.uniform(k, (6, 5), torch.bfloat16, -1.0, 1.0),
    "normal": lambda k: random.normal(k, (6, 5)),
    "truncated_normal": lambda k: random.truncated_normal(k, -1, 1, (6, 5), torch.bfloat16),
    "randint": lambda k: random.randint(k, (6, 5), 3, 14, torch.int16),
    "bernoulli": lambda k: random.bernoulli(k, 0.3, (6, 5)),
    "split": lambda k: random.split(k, 3),
    "split, second": lambda k: tuple(random.split(k))[1],
    "fold_in": lambda k: random.fold_in(k, -7),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_global_key_gives_the_same_global_value(mesh, name):
    value = DRAWS[name](device_put(KEY, P(), mesh))
    assert isinstance(value, DTensor)
    assert value.placements == (Replicate(), Replicate())
    assert torch.equal(device_get(value), DRAWS[name](KEY))


def test_fold_in_of_a_global_number(mesh):
    step = device_put(torch.tensor(5), P(), mesh)
    for key in (KEY, device_put(KEY, P(), mesh)):
        assert torch.equal(device_get(random.fold_in(key, step)), random.fold_in(KEY, 5))


SPECS = [P(), P("data"), P(None, "model"), P("model", "data"), P(("data", "model")), P(unreduced=("data",))]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("placed_key", [False, True])
def test_dropout_is_the_same_on_every_placement(mesh, spec, placed_key):
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
    key = device_put(KEY, P(), mesh) if placed_key else KEY
    placed = device_put(x, spec, mesh).requires_grad_()
    y = random.dropout(key, placed, 0.3)
    assert y.placements == placed.placements
    assert torch.equal(device_get(y), random.dropout(KEY, x, 0.3))
    if not spec.unreduced:
        (grad,) = torch.autograd.grad(y.sum(), placed)
        assert torch.equal(device_get(grad), random.dropout(KEY, torch.ones(8, 12), 0.3))


STRIDED = [tc._StridedShard(0, split_factor=2), Shard(0)]


@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 2), (1, 1)])
@pytest.mark.parametrize(
    "placements",
    [[Shard(0), Shard(0)], [Shard(1), Replicate()], [Shard(1), Shard(0)], [Replicate(), Shard(1)], STRIDED],
    ids=str,
)
def test_a_sharded_draw_is_the_shard_of_the_whole(mesh, shape, placements):
    key = device_put(KEY, P(), mesh)
    whole = random.normal(KEY, shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = draw(key, shape, "normal", placements=placements)
        assert value.placements == tuple(placements)
        assert torch.equal(value.full_tensor(), whole)


def test_a_partial_axis_draws_the_same_everywhere(mesh):
    value = draw(device_put(KEY, P(), mesh), (4, 4), "bits", placements=[Partial(), Shard(0)])
    assert value.placements == (Replicate(), Shard(0))


def test_blocks_cover_the_array_once(mesh):
    for shape in ((8, 3), (7, 5), (5, 1), (1, 1)):
        for placements in ([Shard(0), Shard(0)], [Shard(0), Shard(1)], [Shard(1), Shard(0)]):
            seen = torch.zeros(shape, dtype=torch.int64)
            for rank in mesh.ranks:
                start, size = block_of(shape, mesh.rank_view(rank), placements)
                seen[tuple(slice(a, a + n) for a, n in zip(start, size))] += 1
            assert (seen == 1).all()
