r"""AdaSum: sums orthogonal gradients of replicas, averages their common part.

For two gradients a, b of one leaf:

  adasum(a, b) = a (1 - <a, b> / (2 |a|^2)) + b (1 - <a, b> / (2 |b|^2))

and for N of them a binary tree, neighbours first: (0, 1), (2, 3), ..., then the results of those.
A node without a partner passes up a level, so N need not be a power of two.

Every node of the tree is a linear combination of the N gradients, and every inner product in it
follows from their Gram matrix. So the tree is never walked with vectors:

  a  (N,)     powers of two, a[r] bounds the entries of the r-th gradient, g_r = a[r] y_r
  G  (N, N)   Gram matrix of a group of leaves, <y_r, y_s> in two float32 words (one float64)
  C  (K, N)   the K nodes of a level as combinations of y_1 ... y_N; C = I at the leaves
  H  (K, K)   Gram matrix of the nodes, H = C G C'
  m  (K,)     powers of two; node k is m[k] C[k] y
  x  (D, M)   all leaves of a device as one vector, cut into D chunks of M entries, one per device

A pair of nodes A, B becomes one node with m = max(m_A, m_B) and

  C = (m_A / m - m_B / m <A, B> / (2 |A|^2)) C_A + (m_B / m - m_A / m <A, B> / (2 |B|^2)) C_B

Where nodes cancel, |A|^2 is a small difference of entries of G: in single float32 words the error
would grow with the square of the cancellation.

Between devices: chunks change owners (all-to-all, the powers of two travel along), each device adds
the part of G that its chunk holds to the others' (all-reduce of 2 N x N numbers per group),
combines its chunk, and the chunks are gathered. That moves the bytes of an all-reduce, in three
collectives for any N and any number of leaves; and since each entry is computed on one device only,
all replicas get the same bits.

Source: Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924.
"""

from optax_boost._adasum._transform import AdasumState as AdasumState
from optax_boost._adasum._transform import adasum as adasum
from optax_boost._adasum._transform import adasum_pair as adasum_pair
from optax_boost._adasum._transform import adasum_reduce as adasum_reduce
from optax_boost._adasum._transform import check_not_summed as check_not_summed
