"""Training in the subspace in which the weights move: trajectory, subspace, transformation."""

from optax_boost._dim_reduce._checkpoints import CheckpointSnapshots
from optax_boost._dim_reduce._checkpoints import checkpoint_snapshots
from optax_boost._dim_reduce._fit import fit_subspace
from optax_boost._dim_reduce._fit_streamed import fit_subspace_streamed
from optax_boost._dim_reduce._refresh import refresh_subspace
from optax_boost._dim_reduce._state import DimReduceState
from optax_boost._dim_reduce._storage import load_subspace
from optax_boost._dim_reduce._storage import save_subspace
from optax_boost._dim_reduce._subspace import Subspace
from optax_boost._dim_reduce._trajectory import TrajectoryState
from optax_boost._dim_reduce._trajectory import record_trajectory
from optax_boost._dim_reduce._trajectory import snapshots
from optax_boost._dim_reduce._transform import dim_reduce

__all__ = [
  "CheckpointSnapshots",
  "DimReduceState",
  "Subspace",
  "TrajectoryState",
  "checkpoint_snapshots",
  "dim_reduce",
  "fit_subspace",
  "fit_subspace_streamed",
  "load_subspace",
  "record_trajectory",
  "refresh_subspace",
  "save_subspace",
  "snapshots",
]
