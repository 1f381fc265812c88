"""`Loader` in real worlds of several processes: the order of one process, and only the rows of one's own block."""

from __future__ import annotations

import numpy as np
import pytest

from ptrainx.data import Loader
from ptrainx.mesh import P, device_get, make_mesh
from tests.data.cases import ROWS, Counting, N, order

WORLDS = {
    "one": ({"data": 1}, P("data")),
    "data=2": ({"data": 2}, P("data")),
    "data=4": ({"data": 4}, P("data")),
    "data=2,model=2": ({"data": 2, "model": 2}, P("data")),
    "columns": ({"data": 2, "model": 2}, P("data", "model")),
    "rows over both axes": ({"data": 2, "model": 2}, P(("data", "model"))),
    "replicated": ({"data": 2}, P()),
}


def load(sizes: dict[str, int], spec: P, prefetch: int) -> tuple[list, list, tuple, list[int]]:
    """(global batches, own blocks, coordinates, samples read) of this rank, over two epochs."""
    source = Counting()
    mesh = make_mesh(sizes)
    loader = Loader(source, 8, mesh=mesh, spec=spec, seed=2, epochs=2, prefetch=prefetch)
    source.reads.clear()
    batches = list(loader)
    blocks = [batch.to_local().tolist() for batch in batches]
    return [device_get(batch).tolist() for batch in batches], blocks, mesh.coords, sorted(source.reads.elements())


def resume(sizes: dict[str, int], state: dict[str, int] | None) -> tuple[list, dict[str, int]]:
    """The rest from `state`, or three batches, and the state after."""
    loader = Loader(ROWS, 8, mesh=make_mesh(sizes), last="pad", seed=1, epochs=2)
    if state is not None:
        loader.load_state_dict(state)
    batches = []
    for batch in loader:
        batches.append([leaf.tolist() for leaf in device_get(batch)])
        if state is None and len(batches) == 3:
            break
    return batches, loader.state_dict()


def read_a_bad_row() -> str:
    source = Counting(fail_at=int(order(0)[4]))  # the first row of rank 1
    loader = Loader(source, 8, mesh=make_mesh(data=2), prefetch=2)
    try:
        next(iter(loader))
    except OSError as error:
        return str(error)
    return "no error"


@pytest.mark.processes
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(("sizes", "spec"), WORLDS.values(), ids=WORLDS)
def test_every_world_gets_the_same_order_and_each_rank_reads_its_rows_only(pool, sizes, spec, prefetch):
    steps = [order(epoch, seed=2)[b * 8 : b * 8 + 8] for epoch in range(2) for b in range(N // 8)]
    axes = () if not len(spec) or spec[0] is None else (spec[0],) if isinstance(spec[0], str) else spec[0]
    parts = int(np.prod([sizes[axis] for axis in axes], dtype=int))
    for batches, blocks, coords, read in pool.run(load, int(np.prod(list(sizes.values()))), sizes, spec, prefetch):
        assert batches == [ROWS[samples].tolist() for samples in steps]
        place = dict(zip(sizes, coords))
        part = int(np.ravel_multi_index([place[a] for a in axes], [sizes[a] for a in axes])) if axes else 0
        own = [np.split(samples, parts)[part] for samples in steps]
        assert read == sorted(np.concatenate(own).tolist())
        columns = slice(place["model"] * 2, place["model"] * 2 + 2) if len(spec) > 1 else slice(None)
        assert blocks == [ROWS[samples][:, columns].tolist() for samples in own]


@pytest.mark.processes
def test_a_state_of_one_world_goes_on_in_another(pool):
    whole = resume({"data": 1}, resume({"data": 1}, None)[1])[0]
    for before, after in ((2, 4), (4, 2), (2, 1)):
        (first, state), *others = pool.run(resume, before, {"data": before}, None)
        assert all(other == (first, state) for other in others)
        assert state == {"epoch": 0, "batch": 3, "seed": 1, "batch_size": 8, "length": N, "shuffle": 1}
        samples = np.concatenate([order(0, seed=1)[b * 8 : b * 8 + 8] for b in range(3)])
        assert np.concatenate([rows for rows, _ in first]).tolist() == ROWS[samples].tolist()
        for rest, end in pool.run(resume, after, {"data": after}, state):
            assert rest == whole
            assert (end["epoch"], end["batch"]) == (2, 0)


@pytest.mark.processes
def test_a_rank_that_can_not_read_its_row_says_so_and_others_go_on(pool):
    assert pool.run(read_a_bad_row, 2) == ["no error", "the disk is gone"]
