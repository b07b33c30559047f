r"""AdaSum: sums orthogonal gradients of replicas, averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

and for N of them a binary tree, neighbours first: (0, 1), (2, 3), ..., then the results of these
pairs. A node without a partner passes up a level, so N need not be a power of two.

Every node of the tree is a linear combination of the N gradients, and every inner product in it
follows from their Gram matrix. So the tree is never walked with vectors:

  s           a power of two, at most the largest entry of a group of leaves on any replica
  G  (N, N)   Gram matrix of the group's gradients g_1 ... g_N, divided by s: <g_i, g_j> / s^2
  C  (K, N)   the K nodes of a level as combinations of g_1 ... g_N; C = I at the leaves
  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

Between devices: the largest entries are compared (all-reduce), chunks change owners (all-to-all),
each device adds its chunk's part of G to the others' parts (all-reduce), combines its chunk, and
the chunks are gathered. That moves the bytes of an all-reduce, in four collectives for any N and
any number of leaves. Each entry is computed on one device only, so all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from optax_boost._adasum._transform import AdasumState as AdasumState
from optax_boost._adasum._transform import adasum as adasum
from optax_boost._adasum._transform import adasum_reduce as adasum_reduce
from optax_boost._adasum._transform import check_not_summed as check_not_summed
