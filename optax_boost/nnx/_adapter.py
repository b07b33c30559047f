"""An NNX model as a pure loss ``loss(params, model_state, batch, rng)`` with its arrays.

The train step, groups of layers and stacked axes stand on it.
"""

from collections.abc import Callable
from typing import Any
from typing import NamedTuple

from flax import nnx
import jax

from optax_boost import _base
from optax_boost import _train_step

# Before flax 0.12.7 it was called `pure`, a name that warns since.
as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure
# Seeds the masks of a full pass. They differ from pass to pass all the same: the key only moves the
# model's own rng streams.
PASS_SEED = 0

# Of a model and the rngs of a call, the arrays that are not trained. The first bears the name by
# which `hold_frozen_statistics` knows a collection.
_COLLECTIONS = ("batch_stats", "rngs")


class Keyed(NamedTuple):
  """The batch of a step that is called with a key; a full pass has batches without this mark."""

  batch: Any


def pure_loss(
  loss_fn: Callable[..., Any],
  graphdef: Any,
  wrt: Any,
  *,
  has_aux: bool = False,
  has_rngs: bool = False,
  has_key: bool = False,
) -> Callable[..., Any]:
  """From ``loss_fn(model, batch[, rng])`` to the pure loss that returns the new state, too."""

  def loss(params: Any, model_state: Any, batch: Any, rng: jax.Array | None = None) -> Any:
    # A model of its own for every call: its changes in the forward pass (statistics, rng
    # counts) are read off afterwards, and a trial point's changes are dropped with it.
    model, rngs = merge(graphdef, params, model_state, has_rngs)
    if isinstance(batch, Keyed):
      batch = batch.batch
    elif rng is not None:
      advance((model, rngs) if has_rngs else model, jax.random.bits(rng))
    check_batch(batch)
    drawn_from = rngs if has_rngs else rng
    rng_args = (drawn_from,) if has_rngs or has_key else ()
    output = loss_fn(model, batch, *rng_args)
    return _train_step.with_model_state(output, split(model, wrt, rngs)[2], has_aux)

  return loss


def split(model: Any, wrt: Any, rngs: Any = None) -> tuple[Any, Any, Any]:
  """The structure, the trained arrays and all others, for :func:`merge`.

  Streams that both the model and `rngs` hold stay one.
  """
  if rngs is None:
    graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
    return graphdef, as_pure(params), as_pure(rest)
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, params, rest = nnx.split(  # type: ignore[misc]
    (model, rngs), lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  params, rest = as_pure(params), as_pure(rest)
  # The params bear the paths that they have in the model alone.
  collections = {name: rest[i] for i, name in enumerate(_COLLECTIONS) if i in rest}
  return graphdef, params.get(0, params), collections


def merge(graphdef: Any, params: Any, rest: Any, has_rngs: bool) -> tuple[Any, Any]:
  """The inverse of :func:`split`: a new model, and new rngs or None."""
  if has_rngs:
    return nnx.merge(graphdef, *_states_of_pair(params, rest))
  return nnx.merge(graphdef, params, rest), None


def write(model: Any, rngs: Any, params: Any, rest: Any) -> None:
  """Puts the arrays of :func:`split` into a model and rngs, by their paths."""
  if rngs is None:
    nnx.update(model, params, rest)
  else:
    nnx.update((model, rngs), *_states_of_pair(params, rest))


def _states_of_pair(params: Any, collections: Any) -> tuple[nnx.State, nnx.State]:
  rest = {i: collections[name] for i, name in enumerate(_COLLECTIONS) if name in collections}
  return nnx.State({0: params}), nnx.State(rest)


def advance(model: Any, by: jax.Array) -> None:
  """Moves all of a model's rng streams ahead, so that it draws other masks."""
  counts = nnx.state(model, nnx.RngCount)
  nnx.update(model, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def check_model(model: Any) -> None:
  """Refuses trees without an NNX module or variable."""
  nodes = [] if isinstance(model, type) else jax.tree.leaves(model, is_leaf=_is_nnx)
  if not any(map(_is_nnx, nodes)):
    raise TypeError(
      f"`model` must be an NNX module, as `nnx.Linear(2, 1, rngs=nnx.Rngs(0))`; got"
      f" {_base.shorten(model)}. For Linen modules there is `optax_boost.linen`."
    )


def check_batch(batch: Any) -> None:
  """Refuses NNX objects in a batch; called while tracing, so it costs a step nothing."""
  node = next(filter(_is_nnx, jax.tree.leaves(batch, is_leaf=_is_nnx)), None)
  if node is not None:
    raise TypeError(
      f"`batch` must hold arrays only; it holds an nnx.{type(node).__name__}. Its changes would"
      " be lost. Pass `nnx.Rngs` as the argument `rng`: step(model, optimizer, batch, rngs) calls"
      " loss_fn(model, batch, rngs)."
    )


def _is_nnx(node: Any) -> bool:
  return isinstance(node, nnx.Module | nnx.Variable | nnx.Rngs | nnx.RngStream)
