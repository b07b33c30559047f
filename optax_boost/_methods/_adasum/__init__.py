r"""AdaSum: sums the orthogonal parts of the replicas' gradients and averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

N gradients are combined along a binary tree: first the pairs (0, 1), (2, 3), ..., then pairs of
their sums. A node (a gradient or a sum) without a partner moves up one level unchanged, so N need
not be a power of two. Over several devices, a reduction takes these steps. All leaves share steps 1
and 3; steps 2 and 4 are made for each dtype.

1. An all-reduce finds the largest entries, by which inner products are scaled.
2. The leaves are concatenated into one vector, which is cut into as many chunks as there are
   devices. An all-to-all sends to each device one chunk of all N gradients.
3. On each level, a device computes squares and inner products of the nodes in its chunk. An
   all-reduce adds these over the chunks, which gives the coefficients that combine the pairs.
4. An all-gather returns the whole result to all devices.

For leaves of one dtype, these are 3 + log2(N) collectives for any number of leaves. They move as
many bytes as one all-reduce of the gradients. Each entry is computed on one device, so all replicas
get the same bits.

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
