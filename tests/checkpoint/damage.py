"""Flips bits of real checkpoints and cuts their files, many times: all damage is found before a value is given.

python -m tests.checkpoint.damage 2000
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from ptrainx.checkpoint import restore, save
from ptrainx.errors import CheckpointDamageError

__all__ = ["damage_once", "run"]


def tree(number: int) -> dict[str, torch.Tensor]:
    """What is saved as step `number`."""
    return {f"w{i}": torch.full((64, 8 + i), float(number)) for i in range(4)} | {"n": torch.tensor(number)}


def damage_once(file: Path, rng: random.Random) -> str:
    """Flips one bit of a file, cuts it, or makes it longer; says what it did."""
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip"] * 8 + ["cut", "grow"])
    place = rng.randrange(len(data))
    if kind == "flip":
        data[place] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    else:
        data += b"\0"
    file.write_bytes(data)
    return f"{kind} of {file.name} at {place}"


def run(times: int, seed: int = 0) -> int:
    """Damages the newest of two steps so many times; each time it must be refused, and the other one given.

    Returns:
        how often it was.
    """
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        save(folder, tree(1), 1)
        path = save(folder, tree(2), 2)
        whole = {file: file.read_bytes() for file in path.iterdir()}
        for _ in range(times):
            file = rng.choice(sorted(whole))
            what = damage_once(file, rng)
            try:
                restore(path, like=tree(0))
            except CheckpointDamageError:
                pass
            else:
                raise AssertionError(f"{what} was not found")
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                found = restore(folder, like=tree(0))
            assert len(told) == 1, what
            assert all(found[name].equal(value) for name, value in tree(1).items()), what
            file.write_bytes(whole[file])
        shutil.rmtree(folder, ignore_errors=True)
    return times


if __name__ == "__main__":
    print(f"{run(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)} damaged checkpoints, all refused")
