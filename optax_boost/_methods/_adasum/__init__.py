r"""AdaSum: sums the orthogonal parts of the replicas' gradients and averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

For N gradients, a binary tree combines neighbours first: (0, 1), (2, 3), ..., then the results of
these pairs. A node without a partner moves up one level unchanged, so N need not be a power of two.

  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

After an all-to-all, each device holds the same chunk of all N gradients. On each level of the tree,
the device combines the pairs of nodes in its chunk. For the resulting nodes it sums squares, and
the products of the next pairs. An all-reduce of these sums, a few numbers for each group of leaves,
gives the coefficients of the next level.

For any number of leaves there are 3 + log2(N) collectives, which together move as many bytes as one
all-reduce of the gradients: an all-reduce of the largest entries, an all-to-all that brings chunks
to their devices, an all-reduce of the sums per level, and an all-gather of the result. Each entry
is computed on one device only, so all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.

Modules:

  _adasum     the arguments, the state, and which leaves form a group
  _layers     cuts leaves that hold several layers into one leaf per layer
  _chunks     concatenates all leaves into one vector, and cuts it into chunks
  _pairs      the formulas of one level of the tree
  _reduction  walks the tree, on one device or over several
"""

from optax_boost._methods._adasum._adasum import (
  AdasumState as AdasumState,
  adasum as adasum,
  adasum_reduce as adasum_reduce,
  check_not_summed as check_not_summed,
)
