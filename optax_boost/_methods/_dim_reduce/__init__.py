"""Training in the subspace of the params in which earlier training has moved them.

Modules:

  _trajectory       records snapshots of the params while training
  _snapshot_blocks  reads snapshots in blocks, from a state, a tree, a list or an iterable
  _fit              fits a subspace to snapshots
  _pca              computes principal components of snapshots that are read in blocks
  _subspace         the subspace, and its file
  _dim_reduce       the arguments, the step and its line search
  _state            the state, and how its subspace is replaced
  _quasi_newton     BFGS, and the lengths that a line search tries
  _groups           which leaves and layers form a group with a subspace of its own
  _linalg           products and combinations of trees
  _flax_boxes       takes arrays out of the variables of NNX and the metadata of Linen
"""

from optax_boost._methods._dim_reduce._dim_reduce import dim_reduce as dim_reduce
from optax_boost._methods._dim_reduce._fit import fit_subspace as fit_subspace
from optax_boost._methods._dim_reduce._state import (
  DimReduceState as DimReduceState,
  refresh_subspace as refresh_subspace,
)
from optax_boost._methods._dim_reduce._subspace import Subspace as Subspace
from optax_boost._methods._dim_reduce._trajectory import (
  TrajectoryState as TrajectoryState,
  record_trajectory as record_trajectory,
  snapshots as snapshots,
)
