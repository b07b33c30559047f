"""Training in the subspace in which the weights move: trajectory, subspace, transformation."""

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
from optax_boost._methods._dim_reduce._transform import dim_reduce as dim_reduce
