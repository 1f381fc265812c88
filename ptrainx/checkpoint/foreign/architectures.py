"""The tables of Llama, Qwen2 and GPT-2, as transformers names their tensors.

Matrices of a tree are applied as `x @ w`: [in, out]. `torch.nn.Linear` has them transposed, GPT-2's `Conv1D` has not.

Sizes: V vocabulary, T positions, D width, Q all heads' queries, K all heads' keys (values), F hidden units.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ptrainx.checkpoint.foreign.tables import Architecture, Row

__all__ = ["gpt2", "llama", "qwen2"]

LINEAR = True
"""A weight of `torch.nn.Linear`."""


def llama(config: Mapping[str, Any]) -> Architecture:
    """`LlamaForCausalLM`."""
    bias = bool(config.get("attention_bias", False))
    return _llama("LlamaForCausalLM", config, biases="qkvo" if bias else "", mlp_bias=bool(config.get("mlp_bias")))


def qwen2(config: Mapping[str, Any]) -> Architecture:
    """`Qwen2ForCausalLM`: a Llama whose queries, keys and values have biases."""
    return _llama("Qwen2ForCausalLM", config, biases="qkv", mlp_bias=False)


def _llama(name: str, config: Mapping[str, Any], biases: str, mlp_bias: bool) -> Architecture:
    V, D, F = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or D // heads
    Q, K = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    layer, theirs = "layers/*", "model.layers.*"
    attention = [(n, size) for n, size in (("q", Q), ("k", K), ("v", K), ("o", D)) if n in biases]
    mlp = [(n, size) for n, size in (("gate", F), ("up", F), ("down", D)) if mlp_bias]
    rows = (
        Row("embed", "model.embed_tokens.weight", (V, D)),
        Row(f"{layer}/norm_attention", f"{theirs}.input_layernorm.weight", (D,)),
        Row(f"{layer}/q", f"{theirs}.self_attn.q_proj.weight", (D, Q), LINEAR),
        Row(f"{layer}/k", f"{theirs}.self_attn.k_proj.weight", (D, K), LINEAR),
        Row(f"{layer}/v", f"{theirs}.self_attn.v_proj.weight", (D, K), LINEAR),
        Row(f"{layer}/o", f"{theirs}.self_attn.o_proj.weight", (Q, D), LINEAR),
        *(Row(f"{layer}/{n}_bias", f"{theirs}.self_attn.{n}_proj.bias", (size,)) for n, size in attention),
        Row(f"{layer}/norm_mlp", f"{theirs}.post_attention_layernorm.weight", (D,)),
        Row(f"{layer}/gate", f"{theirs}.mlp.gate_proj.weight", (D, F), LINEAR),
        Row(f"{layer}/up", f"{theirs}.mlp.up_proj.weight", (D, F), LINEAR),
        Row(f"{layer}/down", f"{theirs}.mlp.down_proj.weight", (F, D), LINEAR),
        *(Row(f"{layer}/{n}_bias", f"{theirs}.mlp.{n}_proj.bias", (size,)) for n, size in mlp),
        Row("norm", "model.norm.weight", (D,)),
    )
    head = Row("head", "lm_head.weight", (D, V), LINEAR)
    joins = {
        f"{layer}/qkv": (f"{layer}/q", f"{layer}/k", f"{layer}/v"),
        f"{layer}/qkv_bias": (f"{layer}/q_bias", f"{layer}/k_bias", f"{layer}/v_bias"),
        f"{layer}/gate_up": (f"{layer}/gate", f"{layer}/up"),
        f"{layer}/gate_up_bias": (f"{layer}/gate_bias", f"{layer}/up_bias"),
    }
    return _with_head(name, config, rows, head, "model.embed_tokens.weight", tied=False)._replace(
        layers=config["num_hidden_layers"], prefix="model.", joins=joins
    )


def gpt2(config: Mapping[str, Any]) -> Architecture:
    """`GPT2LMHeadModel`: its files have queries, keys and values in one tensor."""
    V, D, T = config["vocab_size"], config["n_embd"], config["n_positions"]
    F = config.get("n_inner") or 4 * D
    layer, theirs = "layers/*", "transformer.h.*"
    rows = (
        Row("embed", "transformer.wte.weight", (V, D)),
        Row("position", "transformer.wpe.weight", (T, D)),
        Row(f"{layer}/norm_attention", f"{theirs}.ln_1.weight", (D,)),
        Row(f"{layer}/norm_attention_bias", f"{theirs}.ln_1.bias", (D,)),
        *(Row(f"{layer}/{n}", f"{theirs}.attn.c_attn.weight", (D, D), column=(i, 3)) for i, n in enumerate("qkv")),
        *(Row(f"{layer}/{n}_bias", f"{theirs}.attn.c_attn.bias", (D,), column=(i, 3)) for i, n in enumerate("qkv")),
        Row(f"{layer}/o", f"{theirs}.attn.c_proj.weight", (D, D)),
        Row(f"{layer}/o_bias", f"{theirs}.attn.c_proj.bias", (D,)),
        Row(f"{layer}/norm_mlp", f"{theirs}.ln_2.weight", (D,)),
        Row(f"{layer}/norm_mlp_bias", f"{theirs}.ln_2.bias", (D,)),
        Row(f"{layer}/up", f"{theirs}.mlp.c_fc.weight", (D, F)),
        Row(f"{layer}/up_bias", f"{theirs}.mlp.c_fc.bias", (F,)),
        Row(f"{layer}/down", f"{theirs}.mlp.c_proj.weight", (F, D)),
        Row(f"{layer}/down_bias", f"{theirs}.mlp.c_proj.bias", (D,)),
        Row("norm", "transformer.ln_f.weight", (D,)),
        Row("norm_bias", "transformer.ln_f.bias", (D,)),
    )
    joins = {
        f"{layer}/qkv": (f"{layer}/q", f"{layer}/k", f"{layer}/v"),
        f"{layer}/qkv_bias": (f"{layer}/q_bias", f"{layer}/k_bias", f"{layer}/v_bias"),
    }
    head = Row("head", "lm_head.weight", (D, V), LINEAR)
    return _with_head("GPT2LMHeadModel", config, rows, head, "transformer.wte.weight", tied=True)._replace(
        layers=config["n_layer"], prefix="transformer.", joins=joins
    )


def _with_head(
    name: str, config: Mapping[str, Any], rows: tuple[Row, ...], head: Row, embedding: str, tied: bool
) -> Architecture:
    """The rows with a head of its own, or one that is the embedding; `tied`: which, if the config does not say."""
    if config.get("tie_word_embeddings", tied):
        return Architecture(name, rows, 0, tied=(head._replace(name=embedding),))
    return Architecture(name, (*rows, head), 0)
