"""Models through transformers and through ours: `python -m tests.checkpoint.with_transformers [--write]`.

Tiny models of random weights, tied and untied. Transformers' files are read, one device and a 2x2 mesh, and give the
logits that transformers computes; trees drawn here are written, and transformers loads them and computes the logits
that ours have. Prints the largest difference of each, and fails above 1e-5.

With `--write` it makes `tests/checkpoint/hf`: for each model what `save_pretrained` wrote, with tokens and logits.
`test_hf_models.py` compares with these where transformers is not installed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

import ptrainx as px
from tests.checkpoint.hf_models import GOLDEN, logits, random_tree, read

TOLERANCE = 1e-5
SIZES = {"vocab_size": 26, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 20, "max_position_embeddings": 32}
GPT2 = {"vocab_size": 26, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12}
ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MODELS = {
    "llama": ("llama", {**LLAMA, "tie_word_embeddings": False}),
    "llama-tied": ("llama", {**LLAMA, "tie_word_embeddings": True, "attention_bias": True, "rope_scaling": ROPE}),
    "qwen2": ("qwen2", {**LLAMA, "tie_word_embeddings": False, "rope_theta": 1e6}),
    "qwen2-tied": ("qwen2", {**LLAMA, "tie_word_embeddings": True}),
    "gpt2": ("gpt2", {**GPT2, "tie_word_embeddings": True}),
    "gpt2-untied": ("gpt2", {**GPT2, "tie_word_embeddings": False, "n_inner": 20}),
}
"""Name -> model type, and what its config says other than by default."""


def tokens() -> torch.Tensor:
    return torch.randint(26, (4, 12), generator=torch.Generator().manual_seed(1))


def scores(model, tokens_BT: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(tokens_BT).logits


def theirs(kind: str, options: dict) -> torch.nn.Module:
    """A model of transformers, every weight random, biases and norms too."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(kind, **options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    return model


def write() -> None:
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, (kind, options) in MODELS.items():
        model = theirs(kind, options)
        model.save_pretrained(GOLDEN / name)
        (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
        save_file({"tokens": tokens(), "logits": scores(model, tokens())}, GOLDEN / name / "answers.safetensors")


def check(name: str, kind: str, options: dict, folder: Path) -> float:
    """The largest difference of a model, both ways; each is printed."""
    import transformers

    model = theirs(kind, options)
    config = model.config.to_dict()
    mesh = px.make_mesh(data=2, model=2, simulate=True)
    found = {}
    model.save_pretrained(folder / "theirs", max_shard_size="8KB")
    wanted = scores(model, tokens())
    for where, on in (("one device", None), ("2x2", mesh)):
        params, specs = read(folder / "theirs", on)
        found[f"transformers -> ptrainx, {where}"] = logits(params, tokens(), config, on, specs) - wanted
    for where, stacked in (("layers listed", False), ("layers stacked", True)):
        tree = random_tree(px.checkpoint.hf_shapes(config, stacked=stacked))
        out = px.checkpoint.export_hf(folder / where, tree, config=model.config, max_shard_bytes=8000)
        again, told = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(told.values()), told
        found[f"ptrainx -> transformers, {where}"] = scores(again, tokens()) - logits(tree, tokens(), config)
    for what, difference in found.items():
        print(f"{name:12} {what:42} {difference.abs().max():.1e} of logits up to {wanted.abs().max():.1f}")
    return max(float(difference.abs().max()) for difference in found.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="make tests/checkpoint/hf")
    if parser.parse_args().write:
        write()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        worst = max(check(name, *model, Path(folder) / name) for name, model in MODELS.items())
    return 0 if worst < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
