"""`Loader`: which samples a batch holds, where its rows lie, who reads them, and where it goes on after a stop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from ptrainx.core import tree as px_tree
from ptrainx.core.errors import DataError
from ptrainx.data import EndlessLoaderError, Loader, Permutation
from ptrainx.mesh import P, device_get, make_mesh, spec_of
from ptrainx.mesh.simulated import local_tensors
from tests.data.cases import ROWS, Counting, N, order, two, values

MESHES = {
    "one": (None, P("data")),
    "data=2": ({"data": 2}, P("data")),
    "data=4": ({"data": 4}, P("data")),
    "data=2,model=2": ({"data": 2, "model": 2}, P("data")),
    "rows over both axes": ({"data": 2, "model": 2}, P(("data", "model"))),
    "columns split too": ({"data": 2, "model": 2}, P("data", "model")),
    "replicated": ({"data": 2}, P()),
}


def mesh_of(sizes):
    return make_mesh(sizes, simulate=True) if sizes else make_mesh(data=1)


# Order and placement


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize(("sizes", "spec"), MESHES.values(), ids=MESHES)
def test_batches_hold_the_permutation_in_order_on_every_mesh(sizes, spec, prefetch):
    mesh = mesh_of(sizes)
    batches = list(Loader(ROWS, 8, mesh=mesh, spec=spec, seed=5, epochs=2, prefetch=prefetch))
    assert len(batches) == 2 * (N // 8)
    expected = [ROWS[order(epoch, seed=5)[b * 8 : b * 8 + 8]] for epoch in range(2) for b in range(N // 8)]
    for batch, rows in zip(batches, expected):
        assert spec_of(batch) == spec
        assert batch.shape == (8, 4)
        assert torch.equal(device_get(batch), torch.from_numpy(rows))


def test_each_rank_holds_the_block_of_its_coordinates():
    mesh = make_mesh(data=2, model=2, simulate=True)
    batch = next(iter(Loader(ROWS, 4, mesh=mesh, spec=P("data", "model"), shuffle=False)))
    blocks = {rank: local.tolist() for rank, local in local_tensors(batch).items()}
    assert blocks == {
        0: [[0, 1], [100, 101]],
        1: [[2, 3], [102, 103]],
        2: [[200, 201], [300, 301]],
        3: [[202, 203], [302, 303]],
    }


def test_every_epoch_delivers_each_sample_once_and_epochs_and_seeds_differ():
    def delivered(seed):
        loader = Loader(np.arange(36), 6, mesh=two(), seed=seed, epochs=3)
        return np.concatenate(values(loader)).reshape(3, 36).tolist()

    runs = [*delivered(0), *delivered(1)]
    assert all(sorted(run) == list(range(36)) for run in runs)
    assert len({tuple(run) for run in runs}) == 6
    assert delivered(0) == delivered(0)


def test_unshuffled_is_the_source_s_own_order_in_every_epoch():
    loader = Loader(np.arange(8), 4, mesh=two(), shuffle=False, epochs=2)
    assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


def test_values_share_no_memory():
    source = torch.arange(4.0)
    loader = Loader((source, source), 4, mesh=make_mesh(data=2, model=2, simulate=True), shuffle=False, epochs=2)
    batches = list(loader)
    parts = [part for batch in batches for leaf in batch for part in local_tensors(leaf).values()]
    for part in parts:
        part.mul_(2)
    assert source.tolist() == [0, 1, 2, 3]
    assert device_get(batches) == 2 * [(pytest.approx([0, 2, 4, 6]), pytest.approx([0, 2, 4, 6]))]


# Who reads what


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"data": 4}, P("data")),
        ({"data": 2, "model": 2}, P("data")),
        ({"data": 2, "model": 2}, P(None, "model")),
        ({"data": 2}, (P("data"), P())),  # one leaf is whole on both ranks, so both need all rows
    ],
    ids=str,
)
def test_one_process_reads_each_different_block_once(sizes, spec):
    class Pairs(Counting):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return (row, index) if isinstance(spec, tuple) else row

    source = Pairs()
    loader = Loader(source, 8, mesh=mesh_of(sizes), spec=spec)
    assert source.reads == {0: 1}  # to learn what a sample looks like
    source.reads.clear()
    next(iter(loader))
    assert source.reads == dict.fromkeys(order(0)[:8].tolist(), 1)


# Position, resume, iteration


SETTINGS = [
    {"last": last, "prefetch": prefetch, "shuffle": shuffle}
    for last in ("drop", "keep", "pad")
    for prefetch, shuffle in ((0, True), (2, True), (0, False))
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_resuming_anywhere_gives_the_uninterrupted_rest(settings):
    def fresh(mesh):
        return Loader(np.arange(N - 1), 8, mesh=mesh, epochs=2, seed=3, **settings)

    def got(batch):
        return [leaf.tolist() for leaf in px_tree.leaves(device_get(batch))]

    loader = fresh(two())
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(got(batch))
        states.append(loader.state_dict())
    assert len(whole) == len(loader)
    for done, state in enumerate(states):
        other = fresh(make_mesh(data=4, simulate=True) if done % 2 else two())
        other.load_state_dict(state)
        assert other.state_dict() == state
        assert [got(batch) for batch in other] == whole[done:]


def test_state_is_plain_ints_and_may_come_back_as_tensors():
    loader = Loader(np.arange(10), 2, mesh=two(), seed=9, epochs=None)
    for _ in zip(range(7), loader):
        pass
    state = loader.state_dict()
    assert state == {"epoch": 1, "batch": 2, "seed": 9, "batch_size": 2, "length": 10, "shuffle": 1}
    assert all(type(value) is int for value in state.values())
    following = device_get(next(iter(loader)))
    loader.load_state_dict({name: torch.tensor(value) for name, value in state.items()})
    assert torch.equal(device_get(next(iter(loader))), following)


def test_resuming_far_into_a_huge_source_reads_one_batch_only():
    class Huge:
        def __len__(self):
            return 10**15

        def __getitem__(self, index):
            return index

    loader = Loader(Huge(), 4, mesh=two(), epochs=None)
    loader.load_state_dict({**loader.state_dict(), "epoch": 12, "batch": 10**14})
    wanted = Permutation(10**15, 0, 12)(np.arange(4 * 10**14, 4 * 10**14 + 4))
    assert device_get(next(iter(loader))).tolist() == wanted.tolist()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loop_left_early_is_taken_up_and_an_ended_one_starts_again(prefetch):
    loader = Loader(np.arange(12), 4, mesh=two(), shuffle=False, prefetch=prefetch)
    for batch in loader:
        assert device_get(batch).tolist() == [0, 1, 2, 3]
        break
    assert values(loader) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert values(loader) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_state_of_the_end_delivers_nothing_once():
    loader = Loader(np.arange(8), 4, mesh=two(), shuffle=False)
    list(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    other = Loader(np.arange(8), 4, mesh=two(), shuffle=False)
    other.load_state_dict(state)
    assert list(other) == []
    assert values(other) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    longer = Loader(np.arange(8), 4, mesh=two(), shuffle=False, epochs=2)
    longer.load_state_dict(state)
    assert np.sort(np.concatenate(values(longer))).tolist() == list(range(8))


def test_two_iterators_share_the_position():
    loader = Loader(np.arange(16), 4, mesh=two(), shuffle=False, prefetch=2)
    one, other = iter(loader), iter(loader)
    got = [device_get(next(it))[0].item() for it in (one, other, other, one)]
    assert got == [0, 4, 8, 12]
    assert next(one, None) is None
    assert next(other, None) is None


def test_a_state_loaded_in_a_loop_moves_it():
    loader = Loader(np.arange(16), 4, mesh=two(), shuffle=False, prefetch=2)
    start, seen = loader.state_dict(), []
    for batch in loader:
        seen.append(device_get(batch)[0].item())
        if len(seen) == 3:
            loader.load_state_dict(start)
    assert seen == [0, 4, 8, 0, 4, 8, 12]


@pytest.mark.parametrize(
    ("n", "last", "epochs", "length"),
    [
        (12, "drop", 1, 3),
        (13, "drop", 2, 6),
        (14, "keep", 1, 4),
        (14, "pad", 3, 12),
        (2, "pad", 1, 1),
        (2, "keep", 1, 1),
    ],
)
def test_length_counts_the_batches_of_all_epochs(n, last, epochs, length):
    loader = Loader(np.arange(n), 4, mesh=two(), last=last, epochs=epochs)
    assert len(loader) == len(list(loader)) == length
    assert loader.batches_per_epoch == length // epochs


def test_forever_has_no_length_and_goes_on():
    loader = Loader(np.arange(4), 2, mesh=two(), epochs=None)
    batches = values(itertools.islice(loader, 10))
    assert [sorted(a + b) for a, b in zip(batches[::2], batches[1::2])] == [[0, 1, 2, 3]] * 5
    with pytest.raises(EndlessLoaderError, match="batches_per_epoch") as error:
        len(loader)
    assert isinstance(error.value, (TypeError, DataError))


def test_a_loader_finds_its_mesh():
    with two() as mesh:
        assert next(iter(Loader(np.arange(4), 2))).device_mesh == mesh.device_mesh
    assert next(iter(Loader(np.arange(4), 2))).device_mesh.size() == 1


# The last batch of an epoch


def test_drop_leaves_the_rest_out():
    loader = Loader(np.arange(11), 4, mesh=two(), epochs=2)
    got = values(loader)
    assert got == [order(e, n=11)[i : i + 4].tolist() for e in range(2) for i in (0, 4)]


def test_keep_gives_a_smaller_batch():
    loader = Loader(np.arange(10), 4, mesh=two(), last="keep", epochs=2)
    assert values(loader) == [order(e, n=10)[i : i + 4].tolist() for e in range(2) for i in (0, 4, 8)]


def test_pad_fills_up_with_the_last_sample_and_tells_so():
    mesh = make_mesh(data=2, model=2, simulate=True)
    for spec in (P("data"), {"x": P("data"), "y": P()}):
        source = {"x": np.arange(11), "y": np.arange(11)}
        loader = Loader(source, 4, mesh=mesh, spec=spec, last="pad", shuffle=False)
        pairs = list(loader)
        assert [device_get(valid).tolist() for _, valid in pairs] == [[True] * 4, [True] * 4, [True] * 3 + [False]]
        assert [device_get(batch["x"]).tolist() for batch, _ in pairs] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]
        assert all(spec_of(valid) == P("data") for _, valid in pairs)


def test_sums_over_the_valid_rows_of_padded_batches_are_sums_over_the_source():
    loader = Loader(ROWS, 8, mesh=make_mesh(data=4, simulate=True), last="pad")
    total = sum(device_get((batch * valid[:, None]).sum()) for batch, valid in loader)
    assert total == ROWS.sum()
