"""Training in the subspace of the weight trajectory."""

from optax_boost.dim_reduce._refresh import refresh_subspace
from optax_boost.dim_reduce._state import DimReduceState
from optax_boost.dim_reduce._subspace import Subspace
from optax_boost.dim_reduce._transform import dim_reduce

__all__ = ["DimReduceState", "Subspace", "dim_reduce", "refresh_subspace"]
