"""SGPerm and LaPerm: training by permuting weights."""

from optax_boost._methods._sgperm._laperm import laperm as laperm
from optax_boost._methods._sgperm._permuted_params import (
  PermutedParams as PermutedParams,
  permuted_params as permuted_params,
)
from optax_boost._methods._sgperm._sgperm import sgperm as sgperm
