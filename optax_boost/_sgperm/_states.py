"""The states of the two methods, and how they are found in an optimizer state."""

from typing import Any
from typing import NamedTuple

import jax
import optax

from optax_boost import _protocol
from optax_boost import _tree


@_protocol.declares(metrics=("sgperm/notfinite_count",))
class SgpermState(NamedTuple):
  """State of :func:`sgperm`: four copies of the params, three with ``method="pairs"``.

  Attributes:
    count: scalar int32, the number of steps made.
    alpha: scalar, the last step's alpha.
    lamda: scalar, the last step's lamda.
    key: raw key data, from which each step draws its subsets or pairs.
    momentum: the recommendations, in at least float32.
    initial: a copy of the initial params.
    permutation: int32 of the params' shapes: for each entry of a leaf, which entry of the raveled
      initial leaf it holds now. See :func:`permutation`.
    ranks: int32 of the params' shapes: the initial entries' ranks in their weight vectors; ``()``
      with ``method="pairs"``.
    ranges: per leaf (1, vectors), the weight vectors' initial ranges.
    notfinite_count: scalar int32, the steps with a gradient entry that was not finite.
    mismatch_count: scalar int32, with ``check=True`` the steps whose params were not the
      permutation that this state holds.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  alpha: jax.Array
  lamda: jax.Array
  key: jax.Array
  momentum: optax.Updates
  initial: optax.Params
  permutation: Any
  ranks: Any
  ranges: Any
  notfinite_count: jax.Array
  mismatch_count: jax.Array


class LapermState(NamedTuple):
  """State of :func:`laperm`: three copies of the params beside the inner state.

  Leaves that are excluded are ``optax.MaskedNode()`` in the three trees.

  Attributes:
    count: scalar int32, the number of inner steps made.
    synced: scalar bool, whether the last of them ended in a permutation.
    initial: as in :class:`SgpermState`.
    permutation: as there, of the last synchronization.
    ranks: as there.
    inner_state: the inner optimizer's state.
  """

  count: jax.Array  # type: ignore[assignment]  # hides the method of tuples
  synced: jax.Array
  initial: optax.Params
  permutation: Any
  ranks: Any
  inner_state: optax.OptState


def find(opt_state: Any, function: str) -> SgpermState | LapermState:
  """The only state of the two methods in an optimizer state, found by its type."""
  kinds: tuple[Any, ...] = (SgpermState, LapermState)
  states = [state for kind in kinds for state in _tree.find_states(opt_state, kind)]
  if len(states) != 1:
    raise ValueError(
      f"`{function}` needs a state with exactly one of `sgperm` and `laperm` in it; got"
      f" {len(states)}. Pass the part of the optimizer state that belongs to one of them."
    )
  return states[0]
