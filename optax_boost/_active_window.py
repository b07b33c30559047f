"""Block-coordinate training: a window of the layers trains at a time, and only it has moments.

With L layers, a window of w and an inner optimizer whose state is as large as m leaves of the
params, the state takes m w / L of the layers' size. When the window moves, the inner optimizer
starts anew on the layers that are active now. Leaves of no layer (embedding, head) always train,
with a state of their own.
"""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _conditional
from optax_boost import _jaxpr
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _tree

_METHOD = "active_window"
_ORDERS = ("forward", "backward", "random")
# Of the whole params, which the inner optimizer does not see.
_OF_ALL_LAYERS = ("grad", *_masking.CLOSURES)


@_protocol.declares(
  metrics=("active_window/first_layer",),
  steps=("made_count",),
  parts=("active_state", "always_state"),
)
class ActiveWindowState(NamedTuple):
  """State of :func:`active_window`.

  Attributes:
    count: scalar int32, steps since the window moved.
    moves: scalar int32, how often it has moved.
    made_count: scalar int32, calls of ``update`` in which the inner optimizer made a step.
    layers: int32 [window], the layers that train, ascending.
    active_state: the inner optimizer's state for these: of stacked layers `window` slices, of
      others in the places of the first `window` layers.
    always_state: its state for the leaves of no layer.
  """

  count: jax.Array  # type: ignore[assignment]  # tuples have a method of this name
  moves: jax.Array
  made_count: jax.Array
  layers: jax.Array
  active_state: optax.OptState
  always_state: optax.OptState

  @property
  def first_layer(self) -> jax.Array:
    """The first of the layers that train."""
    return self.layers[0]


def active_window(
  inner: optax.GradientTransformation,
  layers: _base.AxesByPattern | Sequence[str],
  window: int,
  every: jax.typing.ArrayLike,
  *,
  order: Literal["forward", "backward", "random"] = "forward",
  key: jax.Array | int = 0,
) -> optax.GradientTransformationExtraArgs:
  """Trains a window of the layers at a time, with optimizer state for these alone.

  For fine-tuning where the optimizer's moments don't fit: what it buys is memory. At equal steps
  the loss is usually worse than that of training all layers.

  Args:
    inner: the optimizer. It starts anew when the window moves, its schedules and step counts, too:
      put a schedule after it, ``optax.chain(active_window(optax.scale_by_adam(), ...),
      optax.scale_by_learning_rate(schedule))``. It works on the active layers and on the leaves of
      no layer apart, so a clip by the global norm goes before, too. It may be a wrapper itself.
    layers: where the layers are. For models that scan over their layers, the result of
      :func:`stacked_axes`: the stacked axis by regular expression; of several, the first counts.
      Else regular expressions, one for each layer in order, as ``("block_0/", "block_1/")``: layers
      must be of equal shapes. All other leaves always train.
    window: how many layers train at a time; raising it costs memory and trains more. Static.
    every: steps after which the window moves. Raising it gives moments more time to warm up.
    order: ``"forward"``: from the first layers to the last, window by window, then from the start;
      where the number of layers is no multiple, the last window reaches back. ``"backward"``: from
      the last to the first. ``"random"``: so many layers drawn at each move.
    key: the seed of ``"random"``, or a key.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs`. Updates of inactive layers are zero. Of the
    extra arguments `inner` sees all but closures of the params and `grad`.

  Raises:
    ValueError: a number is out of range, `order` unknown, `layers` empty; in ``init``: there are
      fewer layers than the window holds, they differ in shape, or `inner` holds an
      :func:`average_params`.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"blocks": jnp.zeros((4, 2)), "head": jnp.zeros(2)}
    >>> tx = optax_boost.active_window(optax.adam(0.1), {"blocks": 0}, window=1, every=2)
    >>> state = tx.init(params)
    >>> state.active_state[0].mu["blocks"].shape
    (1, 2)
    >>> grads = {"blocks": jnp.ones((4, 2)), "head": jnp.ones(2)}
    >>> for _ in range(3):
    ...   updates, state = tx.update(grads, state, params)
    ...   print(int(state.layers[0]), [bool(row.any()) for row in updates["blocks"]])
    0 [True, False, False, False]
    0 [True, False, False, False]
    1 [False, True, False, False]

  References:
    Luo et al., `BAdam <https://arxiv.org/abs/2404.02827>`_, 2024 (in order); Pan et al., `LISA
    <https://arxiv.org/abs/2403.17919>`_, 2024 (random, embedding and head always).
  """
  inner = _base.check_transformation("inner", inner)
  _check_layers(layers)
  _base.check_whole_number("window", window, static=True)
  _base.check_whole_number("every", every)
  _base.check_name("order", order, _ORDERS)
  seed = _base.as_key("key", key)
  window = int(window)
  find = _tree.once_per_tree(lambda tree: _Layers(tree, layers, window))

  def layers_at(moves: jax.Array, number: int) -> jax.Array:
    if order == "random":
      drawn = jax.random.permutation(jax.random.fold_in(seed, moves), number)[:window]
      return jnp.sort(drawn).astype(jnp.int32)
    windows = -(-number // window)
    place = moves % windows
    if order == "backward":
      place = windows - 1 - place
    return jnp.minimum(place * window, number - window) + jnp.arange(window, dtype=jnp.int32)

  def init_fn(params: optax.Params) -> ActiveWindowState:
    _tree.check_inexact(params, _METHOD)
    found = find(params)
    moves = jnp.zeros([], jnp.int32)
    first = layers_at(moves, found.number)
    # Of patterns that match nothing anywhere it warns here.
    jax.eval_shape(_jaxpr.anew(inner.init), params)
    with _tree.seeing_a_part():
      always_state = inner.init(found.rest(params))
      active_state = inner.init(found.take(params, first))
    _protocol.refuse_observers(_METHOD, always_state)
    return ActiveWindowState(
      count=jnp.zeros([], jnp.int32),
      moves=moves,
      made_count=jnp.zeros([], jnp.int32),
      layers=first,
      active_state=active_state,
      always_state=always_state,
    )

  def update_fn(
    updates: optax.Updates,
    state: ActiveWindowState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ActiveWindowState]:
    _base.require_state(state, ActiveWindowState, _METHOD)
    _tree.check_inexact(updates, _METHOD)
    if params is not None:
      _tree.check_same_tree(updates, params, _METHOD)
    found = find(updates)
    extra = {name: value for name, value in extra_args.items() if name not in _OF_ALL_LAYERS}
    moving = state.count >= every
    moves = _arrays.increment_if(moving, state.moves)
    active = jnp.where(moving, layers_at(moves, found.number), state.layers)
    of_layers = None if params is None else found.take(params, active)

    def begin(kept: optax.OptState) -> optax.OptState:
      like = found.take(updates, active) if of_layers is None else of_layers
      begun = _conditional.cast_like(inner.init(like), kept)
      return jax.tree.map(_conditional.vary, begun, jax.tree.map(jax.typeof, kept))

    others = None if params is None else found.rest(params)
    with _tree.seeing_a_part():
      begun = _conditional.cond(moving, begin, lambda kept: kept, state.active_state)
      moved, active_state = inner.update(found.take(updates, active), begun, of_layers, **extra)
      rest, always_state = inner.update(found.rest(updates), state.always_state, others, **extra)
    made = _protocol.step_made(begun, active_state)
    if jax.tree.leaves(rest):
      made = made | _protocol.step_made(state.always_state, always_state)
    return found.put(updates, moved, active, rest), ActiveWindowState(
      count=jnp.where(moving, 1, state.count + 1).astype(jnp.int32),
      moves=moves,
      made_count=_arrays.increment_if(made, state.made_count),
      layers=active,
      active_state=_conditional.cast_like(active_state, state.active_state),
      always_state=_conditional.cast_like(always_state, state.always_state),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_layers(layers: Any) -> None:
  if isinstance(layers, Mapping):
    _tree.check_axes_by_pattern("layers", layers)
    if not jax.tree.leaves(dict(layers)):
      raise ValueError(
        f"`layers` must name at least one axis of layers; got {_base.shorten(dict(layers))}."
        " `stacked_axes` returns {} where the loss scans over no layers: name the layers by regular"
        ' expressions then, one for each, as ("block_0/", "block_1/").'
      )
    return
  words = "what `stacked_axes` returned, or a sequence of regular expressions, one per layer"
  _base.check_patterns("layers", layers, words)


class _Layers:
  """Where a tree has its layers: along an axis of each leaf, or in leaves of their own.

  The inner optimizer sees a tree of the same structure, and leaves of their rank. Layers in leaves
  of their own are in the places of the first `window` layers.
  """

  def __init__(self, tree: Any, layers: Any, window: int):
    self._axes: dict[int, int] = {}  # by leaf
    self._members: list[tuple[int, ...]] = []  # leaves that correspond, one of each layer
    leaves = _tree.describe(tree)
    find = self._find_axes if isinstance(layers, Mapping) else self._find_members
    self.number = find(leaves, layers) or window
    if self.number < window:
      raise ValueError(
        f"`active_window` has a window of {window} layers, but the params have {self.number}. Pass"
        f" window={self.number} or less."
      )
    self._inside = {i for members in self._members for i in members} | set(self._axes)

  def _find_axes(self, leaves: list[_tree.Leaf], patterns: Any) -> int:
    found = _tree.axes_by_pattern(leaves, patterns, "layers", ascending=False)
    self._axes = {i: axes[0] for i, axes in enumerate(found) if axes}
    sizes = {leaves[i].shape[axis]: leaves[i].path for i, axis in self._axes.items()}
    if len(sizes) > 1:
      shown = ", ".join(f"{size} in '{path}'" for size, path in sizes.items())
      raise ValueError(
        f"`active_window` needs leaves that hold the same number of layers; got {shown}. Name those"
        " of one stack in `layers`; all others always train."
      )
    return next(iter(sizes), 0)

  def _find_members(self, leaves: list[_tree.Leaf], patterns: Sequence[str]) -> int:
    matches = _tree.first_match("layers", patterns, [leaf.path for leaf in leaves])
    numbers = sorted({match for match in matches if match is not None})
    layers = [[i for i, match in enumerate(matches) if match == n] for n in numbers]
    shapes = [[leaves[i].shape for i in layer] for layer in layers]
    for number, found in zip(numbers, shapes, strict=True):
      if found != shapes[0]:
        raise ValueError(
          f"`active_window` needs layers of equal shapes; got {shapes[0]} for"
          f" {patterns[numbers[0]]!r} and {found} for {patterns[number]!r}. Leave out of `layers`"
          " what differs: it always trains."
        )
    self._members = list(zip(*layers, strict=True))
    return len(layers)

  def take(self, tree: Any, layers: jax.Array) -> Any:
    """The given layers of a tree, leaves of no layer hidden."""
    leaves, structure = jax.tree.flatten(tree)
    taken: list[Any] = [optax.MaskedNode()] * len(leaves)
    for i, axis in self._axes.items():
      taken[i] = jnp.take(_arrays.gather_axes(leaves[i], (axis,)), layers, axis)
    for members in self._members:
      stack = jnp.take(jnp.stack([leaves[member] for member in members]), layers, 0)
      for member, x in zip(members, jnp.unstack(stack), strict=False):
        taken[member] = x
    return _tree.unboxed(jax.tree.unflatten(structure, taken))

  def rest(self, tree: Any) -> Any:
    """The leaves of no layer, the others hidden."""
    leaves, structure = jax.tree.flatten(tree)
    kept = [optax.MaskedNode() if i in self._inside else x for i, x in enumerate(leaves)]
    return jax.tree.unflatten(structure, kept)

  def put(self, like: Any, moved: Any, layers: jax.Array, rest: Any) -> Any:
    """Updates of the whole tree, zero where a layer is not among the given ones."""
    structure: Any
    leaves, structure = jax.tree.flatten(_tree.unboxed(like))
    of_layers, others = (structure.flatten_up_to(_tree.unboxed(x)) for x in (moved, rest))

    def place(zeros: jax.Array, index: Any, x: jax.Array) -> jax.Array:
      return zeros.at[index].set(x, indices_are_sorted=True, unique_indices=True)

    for i, axis in self._axes.items():
      index = (*[slice(None)] * axis, layers)
      zeros = jnp.zeros_like(_arrays.gather_axes(leaves[i], (axis,)), of_layers[i].dtype)
      placed = place(zeros, index, of_layers[i])
      others[i] = _arrays.place_by(placed, jax.typeof(leaves[i]).sharding)
    for members in self._members:
      active = jnp.stack([of_layers[member] for member in members[: len(layers)]])
      zeros = jnp.stack([jnp.zeros_like(active[0])] * self.number)
      for member, x in zip(members, jnp.unstack(place(zeros, layers, active)), strict=True):
        others[member] = x
    return jax.tree.unflatten(jax.tree.structure(like), others)
