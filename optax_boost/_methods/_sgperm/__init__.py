"""SGPerm and LaPerm: training by permuting weights.

Modules:

  _sgperm           the arguments of SGPerm, its state and its step
  _laperm           LaPerm: free steps of an inner optimizer, and every few steps a permutation
  _weight_vectors   which axes of a leaf make up a weight vector; which leaves are permuted
  _schedules        alpha, lamda and the size of a subset in each step
  _device_search    the method "exact" on the device
  _host_search      the method "exact" on the host, in NumPy or numba
  _pairs_and_ranks  the methods "pairs" and "rank"
  _execution        runs a method on all leaves, in blocks of weight vectors and across devices
  _sorting          stable sorts that are fast on CPUs
  _exact_params     params after a step exactly, not by one rounding
  _permuted_params  the trained model: exact params, the permutation, and its file
"""

from optax_boost._methods._sgperm._laperm import laperm as laperm
from optax_boost._methods._sgperm._permuted_params import (
  PermutedParams as PermutedParams,
  permuted_params as permuted_params,
)
from optax_boost._methods._sgperm._sgperm import sgperm as sgperm
