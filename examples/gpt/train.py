"""Trains a byte-level GPT on text.

    python examples/gpt/train.py                                              one process
    ptrainx run -n 2 examples/gpt/train.py                                    two, data-parallel
    ptrainx run -n 4 examples/gpt/train.py --mesh data=2,model=2 --zero 3     four, parameters split both ways
    python examples/gpt/train.py --mesh data=4,model=2 --simulate             eight devices simulated in one process
    python examples/gpt/train.py --precision bf16                             computed in bfloat16, stored in float32
    python examples/gpt/train.py --out runs/a --save-every 100 --resume       goes on where it was, if it was killed

In: text, by default the source of Python's standard library. Out, in the folder `--out`: `metrics.jsonl`, `loss.png`,
`params.safetensors`, and with `--save-every` the folder `checkpoints`; on the terminal the loss on held-out text and a
sample of the model's own.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import model
import numpy as np
import torch
import weights
from model import Config
from sampling import generate
from scoring import make_score
from sharding import make_mesh, spread_over_data, tensor_parallel

import ptrainx as px
from ptrainx import P

STEPS = 900
"""About two minutes on two cores."""
SAMPLE = 600
"""Bytes of text that the trained model writes."""


def options(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains a byte-level GPT on text.")
    run = parser.add_argument_group("run")
    run.add_argument("--data", metavar="FILE_OR_FOLDER", help="text; by default Python's standard library")
    run.add_argument("--out", metavar="FOLDER", type=Path, help="results (default runs/gpt-DATE-TIME)")
    run.add_argument("--steps", type=int, default=STEPS, help="0 writes the initial parameters (default %(default)s)")
    run.add_argument("--minutes", type=float, help="stop earlier, after so many minutes")
    run.add_argument("--seed", type=int, default=0, help="of parameters and batches (default %(default)s)")
    run.add_argument("--val-every", type=int, metavar="STEPS", help="also score held-out text every so many steps")
    run.add_argument("--save-every", type=int, metavar="STEPS", help="checkpoint the run every so many steps")
    run.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if there is one")
    place = parser.add_argument_group("devices")
    place.add_argument("--mesh", metavar="AXES", help="data=2, or data=2,model=2 (default: all processes on data)")
    place.add_argument("--zero", type=int, choices=(0, 1, 3), default=0, help="split over data: 1 the optimizer, 3 all")
    place.add_argument("--simulate", action="store_true", help="all devices in this process (default data=8)")
    place.add_argument("--backend", default="graph", help="of px.jit: graph or eager (default %(default)s)")
    size = parser.add_argument_group("model and optimizer")
    size.add_argument("--batch", type=int, default=16, help="sequences a step, over all devices (default %(default)s)")
    for name, default in vars(Config()).items():
        size.add_argument(f"--{name}", type=int, default=default, help="(default %(default)s)")
    size.add_argument("--lr", type=float, default=4e-3, help="peak learning rate (default %(default)s)")
    size.add_argument("--precision", choices=("f32", "bf16", "fp16"), default="f32", help="(default %(default)s)")
    size.add_argument("--weight-decay", type=float, default=0.1, help="of matrices (default %(default)s)")
    chosen = parser.parse_args(argv)
    if chosen.steps < 0:
        parser.error("--steps is negative")
    if chosen.save_every is not None and chosen.save_every < 1:
        parser.error("--save-every is less than 1")
    if chosen.resume and chosen.out is None:
        parser.error("--resume needs --out, the folder of the run")
    return chosen


def texts(data: str | None) -> tuple[np.ndarray, np.ndarray]:
    """(text to train on, held-out text), uint8: files of the standard library, or the first 19/20 and the rest."""
    if data is None:
        train_files, held_out_files = px.data.python_stdlib_files()
        return px.data.read_bytes(train_files), px.data.read_bytes(held_out_files)
    text = px.data.read_bytes(data)
    end = len(text) - max(2, len(text) // 20)
    return text[:end], text[end:]


def make_optimizer(o: argparse.Namespace) -> px.optim.GradientTransformation:
    """AdamW after clipping; the learning rate rises over a twentieth of the steps, then falls along a cosine."""
    steps = max(2, o.steps)
    rate = px.optim.warmup_cosine_decay_schedule(0.0, o.lr, max(1, steps // 20), steps, end_value=0.05 * o.lr)
    return px.optim.chain(
        px.optim.clip_by_global_norm(1.0),
        px.optim.adamw(
            rate, b2=0.99, weight_decay=o.weight_decay, mask=lambda params: px.tree.map(lambda w: w.ndim > 1, params)
        ),
    )


def make_step(o: argparse.Namespace, config: Config, mesh: px.Mesh) -> tuple[Any, Any, px.TrainState]:
    """(init, step, specs): two jitted functions, and where the state lies that they pass on.

    Parameters and optimizer state are float32; the model is computed in `--precision`, with a loss scale for float16.
    """
    optimizer = make_optimizer(o)
    policy = px.Precision.parse(o.precision)
    scaling = px.DynamicLossScale() if policy.compute == torch.float16 else None

    def init(key: torch.Tensor) -> px.TrainState:
        params = model.init(key, config)
        states = (optimizer.init(params), scaling.init()) if scaling else (optimizer.init(params),)
        return px.TrainState(step=0, params=params, opt_state=states, key=key)

    shapes = px.eval_shape(init, px.random.key(o.seed))
    specs = tensor_parallel(shapes, config, mesh)
    used = specs.params
    owned = spread_over_data(used, shapes.params, mesh) if o.zero else used
    if o.zero >= 1:
        specs = specs.replace(opt_state=spread_over_data(specs.opt_state, shapes.opt_state, mesh))
    if o.zero == 3:
        specs = specs.replace(params=owned)

    def place(x_BTD: torch.Tensor) -> torch.Tensor:
        return px.reshard(x_BTD, P("data"))

    @policy
    def loss_fn(params: Any, batch: Any) -> torch.Tensor:
        if o.zero == 3:
            params = px.reshard(params, used)  # gathered for use; the gradients come back split
        return model.mean_loss(params, batch, config, place)

    @px.jit(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), donate_argnums=0, backend=o.backend)
    def step(state: px.TrainState, batch: Any) -> tuple[px.TrainState, dict[str, torch.Tensor]]:
        before, *scale = state.opt_state

        def objective(params: Any, batch: Any) -> torch.Tensor:
            return scaling.scale(*scale, loss_fn(params, batch)) if scaling else loss_fn(params, batch)

        loss, grads = px.value_and_grad(objective, reduce=False)(state.params, batch)
        grads = policy.reshard(grads, owned)  # the sums over `data` are paid here: whole, or each device its part
        if scaling:
            loss, grads = scaling.unscale(*scale, (loss, grads))
        updates, after = optimizer.update(grads, before, state.params)
        params = px.optim.apply_updates(state.params, updates)
        metrics = {"loss": loss}
        if scaling:
            finite = px.optim.all_finite(grads)  # a step that overflowed on any device changes nothing on all of them
            params, after = px.tree.where(finite, (params, after), (state.params, before))
            metrics["loss_scale"] = scale[0].scale
            scale = [scaling.adjust(*scale, finite)]
        return state.replace(step=state.step + 1, params=params, opt_state=(after, *scale)), metrics

    return px.jit(init, mesh=mesh, out_specs=specs, backend=o.backend), step, specs


def train(o: argparse.Namespace) -> None:
    """The whole run."""
    world = px.initialize()
    config = Config(**{name: getattr(o, name) for name in vars(Config())})
    mesh = make_mesh(o.mesh, o.simulate)
    text, held_out = texts(o.data)
    windows = px.data.ByteWindows(text, config.context)
    loader = px.data.Loader(windows, o.batch, mesh=mesh, seed=o.seed, epochs=None)
    init, step, specs = make_step(o, config, mesh)
    score = make_score(specs.params, config, mesh, o.backend)
    out = o.out or Path("runs", time.strftime("gpt-%Y%m%d-%H%M%S"))
    checkpoints = px.checkpoint.Manager(out / "checkpoints", keep=2)
    if o.resume and checkpoints.latest_step() is not None:
        like = {"state": px.eval_shape(init, px.random.key(o.seed)), "loader": loader.state_dict()}
        found = checkpoints.restore(like=like, specs={"state": specs, "loader": None}, mesh=mesh)
        state, done = found["state"], int(found["state"].step)
        loader.load_state_dict(found["loader"])
    else:
        state, done = init(px.random.key(o.seed)), 0
    batches = iter(loader)

    run = {
        **{"mesh": mesh.shape, "backend": o.backend, "world": world.size, "zero": o.zero, "simulated": o.simulate},
        **{"parameters": sum(leaf.numel() for leaf in px.tree.leaves(state.params)), "seed": o.seed, "lr": o.lr},
        "precision": o.precision,
        **{"steps": o.steps, "batch": o.batch, "data": o.data or "the standard library", **vars(config)},
    }
    began = time.perf_counter()
    earlier = records_until(out / "metrics.jsonl", done)
    with px.observe.MetricsWriter(out / "metrics.jsonl") as metrics, px.observe.Progress(o.steps) as progress:
        progress.print(f"{run['parameters']:,} parameters on {mesh}; {len(text):,} bytes, {len(held_out):,} held out")
        record: dict[str, Any] = earlier[-1] if earlier else {}
        for line in earlier:
            metrics.write(line)
        for number in range(done + 1, o.steps + 1):
            start = time.perf_counter()
            batch = next(batches)
            state, values = step(state, batch)
            values = {name: float(value) for name, value in values.items()}
            seconds = time.perf_counter() - start
            record = {"step": number, **values, "tokens_per_s": o.batch * config.context / seconds}
            record |= {"step_s": seconds, "rss_mib": px.observe.rss_mib()}
            progress.update(number, record)
            if number == done + 1:
                record |= run | {"comm_bytes": step.comms(state, batch).total_bytes}
            last = number == o.steps or out_of_time(began, o.minutes)
            if last or (o.val_every and number % o.val_every == 0):
                record["val_loss"] = score(state.params, held_out)
            metrics.write(record)
            if o.save_every and number % o.save_every == 0:
                checkpoints.save_async(number, {"state": state, "loader": loader.state_dict()})
            if last:
                break
        checkpoints.wait()
        if not o.steps:
            metrics.write({"step": 0, **run, "comm_bytes": step.comms(state, next(batches)).total_bytes})
    params = px.device_get(state.params)
    if world.rank == 0:
        weights.save(out / "params.safetensors", params, config)
        if o.steps:
            print(f"validation loss {record['val_loss']:.4f} nats a byte")
            picture(out)
            sample(params, config, o.seed)
        print(f"in {out}: {', '.join(sorted(file.name for file in out.iterdir()))}")


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """What a run that is resumed had recorded up to this step; what it did after its last checkpoint is done again."""
    if not step or px.initialize().rank != 0 or not path.exists():
        return []
    return [record for record in px.observe.read_metrics(path) if record["step"] <= step]


def out_of_time(began: float, minutes: float | None) -> bool:
    """Whether rank 0's clock says that the time is up: all ranks must stop after the same step."""
    if minutes is None:
        return False
    flag = torch.tensor(time.perf_counter() - began > 60 * minutes)
    if px.initialize().size > 1:
        torch.distributed.broadcast(flag, 0)
    return bool(flag)


def picture(out: Path) -> None:
    """Draws the loss, if matplotlib is there."""
    try:
        px.observe.plot_loss(out / "metrics.jsonl", unit="nats a byte")
    except px.errors.BackendError as error:
        print(f"no loss.png: {error}")


def sample(params: Any, config: Config, seed: int) -> None:
    """Prints text that the model makes up."""
    text = generate(params, config, px.random.fold_in(px.random.key(seed), 1), SAMPLE)
    print(f"a sample:\n{'-' * 80}\n{readable(text)}\n{'-' * 80}")


def readable(text: bytes) -> str:
    """Text for a terminal: what an untrained model writes would else move the cursor and change colours."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text.decode(errors="replace")).strip("\n")


if __name__ == "__main__":
    try:
        train(options())
    except px.errors.PtrainxError as error:
        sys.exit(f"{type(error).__name__}: {error}")
