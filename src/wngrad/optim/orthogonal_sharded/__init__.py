"""Orthogonalization of matrices that are cut between ranks, with few bytes and few messages.

Momentum is updated where it lies, entry by entry. Then, for all matrices of a step together:

1. Gram (`gram`). Of a matrix that is cut between its m rows, with n columns,

       XᵀX = Σ over ranks of XᵣᵀXᵣ,    Uᵣ = Xᵣ·P(XᵀX)        (P: `orthogonal.gram_factor`)

   One all-reduce of the n(n+1)/2 numbers of a symmetric matrix; the rest is local. X is scaled
   before, to ‖X‖ = 1, which needs the largest entry and the norm of the whole: one all-gather of
   these two numbers of each part, a maximum and a sum in one message. A matrix that is cut between
   its columns is the same, transposed.
2. Owners (`owners`). Every other matrix goes to one rank, which orthogonalizes it and sends their
   parts back to all. Matrices are dealt out by their work, the largest first, to the rank that has
   the least. One all-to-all there, one back. On CUDA they travel in float16, and are scaled before.

Bytes decide between the two. On R ranks, in numbers that all of them together send,

    Gram     (R−1)·n·(n+1) + 2·R·(R−1)    (a ring's all-reduce sends every number 2·(R−1) times)
    owners   2·(R−1)/R·m·n                (gathered by every rank, g and m: 2·(R−1)·m·n)

so the Gram matrix is taken where R·(n+1) ≤ 2m, of matrices much taller than wide such as an
embedding. All ranks then make the same P, so it costs operations, too: where it moves more bytes an
owner is faster in both. Matrices that lie whole on a rank, such as those of a stack of experts that
is cut between experts, cost nothing; a dimension of the mesh that replicates takes no part. Where
two dimensions of a mesh cut a matrix there is a sum over each in step 1, and step 2 undoes the last
of them first and goes on with what is left.

The number of messages does not depend on the number of matrices: four at most where one dimension
of a mesh cuts them, twice as many where two do, and one more for embeddings that are cut between
columns (which rows have a gradient). What is not finite anywhere makes its whole matrix NaN on
every rank.
"""

from wngrad.optim.orthogonal_sharded.direction import Shard, orthogonalize_sharded, propose
from wngrad.optim.orthogonal_sharded.placement import is_cut

__all__ = ["Shard", "is_cut", "orthogonalize_sharded", "propose"]
