"""Training in the subspace in which the weights move: trajectory, subspace, transformation."""

from optax_boost._dim_reduce._checkpoints import CheckpointSnapshots as CheckpointSnapshots
from optax_boost._dim_reduce._checkpoints import checkpoint_snapshots as checkpoint_snapshots
from optax_boost._dim_reduce._fit import fit_subspace as fit_subspace
from optax_boost._dim_reduce._fit import fit_subspace_streamed as fit_subspace_streamed
from optax_boost._dim_reduce._state import DimReduceState as DimReduceState
from optax_boost._dim_reduce._state import refresh_subspace as refresh_subspace
from optax_boost._dim_reduce._storage import load_subspace as load_subspace
from optax_boost._dim_reduce._storage import save_subspace as save_subspace
from optax_boost._dim_reduce._subspace import Subspace as Subspace
from optax_boost._dim_reduce._trajectory import TrajectoryState as TrajectoryState
from optax_boost._dim_reduce._trajectory import record_trajectory as record_trajectory
from optax_boost._dim_reduce._trajectory import snapshots as snapshots
from optax_boost._dim_reduce._transform import dim_reduce as dim_reduce
