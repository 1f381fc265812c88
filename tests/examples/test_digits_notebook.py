"""The digits notebook runs, its numbers are those of plain PyTorch, and the published outputs are of this source."""

from __future__ import annotations

import json

import nbformat
import numpy as np
import pytest

from examples.digits.render import HERE, execute, read

STEPS = 10
PROBE = f"""
import json, math

def plain_losses(steps):
    params = px.tree.map(lambda p: p.requires_grad_(), init_params(px.random.key(0)))
    leaves, key, found = px.tree.leaves(params), px.random.key(0), []
    adamw = torch.optim.AdamW(leaves, lr=0.0, weight_decay=1e-2)
    one = px.make_mesh(data=1, simulate=True)
    for step, batch in zip(range(steps), batches(one, epochs=1)):
        batch = px.device_get(batch)
        key, dropout_key = px.random.split(key)
        loss = F.cross_entropy(logits(params, batch["image"], dropout_key), batch["label"])
        grads = torch.autograd.grad(loss, leaves)
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        for leaf, grad in zip(leaves, grads):
            leaf.grad = grad / max(1.0, norm)
        adamw.param_groups[0]["lr"] = 1e-2 * step / 10
        adamw.step()
        found.append(float(loss.detach()))
    return found

def drawn(**axes):
    made = px.jit(init_params, mesh=px.make_mesh(axes, simulate=True), out_specs=specs.params)(px.random.key(0))
    return px.tree.leaves(px.device_get(made))

plain = px.tree.leaves(init_params(px.random.key(0)))
sharded = drawn(data=4, model=2), drawn(data=2, model=4)
print(json.dumps(dict(
    plain_losses=plain_losses({STEPS}),
    on_meshes=on_meshes,
    test_accuracy=test_accuracy,
    equal_bits=all(a.equal(b) for leaves in sharded for a, b in zip(plain, leaves)),
    losses=losses,
)))
"""


@pytest.fixture(scope="module")
def executed():
    notebook = read()
    probe = nbformat.v4.new_code_cell(PROBE, id="probe")
    notebook.cells.append(probe)
    return execute(notebook)


@pytest.fixture(scope="module")
def found(executed):
    return json.loads(executed.cells[-1].outputs[0].text)


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(notebook):
    return "\n".join(output.get("text", "") for output in outputs(notebook))


@pytest.mark.long
def test_it_learns(found):
    assert found["test_accuracy"] > 0.95
    assert np.mean(found["losses"][-14:]) < 0.1 * found["losses"][0]


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["1 device", "data=8", "data=4, model=2"])
def test_losses_are_those_of_plain_pytorch(found, mesh):
    assert len(found["on_meshes"][mesh]) == STEPS
    np.testing.assert_allclose(found["on_meshes"][mesh], found["plain_losses"], rtol=2e-5)


@pytest.mark.long
def test_initial_parameters_are_the_same_bits_on_every_mesh(found):
    assert found["equal_bits"]


@pytest.mark.long
def test_accumulation_pays_once(executed):
    table = next(o.text for o in outputs(executed) if o.get("text", "").startswith("microbatches"))
    bytes_of_shards = 4 * (64 * 128 // 2 + 128 // 2 + 128 * 10 // 2 + 10)
    ring = 2 * bytes_of_shards * 3 // 4
    assert [line.split() for line in table.splitlines()[1:]] == [["1", "1", f"{ring:,}"], ["4", "1", f"{ring:,}"]]


@pytest.mark.parametrize(
    "message",
    [
        "dim 0 of size 10 is not divisible by data=4",
        "clipped reads a traced value on the host",
        "argument state.params['up']['w'] of step was donated",
    ],
)
@pytest.mark.long
def test_mistakes_are_shown(executed, message):
    assert message in text_of(executed)


@pytest.mark.long
def test_pictures_are_html_and_plots_are_images(executed):
    kinds = [kind for output in outputs(executed) for kind in output.get("data", {})]
    assert kinds.count("text/html") == 4
    assert kinds.count("image/png") == 3


def test_the_published_notebook_is_of_this_source():
    published, source = nbformat.read(HERE / "digits.ipynb", as_version=4), read()
    assert [(cell.cell_type, cell.source) for cell in published.cells] == [
        (cell.cell_type, cell.source) for cell in source.cells
    ], "run examples/digits/render.py"
    assert all(cell.execution_count for cell in published.cells if cell.cell_type == "code")
    assert not [
        output for output in outputs(published) if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert (HERE / "digits.ipynb").stat().st_size < 300_000
