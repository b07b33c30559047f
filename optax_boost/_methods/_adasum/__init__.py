r"""AdaSum: sums orthogonal gradients of replicas, averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

and for N of them a binary tree, neighbours first: (0, 1), (2, 3), ..., then the results of these
pairs. A node without a partner passes up a level, so N need not be a power of two.

  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

The tree is walked on chunks, level by level: each device has its chunk of all N gradients, combines
the pairs of nodes there, and sums up squares and products of the nodes that come out. An all-reduce
of these sums, some numbers for each group of leaves, gives the next level's coefficients.

Between devices: the largest entries are compared (all-reduce), chunks change owners (all-to-all),
sums are added (an all-reduce per level), and the chunks of the result are gathered. That moves the
bytes of an all-reduce, in 3 + log2(N) collectives for any number of leaves. Each entry is computed
on one device only, so all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.

Modules:

  _adasum     the arguments, the state, and which leaves are a group
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
