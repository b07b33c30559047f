r"""SGPerm: training by permuting weights.

For each weight vector w (the n weights that lead into one output), its initial value range R and
a gradient g:

  m <- momentum_lr g + momentum m       recommendations: increase where m < 0, decrease where m > 0
  subsets of floor(lamda n) weights are drawn; in a subset with k nonzero recommendations
  epsilon = R (alpha + 1 / k)           no weight may change by more
  for each weight, by falling |m|: the nearest cycle of moves, each as its weight recommends and
  within epsilon, is carried out; a weight moves at most once per step

The exact meaning of "nearest", down to ties and roundings, is that of the published program. With
distinct weights the cycle has a closed form: from a weight that wants to increase, the nearest
larger one that wants to decrease and all between (and the mirror image of this), if within epsilon.

Source: Qiu, Suda, "Permute to Train", arXiv:2003.02570, and its program SGPerm.
"""

import itertools
from typing import Any
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _tree
from optax_boost._sgperm import _exact
from optax_boost._sgperm import _fast
from optax_boost._sgperm import _host
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _leaf
from optax_boost._sgperm import _permutation
from optax_boost._sgperm import _schedules
from optax_boost._sgperm import _sharding
from optax_boost._sgperm import _sorting
from optax_boost._sgperm import _states
from optax_boost._sgperm._states import SgpermState

_METHOD = "sgperm"
_MANY = 1 << 20


def sgperm(
  alpha: jax.typing.ArrayLike = 0.2,
  lamda: jax.typing.ArrayLike = 0.1,
  *,
  beta1: jax.typing.ArrayLike = 0.99,
  beta2: jax.typing.ArrayLike = 1.005,
  alpha_min: jax.typing.ArrayLike = 0.01,
  lamda_max: jax.typing.ArrayLike = 0.5,
  momentum_lr: jax.typing.ArrayLike = 0.01,
  momentum: jax.typing.ArrayLike = 0.9,
  partition_size_min: int = 10,
  include_partition_remainder: bool = True,
  method: Literal["exact", "pairs", "rank"] = "exact",
  backend: Literal["auto", "device", "host"] = "auto",
  rounds: int = 32,
  key: jax.Array | int | None = None,
  layout: Literal["flax", "torch"] = "flax",
  fan_in_axes: _base.AxesByPattern | None = None,
  stacked_axes: _base.AxesByPattern | None = None,
  accumulator_dtype: Any = None,
  check: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains by permuting the weights that lead into each output; no value ever changes.

  A whole model is its initial weights, which may come from a seed, and a permutation: see
  :func:`permutation`. Three methods of permuting:

  - ``"exact"``: the published algorithm, weight for weight. Its two executions agree bit for bit:
    on the device, and on the host through ``jax.pure_callback``, faster on a CPU if numba is
    installed (``pip install "optax-boost[host]"``).
  - ``"pairs"``: not the paper's. Drawn pairs of weights swap where that brings them into the order
    of their targets :math:`w - R (\alpha + 1/n)\, m / \max |m|`. No sort, no gather: made for
    accelerators, and many times faster.
  - ``"rank"``: not the paper's. The weights are handed out in the order of those targets.

  It takes plain gradients and returns the difference to the permuted weights: nothing that scales
  updates belongs behind it in a chain, nor weight decay. The state knows the exact weights, and
  each update aims at them, so that with ``optax.apply_updates`` params stay within one rounding of
  them however long the run; :func:`apply_permuted_params` in its place makes params exactly a
  permutation of the initial ones.

  A weight vector is what leads into one output: for Flax all axes but the last, and of a bias the
  whole. Leaves that should not be permuted, such as BatchNorm's, go to another optimizer by
  ``optax.partition``. Vectors of a single weight stay as they are, as do vectors whose weights are
  all alike. A gradient entry that is not finite leaves its recommendation as it was. ``init``
  refuses initial weights that are not finite; inside ``jit`` it can't: no weight is lost, but
  updates that move an infinity are NaN.

  Args:
    alpha: how far a weight may move in one step, as a share of its vector's range, before the
      schedule. Raising it makes larger steps.
    lamda: the size of a subset as a share of its vector, before the schedule. Raising it finds
      more moves and costs more; at 1 there is a single subset. ``"exact"`` only.
    beta1: factor of alpha at the start of each step, at most 1.
    beta2: factor of lamda at the start of each step.
    alpha_min: alpha does not fall below.
    lamda_max: lamda does not rise above.
    momentum_lr: weight of the gradient in the momentum; only its ratio to what is already there
      matters.
    momentum: raising it averages recommendations over more steps.
    partition_size_min: the least size of a subset. Static.
    include_partition_remainder: whether the last subset of a vector takes part, which may be
      smaller than the others.
    method: see above.
    backend: where ``"exact"`` runs. ``"auto"``: on the host if that is a CPU, has numba, and JAX
      sees one device; else on the device. The host kernel gathers sharded leaves on one device.
    rounds: of ``"pairs"``; raising it sorts better, in proportion to the cost. Static.
    key: a key of ``jax.random.key`` or a seed, for subsets and pairs. Not needed for ``"rank"``
      nor where `lamda` is 1.
    layout: where a kernel has its output axis: ``"flax"``, last; ``"torch"``, first.
    fan_in_axes: by regular expression, the axes along a weight vector, for kernels whose layout the
      shape does not tell (``DenseGeneral`` with several output axes). Flax's attention projections
      are known.
    stacked_axes: for leaves that hold many layers, the stacked axes by regular expression.
    accumulator_dtype: of the momentum. None: float32, or float64 for float64 leaves.
    check: whether each update looks if params are the permutation in the state. If not, it raises
      outside ``jit`` and counts `mismatch_count` inside.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Its updates have the
    wider of the dtypes of params and gradients. It takes an extra
    argument `partitions` for replaying recorded ones: a tree like the params, each leaf int32 of
    shape (n, vectors), in each column the vector's positions in their order after the shuffle.

  Raises:
    ValueError: a number is out of range, a name unknown, the key missing; in ``init``: weights that
      are not finite; in ``update``: no params, a tree that does not fit, or, with `check`, params
      that something else changed.
    TypeError: an argument or a leaf is of the wrong kind.

  Examples:
    >>> import jax, jax.numpy as jnp, numpy as np, optax, optax_boost
    >>> params = {"kernel": jax.random.normal(jax.random.key(0), (16, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> y = x @ jax.random.permutation(jax.random.key(2), params["kernel"])
    >>> loss = lambda p: jnp.mean((x @ p["kernel"] - y) ** 2)
    >>> tx = optax_boost.sgperm(alpha=0.2, momentum=0.5, method="rank")
    >>> state = tx.init(params)
    >>> for _ in range(50):
    ...   updates, state = tx.update(jax.grad(loss)(params), state, params)
    ...   params = optax_boost.apply_permuted_params(params, updates, state)
    >>> bool(loss(params) < 0.1 * loss(state.initial))
    True
    >>> same = np.sort(params["kernel"], axis=0) == np.sort(state.initial["kernel"], axis=0)
    >>> bool(same.all())
    True

  References:
    Qiu, Suda, `Permute to Train <https://arxiv.org/abs/2003.02570>`_, 2020.

  .. note::
    The published program orders equal recommendations as an unstable sort happens to leave them;
    here the order is that of a stable sort, reversed. It draws each vector's subsets anew; here
    the vectors of a leaf share one draw, in the order of their weights, and a drawn subset
    keeps equal weights in natural order. Leaves of any rank are permuted.
  """
  bounds: tuple[tuple[str, Any, dict[str, Any]], ...] = (
    ("alpha", alpha, {"minimum": 0.0}),
    ("lamda", lamda, {"positive": True, "maximum": 1.0}),
    ("beta1", beta1, {"positive": True, "maximum": 1.0}),
    ("beta2", beta2, {"positive": True}),
    ("alpha_min", alpha_min, {"minimum": 0.0}),
    ("lamda_max", lamda_max, {"positive": True, "maximum": 1.0}),
    ("momentum_lr", momentum_lr, {"positive": True}),
    ("momentum", momentum, {"minimum": 0.0, "below": 1.0}),
  )
  for name, value, bound in bounds:
    _base.check_number(name, value, **bound)
  _base.check_whole_number("partition_size_min", partition_size_min, static=True)
  _base.check_whole_number("rounds", rounds, static=True)
  _base.check_bool("include_partition_remainder", include_partition_remainder)
  _base.check_bool("check", check)
  if accumulator_dtype is not None:
    _base.check_floating_dtype("accumulator_dtype", accumulator_dtype)
  for name, axes in (("fan_in_axes", fan_in_axes), ("stacked_axes", stacked_axes)):
    _tree.check_axes_by_pattern(name, axes)
  _base.check_name("method", method, ("exact", "pairs", "rank"))
  _base.check_name("backend", backend, ("auto", "device", "host"))
  _base.check_name("layout", layout, ("flax", "torch"))
  schedules = _schedules.Schedules(alpha, lamda, beta1, beta2, alpha_min, lamda_max)
  momentum, momentum_lr = (_schedules.as_float(x) for x in (momentum, momentum_lr))
  draws = method == "pairs" or (method == "exact" and schedules.sizes(_MANY, 1) != (_MANY, _MANY))
  if key is None and draws:
    raise ValueError(
      f"`{_METHOD}` draws {'pairs' if method == 'pairs' else 'subsets'} and needs a `key`; got"
      " none. Pass `key=jax.random.key(...)` or a seed."
    )
  typed_key = _base.as_key("key", 0 if key is None else key)

  @_tree.once_per_tree
  def plan(tree: Any) -> list[_layout.Layout]:
    return _layout.layouts(tree, layout, fan_in_axes, stacked_axes)

  def init_fn(params: optax.Params) -> SgpermState:
    _tree.check_floating(params, _METHOD)
    leaves, structure = jax.tree.flatten(params)
    layouts = plan(params)
    _leaf.check_finite(layouts, leaves, _METHOD)
    spans = [_leaf.ranges_of(lay, x) for lay, x in zip(layouts, leaves, strict=True)]
    ranks = []
    if method != "pairs":
      ranks = [_leaf.ranks_of(lay, x) for lay, x in zip(layouts, leaves, strict=True)]
    beginning = jnp.zeros([], jnp.int32)
    return SgpermState(
      count=beginning,
      alpha=schedules.alpha(beginning).high,
      lamda=schedules.lamda(beginning),
      key=jnp.array(jax.random.key_data(typed_key)),
      momentum=jax.tree.map(lambda p: jnp.zeros_like(p, dtype=_slot_dtype(p)), params),
      initial=_tree.copy_arrays(params),
      permutation=_permutation.identity(params),
      ranks=jax.tree.unflatten(structure, ranks) if method != "pairs" else (),
      ranges=jax.tree.unflatten(structure, spans),
      notfinite_count=jnp.zeros([], jnp.int32),
      mismatch_count=jnp.zeros([], jnp.int32),
    )

  def _slot_dtype(leaf: jax.Array) -> Any:
    return _tree.accumulator_dtype(leaf.dtype) if accumulator_dtype is None else accumulator_dtype

  def random_bits(count: jax.Array, key: jax.Array, found: list[_layout.Layout]) -> list[jax.Array]:
    """What each leaf's step draws, from one draw for all: each is much to compile."""

    def needed(lay: _layout.Layout) -> int:
      if method == "exact":
        return lay.length if schedules.sizes(lay.length, partition_size_min)[0] < lay.length else 0
      return rounds if method == "pairs" else 0

    ends = list(itertools.accumulate((needed(lay) for lay in found), initial=0))
    drawn = jnp.zeros(0, jnp.uint32)
    if ends[-1]:
      step_key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(typed_key))
      drawn = jax.random.bits(jax.random.fold_in(step_key, count), (ends[-1],), jnp.uint32)
    return [drawn[start:end] for start, end in itertools.pairwise(ends)]

  def exact_step(
    count: jax.Array, columns: list[_leaf.Leaf], bits: list[jax.Array], given: list[Any]
  ) -> list[jax.Array]:
    works, sizes = [], []
    for leaf, random, order in zip(columns, bits, given, strict=True):
      length = leaf.layout.length
      if order is None:
        order = _sorting.argsort(random) if random.size else jnp.arange(length)
      subsets = _host.Subsets(
        order=order.astype(jnp.int32),
        size=schedules.size(count, length, partition_size_min),
        brackets=schedules.brackets(count, length).astype(leaf.initial.dtype),
      )
      works.append(leaf.work(subsets))
      sizes.append(schedules.sizes(length, partition_size_min))
    sources = _exact.permute(works, sizes, _exact.resolve(backend), include_partition_remainder)
    pairs = zip(columns, sources, strict=True)
    return [_sorting.gather(leaf.position, source) for leaf, source in pairs]

  def fast_step(count: jax.Array, leaf: _leaf.Leaf, random: jax.Array) -> jax.Array:
    target = leaf.target(schedules.brackets(count, leaf.layout.length)[-1])
    if method == "pairs":
      return _fast.pairs(leaf.params, leaf.position, target, random)
    return _fast.by_rank(target, leaf.ordered())

  def recommend(updates: Any, state: SgpermState) -> tuple[Any, jax.Array]:
    def one(g: jax.Array, m: jax.Array) -> jax.Array:
      return jnp.asarray(momentum_lr * g.astype(m.dtype) + momentum * m, m.dtype)

    new = jax.tree.map(one, updates, state.momentum)
    kept = jax.tree.map(lambda x, m: jnp.where(jnp.isfinite(x), x, m), new, state.momentum)
    return kept, jnp.logical_not(_tree.all_finite(new))

  def update_fn(
    updates: optax.Updates,
    state: SgpermState,
    params: optax.Params | None = None,
    *,
    partitions: Any = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SgpermState]:
    del extra_args
    _base.require_params(params, _METHOD)
    _base.require_state(state, SgpermState, _METHOD)
    _tree.check_same_tree(updates, params, _METHOD)
    _tree.check_floating(updates, _METHOD)
    structure = jax.tree.structure(updates)
    layouts = plan(params)
    _states.check_params(layouts, state.initial, _METHOD)
    if stacked_axes is None and fan_in_axes is None:
      _protocol.announce_layers(_METHOD, [lay.path for lay in layouts if lay.movable])
    mismatch_count = state.mismatch_count
    if check:
      mismatch = _permutation.mismatch(params, state.initial, state.permutation, layouts)
      mismatch_count = _tree.increment_if(mismatch, mismatch_count)
    recommended, bad = recommend(updates, state)
    given = _given_partitions(partitions, updates, layouts)
    moving = [i for i, lay in enumerate(layouts) if lay.movable]
    gradients = jax.tree.leaves(updates)
    trees = (recommended, params, state.initial, state.permutation, state.ranks, state.ranges)
    parts = [jax.tree.leaves(tree) or [None] * len(layouts) for tree in trees]

    def act(
      count: jax.Array, key: jax.Array, given: Any, parts: Any, gradients: Any
    ) -> tuple[list[jax.Array], list[jax.Array]]:
      columns = [_leaf.leaf(layouts[i], *(part[i] for part in parts)) for i in moving]
      bits = random_bits(count, key, [x.layout for x in columns])
      if method == "exact":
        moved = exact_step(count, columns, bits, [given[i] for i in moving])
      else:
        moved = [fast_step(count, *pair) for pair in zip(columns, bits, strict=True)]
      wishes, current, initial = parts[:3]
      permuted = list(parts[3])
      steps = [jnp.zeros_like(g) for g in gradients]
      for i, position in zip(moving, moved, strict=True):
        target, new = _leaf.arranged(layouts[i], initial[i], position)
        steps[i] = _leaf.step(current[i], target, gradients[i].dtype)
        permuted[i] = _sharding.same_as(permuted[i], new, wishes[i])
      return permuted, steps

    act = _sharding.automatic(act, (parts[1], parts[1]))
    permuted, steps = act(state.count, state.key, given, parts, gradients)
    return jax.tree.unflatten(structure, steps), SgpermState(
      count=optax.safe_increment(state.count),
      alpha=schedules.alpha(state.count).high,
      lamda=schedules.lamda(state.count),
      key=state.key,
      momentum=recommended,
      initial=state.initial,
      permutation=jax.tree.unflatten(structure, permuted),
      ranks=state.ranks,
      ranges=state.ranges,
      notfinite_count=_tree.increment_if(bad, state.notfinite_count),
      mismatch_count=mismatch_count,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _given_partitions(
  partitions: Any, updates: Any, layouts: list[_layout.Layout]
) -> list[jax.Array | None]:
  """The partitions to replay, per leaf; None where they are to be drawn."""
  if partitions is None:
    return [None] * len(layouts)
  structure: Any = jax.tree.structure(updates)
  if jax.tree.structure(partitions) != structure:
    raise ValueError(
      f"`partitions` must have the tree structure of the params; got"
      f" {jax.tree.structure(partitions)} for {structure}."
    )
  for lay, order in zip(layouts, jax.tree.leaves(partitions), strict=True):
    dtype = jnp.result_type(order)
    if jnp.shape(order) != (lay.length, lay.vectors) or not jnp.issubdtype(dtype, jnp.integer):
      raise ValueError(
        f"`partitions` must hold integers of shape (n, vectors), for the leaf '{lay.name}'"
        f" {(lay.length, lay.vectors)}; got {dtype} of shape {jnp.shape(order)}."
      )
    _permutation.check_indices(order, lay.length, "partitions", lay.name)
  return [jnp.asarray(order) for order in jax.tree.leaves(partitions)]
