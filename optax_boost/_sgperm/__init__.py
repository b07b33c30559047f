"""SGPerm and LaPerm: training by permuting weights."""

from optax_boost._sgperm._laperm import laperm
from optax_boost._sgperm._permutation import LapermState
from optax_boost._sgperm._permutation import SgpermState
from optax_boost._sgperm._permutation import apply_permutation
from optax_boost._sgperm._permutation import apply_permuted_params
from optax_boost._sgperm._permutation import permutation
from optax_boost._sgperm._permutation import permuted_params
from optax_boost._sgperm._storage import load_permuted_params
from optax_boost._sgperm._storage import save_permuted_params
from optax_boost._sgperm._transform import sgperm

__all__ = [
  "LapermState",
  "SgpermState",
  "apply_permutation",
  "apply_permuted_params",
  "laperm",
  "load_permuted_params",
  "permutation",
  "permuted_params",
  "save_permuted_params",
  "sgperm",
]
