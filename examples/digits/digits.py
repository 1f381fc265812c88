# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Digits: one program on any mesh
#
# This notebook trains a small network on eight devices that one process simulates. The same code trains on eight real
# ones; the last section says how.
#
# You need to know PyTorch. If you know JAX, you know most of the rest.

# %%
import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import ptrainx as px
from ptrainx import P

torch.set_num_threads(1)  # small matrices: more threads only wait for each other

# %% [markdown]
# ## A mesh is a grid of devices
#
# Its axes have names. Here `data` will split the batch, and `model` the network. With `simulate=True` this process
# plays all eight devices, one after the other, and the collectives between them.

# %%
mesh = px.make_mesh(data=4, model=2, simulate=True)
print(mesh)

# %% [markdown]
# ## A spec says where an array lies
#
# `P` has one entry for each dim of the array: the mesh axis that splits it, or `None`. Along an axis that the spec does
# not name lie copies. The picture shows which rank holds which block. Ranks in one cell hold the same numbers.

# %%
px.visualize_sharding(P("data", "model"), mesh=mesh, shape=(8, 8))

# %%
px.visualize_sharding(P(None, "model"), mesh=mesh, shape=(8, 8))

# %% [markdown]
# The same picture for a terminal:

# %%
print(px.visualize_sharding(P("data"), mesh=mesh, shape=(8, 8), show=False))

# %% [markdown]
# ## Data
#
# 1,797 handwritten digits of 8 × 8 pixels come with scikit-learn. 360 of them are kept for the test.

# %%
digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.int64)

shuffled = np.random.default_rng(0).permutation(len(labels))
train_rows, test_rows = shuffled[:-360], shuffled[-360:]
source = {"image": images[train_rows], "label": labels[train_rows]}

figure, panels = plt.subplots(1, 10, figsize=(9, 1.3), layout="constrained")
for panel, image, label in zip(panels, source["image"], source["label"]):
    panel.imshow(image.reshape(8, 8), cmap="gray_r")
    panel.set_title(int(label))
    panel.axis("off")
plt.show()

# %% [markdown]
# A `Loader` gives batches that lie on the mesh already. `batch_size` counts the rows on all devices together. The order
# depends on the seed alone, not on the mesh.


# %%
def batches(mesh, epochs):
    return px.data.Loader(source, batch_size=96, mesh=mesh, spec=P("data"), seed=0, epochs=epochs)


batch = next(iter(batches(mesh, epochs=1)))
px.visualize_sharding(batch["image"])

# %% [markdown]
# ## The model is a few pure functions
#
# Parameters are a dict of tensors. Random numbers come from a key, which you pass. The same key gives the same numbers
# on every mesh.
#
# Shapes: B batch, I = 64 pixels, H = 128 hidden units, C = 10 classes.


# %%
def init_params(key):
    key_up, key_down = px.random.split(key)
    return {
        "up": {"w": px.random.normal(key_up, (64, 128)) * (2 / 64) ** 0.5, "b": torch.zeros(128)},
        "down": {"w": px.random.normal(key_down, (128, 10)) * (1 / 128) ** 0.5, "b": torch.zeros(10)},
    }


def logits(params, x_BI, key=None):
    h_BH = torch.relu(x_BI @ params["up"]["w"] + params["up"]["b"])
    if key is not None:
        h_BH = px.random.dropout(key, h_BH, 0.2)
    return h_BH @ params["down"]["w"] + params["down"]["b"]


def loss_and_accuracy(scores_BC, label_B):
    right_B = scores_BC.argmax(-1) == label_B
    return F.cross_entropy(scores_BC, label_B), right_B.float().mean()


# %% [markdown]
# The optimizer has the form of optax: a pair of pure functions, `init` and `update`. The learning rate rises for 10
# steps, then falls along a cosine until step 140.

# %%
schedule = px.optim.warmup_cosine_decay_schedule(0.0, 1e-2, warmup_steps=10, decay_steps=140)
optimizer = px.optim.chain(px.optim.clip_by_global_norm(1.0), px.optim.adamw(schedule, weight_decay=1e-2))


def init(key):
    params = init_params(key)
    return px.TrainState(step=0, params=params, opt_state=optimizer.init(params), key=key)


# %% [markdown]
# ## The state is made where it will lie
#
# `match_rules` picks a spec for each leaf by its path; the first rule that matches counts. The first layer is split by
# columns, the second by rows, so that the hidden units never have to be gathered. Adam's moments have the same names
# and get the same specs.
#
# `px.jit` with `out_specs` makes the state on the mesh: each device draws its own shards and never holds another's.

# %%
rules = [
    (r"up/w$", P(None, "model")),
    (r"up/b$", P("model")),
    (r"down/w$", P("model")),
    (r".*", P()),
]
specs = px.match_rules(rules, px.eval_shape(init, px.random.key(0)))
state = px.jit(init, mesh=mesh, out_specs=specs)(px.random.key(0))
px.visualize_sharding(state)

# %% [markdown]
# ## The step is one function from state to state
#
# Inside `px.jit` every value is global: `batch["image"]` has 96 rows, whatever a device holds of it. Nobody writes a
# collective. Where placements conflict, one is added.
#
# `px.reshard` fixes a placement. The second layer multiplies the columns and rows that a device holds, so its result
# is a sum that the two devices along `model` still owe each other. It is paid at that line.
#
# `donate_argnums=0` gives the old state's memory to the new one.


# %%
def loss_fn(params, batch, key):
    scores_BC = px.reshard(logits(params, batch["image"], key), P("data"))
    return loss_and_accuracy(scores_BC, batch["label"])


def step(state, batch):
    key, dropout_key = px.random.split(state.key)
    (loss, accuracy), grads = px.value_and_grad(loss_fn, has_aux=True)(state.params, batch, dropout_key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = px.optim.apply_updates(state.params, updates)
    state = state.replace(step=state.step + 1, params=params, opt_state=opt_state, key=key)
    return state, {"loss": loss, "accuracy": accuracy}


def jit_step(mesh):
    return px.jit(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), donate_argnums=0)


train_step = jit_step(mesh)

# %% [markdown]
# ## No communication is silent
#
# `comms` lists what a step sends, before it runs. `asked` tells what you asked for (a gradient, a `reshard`, an
# `out_specs`) from what a conflict implied. Bytes are those that one rank sends.

# %%
print(train_step.comms(state, batch))

# %% [markdown]
# The gradients of all four leaves travel in one all-reduce over `data`. What is implied is a few bytes: the count of
# rows that the mean of the loss divides by, and the norm by which gradients are clipped.
# `px.jit(..., max_implicit_bytes=100)` would refuse a step that implies more.
#
# ## Training

# %%
losses, accuracies = [], []
for batch in batches(mesh, epochs=10):
    state, metrics = train_step(state, batch)
    losses.append(float(metrics["loss"]))
    accuracies.append(float(metrics["accuracy"]))
print(f"{len(losses)} steps; loss {losses[0]:.3f} -> {losses[-1]:.3f}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
left.plot(losses)
left.set(xlabel="step", ylabel="cross-entropy, nats", title="training loss", ylim=0)
right.plot(accuracies)
right.set(xlabel="step", ylabel="share of the batch", title="training accuracy", ylim=(0, 1.02))
for panel in (left, right):
    panel.grid(alpha=0.3)
plt.show()

# %% [markdown]
# For the test, the images are plain numpy. `in_specs` shards them on the way in, and `px.device_get` brings the answer
# back whole.


# %%
@px.jit(mesh=mesh, in_specs=(specs.params, P("data")))
def predict(params, x_BI):
    return logits(params, x_BI).argmax(-1)


predicted = px.device_get(predict(state.params, images[test_rows])).numpy()
wrong = np.flatnonzero(predicted != labels[test_rows])
test_accuracy = 1 - len(wrong) / len(test_rows)
print(f"test accuracy {test_accuracy:.3f}: {len(wrong)} of {len(test_rows)} wrong")

# %%
figure, panels = plt.subplots(1, 8, figsize=(9, 1.6), layout="constrained")
for panel in panels:
    panel.axis("off")
for panel, row in zip(panels, wrong):
    panel.imshow(images[test_rows[row]].reshape(8, 8), cmap="gray_r")
    panel.set_title(f"{labels[test_rows[row]]}, read as {predicted[row]}", fontsize=9)
plt.show()

# %% [markdown]
# ## The same losses on any mesh
#
# Only the mesh changes here: no rule, no function. Initial parameters and dropout masks are the same bit for bit.
# Losses differ by the rounding of sums that are taken in another order.


# %%
def first_losses(mesh, steps=10):
    state = px.jit(init, mesh=mesh, out_specs=specs)(px.random.key(0))
    run = jit_step(mesh)
    found = []
    for _, batch in zip(range(steps), batches(mesh, epochs=1)):
        state, metrics = run(state, batch)
        found.append(float(metrics["loss"]))
    return found


on_meshes = {
    "1 device": first_losses(px.make_mesh(data=1, model=1, simulate=True)),
    "data=8": first_losses(px.make_mesh(data=8, model=1, simulate=True)),
    "data=4, model=2": losses[:10],
}
print(f"{'step':<17}" + "".join(f"{n:>11}" for n in (0, 3, 6, 9)))
for name, found in on_meshes.items():
    print(f"{name:<17}" + "".join(f"{found[n]:11.7f}" for n in (0, 3, 6, 9)))

reference = np.array(on_meshes["1 device"])
worst = max(np.abs(np.array(found) / reference - 1).max() for found in on_meshes.values())
print(f"largest relative difference over 10 steps: {worst:.0e}")

# %% [markdown]
# `px.testing.assert_mesh_invariant` is this check for your own step.
#
# ## Gradient accumulation pays once
#
# `accumulate_grads` works through the batch in microbatches. Each device takes them from its own rows, so no row moves.
# Gradients are carried as sums not yet paid, and one all-reduce pays them after the last microbatch. Its bytes do not
# grow with the number of microbatches.
#
# An `AbstractMesh` has axes and no devices. It is enough to ask what a program sends.


# %%
def gradients(num_microbatches):
    def run(params, batch):
        grad_fn = px.grad(loss_fn, has_aux=True)
        if num_microbatches > 1:
            grad_fn = px.accumulate_grads(grad_fn, num_microbatches)
        return grad_fn(params, batch, None)[0]  # without dropout

    return run


def jit_gradients(num_microbatches, mesh):
    return px.jit(gradients(num_microbatches), mesh=mesh, in_specs=(specs.params, P("data")), out_specs=specs.params)


planned = px.AbstractMesh(data=4, model=2)
shapes = (
    px.eval_shape(init_params, px.random.key(0)),
    px.tree.map(lambda x: px.ShapeDtypeStruct(x.shape, x.dtype), batch),
)
print("microbatches  reductions of gradients    bytes")
for count in (1, 4):
    rows = jit_gradients(count, planned).comms(*shapes)
    paid = [row for row in rows if row.reason.startswith("gradient")]
    print(f"{count:>12}{sum(row.count for row in paid):>25}{sum(row.bytes for row in paid):>9,}")

# %% [markdown]
# The result is that of the whole batch:

# %%
pair = px.make_mesh(data=2, model=1, simulate=True)
params = px.jit(init_params, mesh=pair, out_specs=specs.params)(px.random.key(0))
batch = next(iter(batches(pair, epochs=1)))
whole, accumulated = (px.device_get(jit_gradients(count, pair)(params, batch)) for count in (1, 4))
largest = max(px.tree.leaves(px.tree.map(lambda a, b: float((a - b).abs().max()), whole, accumulated)))
print(f"largest difference {largest:.0e}")

# %% [markdown]
# ## Mistakes are told where they are made
#
# An error of this library says what is wrong, what was got, and what to do. Of several axes only the last may
# cut a dim unevenly, and ten classes do not divide into four parts:

# %%
try:
    px.device_put({"bias": torch.zeros(10)}, P(("data", "model")), mesh)
except px.errors.SpecError as error:
    print(error)

# %% [markdown]
# A step is traced once, so it can't ask for a value that is only known when it runs:


# %%
@px.jit(mesh=mesh, in_specs=P("data"))
def clipped(x):
    total = x.sum()
    if total > 1:
        x = x / total
    return x


try:
    clipped(torch.ones(8))
except px.errors.HostReadError as error:
    print(error)

# %% [markdown]
# A donated value is gone, and says so:

# %%
old = state
state, _ = train_step(state, next(iter(batches(mesh, epochs=1))))
try:
    old.params["up"]["w"].sum()
except px.errors.DonationError as error:
    print(error)

# %% [markdown]
# ## On real devices
#
# Leave out `simulate=True`, save the cells as `train.py`, and start eight processes:
#
# ```
# ptrainx run -n 8 train.py
# ```
#
# The mesh is then made of the processes' devices, CUDA where there is any. `python train.py` with
# `px.make_mesh(data=1, model=1)` trains on one. `examples/gpt` is a larger program of this kind.
