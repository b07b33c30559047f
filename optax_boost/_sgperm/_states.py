"""The states of SGPerm and LaPerm."""

from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost import _protocol


@_protocol.declares(metrics=("sgperm/notfinite_count",), exact=("permuted_params",))
class SgpermState(NamedTuple):
  """State of :func:`sgperm`: four copies of the params, three with ``method="pairs"``.

  Attributes:
    count: scalar int32, the number of steps made.
    alpha: scalar, the last step's alpha.
    lamda: scalar, the last step's lamda.
    key: raw key data, from which each step draws its subsets or pairs.
    momentum: the recommendations, in at least float32.
    permuted_params: the exact params after the last step; they share no memory with the params.
    permutation: int32 of the params' shapes: for each entry of a leaf, which entry of the raveled
      initial leaf it holds now.
    ranks: int32 of the params' shapes: the weights' ranks in their vectors; ``()`` with
      ``method="pairs"``.
    ranges: per leaf (1, vectors), the weight vectors' initial ranges.
    notfinite_count: scalar int32, the steps with a gradient entry that was not finite.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  alpha: jax.Array
  lamda: jax.Array
  key: jax.Array
  momentum: optax.Updates
  permuted_params: optax.Params
  permutation: Any
  ranks: Any
  ranges: Any
  notfinite_count: jax.Array


@_protocol.declares(exact=("permuted_params",))
class LapermState(NamedTuple):
  """State of :func:`laperm`: three copies of the params and the inner state.

  Leaves that are excluded are ``optax.MaskedNode()`` in the three trees.

  Attributes:
    count: scalar int32, the number of inner steps made.
    synced: scalar bool, whether the last of them ended in a permutation.
    permuted_params: the exact params of the last synchronization.
    permutation: as in :func:`sgperm`'s state, of the last synchronization.
    ranks: the ranks of `permuted_params` in their weight vectors.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  synced: jax.Array
  permuted_params: optax.Params
  permutation: Any
  ranks: Any
  inner_state: optax.OptState
