"""Products of matrices and vectors, einsum."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ops.coverage.case import Case, values

__all__ = ["CASES"]

A, B, BATCH, OTHER = values(8, 4), values(4, 8, seed=1), values(4, 8, 4), values(4, 4, 8, seed=1)
VECTOR, HEADS = values(4, seed=2), values(4, 4, 8, 4, seed=3)

CASES = [
    Case("matmul", torch.matmul, (A, B)),
    Case("mm", torch.mm, (A, B)),
    Case("mm, transposed", lambda a, b: a.t() @ b.t(), (A, B)),
    Case("mv", torch.mv, (A, VECTOR)),
    Case("matmul, vector first", torch.matmul, (VECTOR, B)),
    Case("dot", torch.dot, (values(8), values(8, seed=1))),
    Case("inner", torch.inner, (A, VECTOR)),
    Case("outer", torch.outer, (values(8), VECTOR)),
    Case("bmm", torch.bmm, (BATCH, OTHER)),
    Case("matmul, batch and matrix", torch.matmul, (BATCH, B)),
    Case("matmul, matrix and batch", torch.matmul, (A, OTHER)),
    Case("matmul, heads", lambda q, k: q @ k.transpose(-1, -2), (HEADS, HEADS * 0.5)),
    Case("addmm", torch.addmm, (values(8, 8), A, B)),
    Case("addmm, bias", lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (values(8), A, B)),
    Case("addmv", torch.addmv, (values(8), A, VECTOR)),
    Case("baddbmm", torch.baddbmm, (values(4, 8, 8), BATCH, OTHER)),
    Case("addbmm", torch.addbmm, (values(8, 8), BATCH, OTHER)),
    Case("F.linear", F.linear, (A, values(8, 4, seed=1))),
    Case("F.linear, bias", F.linear, (A, values(8, 4, seed=1), values(8, seed=2))),
    Case("F.linear, three dims", F.linear, (BATCH, values(8, 4, seed=1), values(8, seed=2))),
    Case("F.bilinear", F.bilinear, (A, values(8, 4, seed=1), values(4, 4, 4, seed=2)), whole=(2,)),
    Case("einsum, product", lambda a, b: torch.einsum("ij,jk->ik", a, b), (A, B)),
    Case("einsum, batch", lambda a, b: torch.einsum("bti,bis->bts", a, b), (BATCH, OTHER)),
    Case("einsum, heads", lambda q, k: torch.einsum("bhtd,bhsd->bhts", q, k), (HEADS, HEADS * 0.5)),
    Case("einsum, outer", lambda a, b: torch.einsum("i,j->ij", a, b), (values(8), VECTOR)),
    Case("einsum, sum", lambda a: torch.einsum("ij->j", a), (A,)),
    Case("einsum, transpose", lambda a: torch.einsum("ij->ji", a), (A,)),
    Case("einsum, diagonal", lambda a: torch.einsum("ii->i", a), (values(8, 8),)),
    Case("tensordot", lambda a, b: torch.tensordot(a, b, dims=([2], [1])), (BATCH, OTHER)),
    Case("kron", torch.kron, (values(4, 4), values(2, 2))),
    Case("cdist", torch.cdist, (A, values(4, 4, seed=3))),
    Case("F.cosine_similarity", lambda a, b: F.cosine_similarity(a, b, dim=1), (A, values(8, 4, seed=1))),
    Case("F.pairwise_distance", F.pairwise_distance, (A, values(8, 4, seed=1))),
    Case("chain_matmul", lambda a, b: a @ b @ a, (A, B)),
    Case("gram", lambda a: a @ a.t(), (A,)),
    Case("linalg.inv", lambda a: torch.linalg.inv(a @ a.t() + torch.eye(4, dtype=a.dtype) * 3), (values(4, 4),)),
    Case(
        "linalg.cholesky", lambda a: torch.linalg.cholesky(a @ a.t() + torch.eye(4, dtype=a.dtype) * 3), (values(4, 4),)
    ),
    Case("linalg.solve", lambda a, b: torch.linalg.solve(a + torch.eye(4, dtype=a.dtype) * 5, b), (values(4, 4), B)),
]
