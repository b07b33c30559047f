"""SGPerm and LaPerm: training by permuting weights."""

from optax_boost._sgperm._laperm import laperm as laperm
from optax_boost._sgperm._permutation import LapermState as LapermState
from optax_boost._sgperm._permutation import SgpermState as SgpermState
from optax_boost._sgperm._permutation import apply_permutation as apply_permutation
from optax_boost._sgperm._permutation import apply_permuted_params as apply_permuted_params
from optax_boost._sgperm._permutation import permutation as permutation
from optax_boost._sgperm._permutation import permuted_params as permuted_params
from optax_boost._sgperm._storage import load_permuted_params as load_permuted_params
from optax_boost._sgperm._storage import save_permuted_params as save_permuted_params
from optax_boost._sgperm._transform import sgperm as sgperm
