r"""SGPerm: training by permuting weights.

For each weight vector w (the n weights that lead into one output), its value range R and a
gradient g:

  m <- momentum_lr g + momentum m       recommendations: increase where m < 0, decrease where m > 0
  epsilon = R (alpha + 1 / k)           the bound on the change of a weight, in a subset of w with
                                        k nonzero recommendations

A step divides w into random subsets of floor(lamda n) weights. In each subset, for each weight by
falling |m|, it makes the nearest cycle of moves in which each weight moves as recommended and by at
most epsilon. A weight moves at most once per step.

SGPerm.py is the program of the paper, arXiv:2003.02570. The nearest cycle is the cycle that
SGPerm.py finds, even if weights are equal or sums are rounded. If the weights are distinct, the
cycle has a closed form: a weight that wants to increase, the nearest larger weight that wants to
decrease, and all weights between the two, if all moves are within epsilon. A weight that wants to
decrease starts the mirror image of such a cycle.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Literal, NamedTuple
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _finiteness, _protocol, _transformation
from optax_boost._foundation import _arrays, _checks, _placement, _trees, _types
from optax_boost._methods._sgperm import (
  _device_search,
  _exact_params,
  _execution,
  _host_search,
  _pairs_and_ranks,
  _permuted_params,
  _schedules,
  _sorting,
  _weight_vectors,
)
from optax_boost._trace import _layer_axes

_METHOD = "sgperm"


@_protocol.declares(
  metrics=("sgperm/notfinite_count",), exact=("permuted_params",), takes=("layers",)
)
class SgpermState(NamedTuple):
  """State of :func:`sgperm`: three copies of the params, four with ``method="rank"``.

  Attributes:
    count: scalar int32, the number of steps made.
    alpha: scalar float, alpha in the last step.
    lamda: scalar float, lamda in the last step.
    key: raw key data, from which each step draws its subsets or pairs.
    momentum: the recommendations, in at least float32.
    permuted_params: the exact params after the last step; they share no memory with the params.
    permutation: int32 of the params' shapes: for each entry of a leaf the index that the entry's
      value had in the raveled initial leaf.
    ranks: with ``method="rank"`` int32 of the params' shapes: the ranks of the weights in their
      vectors; else ``()``.
    ranked_axes: scalar int32, a checksum of the fan-in axes of all leaves in the last step. If it
      changes, `ranks` are computed again. 0 before the first step.
    notfinite_count: scalar int32, the number of steps in which a gradient entry was not finite.
  """

  count: _types.IntScalar  # type: ignore[assignment]  # hides the method of tuples
  alpha: _types.FloatScalar
  lamda: _types.FloatScalar
  key: jax.Array
  momentum: optax.Updates
  permuted_params: optax.Params
  permutation: optax.Params
  ranks: optax.Params
  ranked_axes: _types.IntScalar
  notfinite_count: _types.IntScalar

  def exact_params(
    self, new: optax.Params, params: optax.Params, updates: optax.Updates
  ) -> optax.Params:
    """Returns `new`, which is params plus updates, exactly as it is after the step."""
    return _exact_params.exact_params(new, params, updates, self.permuted_params)


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
  key: jax.Array | int | None = None,
  layout: Literal["flax", "torch"] = "flax",
  layers: _layer_axes.LayerAxes | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains by permuting the weights that lead into each output; no value ever changes.

  A trained model is its initial weights, which a seed can reproduce, and a permutation:
  see :class:`PermutedParams`. There are three methods of permuting:

  - ``"exact"``: the published algorithm, weight for weight. It gives the same bits on the device
    and on the host; on a CPU the host is faster if numba is installed (``pip install ".[host]"`` in
    a clone).
  - ``"pairs"``, which is not in the paper: random pairs of weights swap if this brings them into
    the order of their targets :math:`w - R (\alpha + 1/n)\, m / \max |m|`, with the range :math:`R`
    of the vector's :math:`n` weights and the momentum :math:`m`. This needs no sort and is many
    times faster.
  - ``"rank"``, which is not in the paper: the position with the r-th smallest target gets the r-th
    smallest weight.

  `sgperm` takes plain gradients and returns the permuted weights minus the params, so no scaling of
  updates and no weight decay may follow in a chain. With :func:`make_train_step` and
  :func:`apply_gradients` the params are exactly a permutation of the initial params, to the bit.
  With ``optax.apply_updates`` they stay within one rounding of a permutation, since
  ``p + (q - p)`` is not always ``q``.

  A weight vector holds the weights that lead into one output, in each layer and expert. Weight
  vectors run along the fan-in, which :func:`make_train_step` reads from its trace of the loss. In
  your own loop, pass `layers`. Without `layers`, vectors run along all axes but the output axis,
  except for Flax's attention projections, which are known by name. A bias is one vector. Give
  leaves that should not be permuted, such as the leaves of BatchNorm, to another optimizer by
  ``optax.partition``. A gradient entry that is not finite leaves its momentum unchanged.

  Args:
    alpha: how far a weight may move in one step, as a share of its vector's range, before the
      schedule. Raising it makes larger steps.
    lamda: the size of the random subsets within which weights move, as a share of the vector,
      before the schedule. Raising it finds more moves and costs more; at 1 there is a single
      subset. ``"exact"`` only.
    beta1: factor of alpha at the start of each step, at most 1.
    beta2: factor of lamda at the start of each step.
    alpha_min: lower bound of alpha.
    lamda_max: upper bound of lamda.
    momentum_lr: factor of the gradient in the momentum. A step depends only on signs and ratios of
      momenta, so a constant factor has no effect.
    momentum: the decay of the momentum. Raising it averages gradients over more steps.
    partition_size_min: the smallest size of a subset. Static.
    include_partition_remainder: whether the last, smaller subset of a vector takes part.
    method: ``"exact"``, ``"pairs"`` or ``"rank"``, as described at the top.
    backend: where ``"exact"`` runs. ``"auto"``: on the host if JAX runs on one CPU device and numba
      is installed, else on the device. The host gathers leaves that are sharded over devices.
    key: a key of ``jax.random.key`` or a seed. Not needed for ``"rank"``, nor if lamda is 1 in
      every step, as with `lamda` and `lamda_max` 1 and `beta2` at least 1.
    layout: where a kernel has its output axis, as in :func:`centralize`.
    layers: the axes of layers, fan-in and outputs, as in :func:`centralize`.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Its updates have the
    wider of the dtypes of params and gradients. The extra argument `partitions` of ``update``
    replays recorded shuffles: a tree like the params, whose int32 leaves (n, vectors) have the
    shuffled positions of each vector.

  Raises:
    ValueError: the key is missing; in ``init`` outside of ``jit``: weights are not finite.

  Examples:
    >>> import jax, jax.numpy as jnp, numpy as np, optax_boost
    >>> params = {"kernel": jax.random.normal(jax.random.key(0), (16, 4))}
    >>> x = jax.random.normal(jax.random.key(1), (64, 16))
    >>> y = x @ jax.random.permutation(jax.random.key(2), params["kernel"])
    >>> step = optax_boost.make_train_step(
    ...   lambda p, batch: jnp.mean((x @ p["kernel"] - y) ** 2),
    ...   optax_boost.sgperm(alpha=0.2, momentum=0.5, method="rank"),
    ... )
    >>> state = step.init(jax.tree.map(jnp.copy, params))
    >>> for _ in range(50):
    ...   state, metrics = step(state, None)
    >>> bool(metrics["loss"] < 0.1 * jnp.mean((x @ params["kernel"] - y) ** 2))
    True
    >>> np.array_equal(*(np.sort(p["kernel"], axis=0) for p in (state.params, params)))
    True

  References:
    Qiu, Suda, `Permute to Train <https://arxiv.org/abs/2003.02570>`_, 2020.

  .. note::
    SGPerm.py orders equal recommendations by an unstable sort; `sgperm` reverses a stable sort.
    SGPerm.py draws subsets for each vector; `sgperm` shuffles ranks of weights (equal weights are
    ranked by position), once for all vectors of the same length. Leaves may have any number of
    axes. Inside ``shard_map`` leaves must be whole, since a permutation has the indices of whole
    leaves.
  """
  _checks.check_number("alpha", alpha, minimum=0.0)
  _checks.check_number("lamda", lamda, above=0.0, maximum=1.0)
  _checks.check_number("beta1", beta1, above=0.0, maximum=1.0)
  _checks.check_number("beta2", beta2, above=0.0)
  _checks.check_number("alpha_min", alpha_min, minimum=0.0)
  _checks.check_number("lamda_max", lamda_max, above=0.0, maximum=1.0)
  _checks.check_number("momentum_lr", momentum_lr, above=0.0)
  _checks.check_number("momentum", momentum, minimum=0.0, below=1.0)
  _checks.check_whole_number("partition_size_min", partition_size_min, static=True)
  _checks.check_bool("include_partition_remainder", include_partition_remainder)
  _checks.check_name("method", method, ("exact", "pairs", "rank"))
  _checks.check_name("backend", backend, ("auto", "device", "host"))
  schedules = _schedules.Schedules(alpha, lamda, beta1, beta2, alpha_min, lamda_max)
  draws = method == "pairs" or (method == "exact" and not schedules.always_whole)
  if key is None and draws:
    raise ValueError(
      f"`{_METHOD}` needs a `key`, from which it draws pairs or subsets; got none. Pass"
      " `key=jax.random.key(...)` or a seed."
    )
  transform = _Sgperm(
    layouts=_weight_vectors.Layouts(_METHOD, layout, layers),
    schedules=schedules,
    momentum=_schedules.as_float(momentum),
    momentum_lr=_schedules.as_float(momentum_lr),
    least=partition_size_min,
    remainder=include_partition_remainder,
    method=method,
    backend=backend,
    key=_checks.as_key("key", 0 if key is None else key),
  )
  return _transformation.transformation(
    _METHOD, SgpermState, transform.init, transform.step, needs_params=True
  )


@dataclasses.dataclass(frozen=True)
class _Sgperm:
  """The functions `init` and `step` of :func:`sgperm`; the fields are its checked arguments."""

  layouts: _weight_vectors.Layouts
  schedules: _schedules.Schedules
  momentum: float | jax.Array
  momentum_lr: float | jax.Array
  least: int
  remainder: bool
  method: str
  backend: str
  key: jax.Array

  def init(self, params: optax.Params) -> SgpermState:
    self.layouts.for_init(params)
    count = jnp.zeros([], jnp.int32)
    ranked = self.method == "rank"
    return SgpermState(
      count=count,
      alpha=self.schedules.alpha(count),
      lamda=self.schedules.lamda(count),
      key=_placement.copy(jax.random.key_data(self.key)),
      momentum=_arrays.zeros_like_wide(params),
      permuted_params=_arrays.copy_arrays(params),
      permutation=jax.tree.map(_weight_vectors.identity, params),
      ranks=optax.tree.zeros_like(params, dtype=jnp.int32) if ranked else (),
      ranked_axes=jnp.zeros([], jnp.int32),
      notfinite_count=jnp.zeros([], jnp.int32),
    )

  def step(
    self,
    updates: optax.Updates,
    state: SgpermState,
    params: optax.Params,
    *,
    partitions: optax.Params | None = None,
    layers: _layer_axes.LayerAxes | None = None,
  ) -> tuple[optax.Updates, SgpermState]:
    layouts = self.layouts.for_update(state.permuted_params, params, layers)
    momentum, notfinite = self._new_momentum(updates, state.momentum)
    ranked_axes = zlib.crc32(repr([lay.fan_in for lay in layouts]).encode()) >> 1
    exact, permutation, *ranks = _execution.permute(
      self._run,
      (state.count, state.key, state.ranked_axes != ranked_axes),
      layouts,
      jax.tree.leaves(params),
      [state.permuted_params, state.permutation, *([state.ranks] if self.method == "rank" else [])],
      [momentum, *_orders_to_replay(partitions, updates, layouts)],
    )
    steps = _trees.map_leaves(_weight_vectors.difference, updates, params, exact)
    return steps, state._replace(
      count=optax.safe_increment(state.count),
      alpha=self.schedules.alpha(state.count),
      lamda=self.schedules.lamda(state.count),
      momentum=momentum,
      permuted_params=exact,
      permutation=permutation,
      ranks=ranks[0] if ranks else (),
      ranked_axes=jnp.int32(ranked_axes),
      notfinite_count=_arrays.increment_if(notfinite, state.notfinite_count),
    )

  def _new_momentum(
    self, updates: optax.Updates, momentum: optax.Updates
  ) -> tuple[optax.Updates, _types.BoolScalar]:
    """Returns the new momentum, and whether an entry of a gradient is not finite.

    An entry keeps its old momentum if its gradient or its new momentum is not finite.
    """

    def add(g: jax.Array, m: jax.Array) -> jax.Array:
      new = (self.momentum_lr * g.astype(m.dtype) + self.momentum * m).astype(m.dtype)
      good = _finiteness.finite_entries(g) & _finiteness.finite_entries(new)
      return jnp.where(good, new, m)

    return jax.tree.map(add, updates, momentum), jnp.logical_not(_finiteness.all_finite(updates))

  def _run(
    self,
    layouts: Sequence[_weight_vectors.Layout],
    args: tuple[jax.Array, jax.Array, jax.Array],
    weights: Sequence[Sequence[jax.Array]],
    fixed: Sequence[Sequence[jax.Array]],
  ) -> list[Sequence[jax.Array]]:
    """Makes a step; returns for each leaf its new arrays, as `_execution.permute` expects.

    `weights` has for each leaf the arrays before the step: weights, permutation and, with
    ``method="rank"``, ranks. `fixed` has the momentum and, if given, `partitions`. `args` are the
    number of the step, the raw key, and whether the state's ranks are not valid.
    """
    count, key, unranked = args
    bits = self._random_bits(count, key, layouts)
    alpha = self.schedules.alpha(count)

    def pairs(values: jax.Array, entries: jax.Array, momentum: jax.Array) -> list[jax.Array]:
      source = _pairs_and_ranks.pairs(
        values, _pairs_and_ranks.targets(values, momentum, alpha), bits
      )
      return _execution.gather([values, entries], source)

    def rank(
      values: jax.Array, entries: jax.Array, ranks: jax.Array, momentum: jax.Array
    ) -> list[jax.Array]:
      # `ranks` are not valid before the first step, or if `layers` have changed the weight vectors.
      order = jax.lax.cond(
        unranked, lambda: _sorting.argsort(values), lambda: _sorting.inverse(ranks)
      )
      new_ranks = _pairs_and_ranks.ranks(_pairs_and_ranks.targets(values, momentum, alpha))
      return [*_execution.gather([values, entries], _sorting.gather(order, new_ranks)), new_ranks]

    def exact(
      values: jax.Array, entries: jax.Array, momentum: jax.Array, *partitions: jax.Array
    ) -> list[jax.Array]:
      # Moves the axis along which leaves are stacked after the output axes before all are merged
      # into columns, so that a sharded output axis stays sharded.
      shape = jnp.moveaxis(values, 1, -1).shape

      def columns(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 1, -1).reshape(len(x), -1)

      sizes = self.schedules.sizes(len(values), self.least)
      work = self._work(count, bits, columns(values), columns(momentum), *map(columns, partitions))
      source = _device_search.permute(work, sizes=sizes, remainder=self.remainder)
      return _execution.gather([values, entries], jnp.moveaxis(source.reshape(shape), -1, 1))

    if self.method != "exact" or not self._on_host():
      kernels: dict[str, _execution.Kernel] = {"exact": exact, "pairs": pairs, "rank": rank}
      return _execution.together(kernels[self.method], layouts, weights, fixed)
    columns = [
      [lay.columns(x) for x in arrays] for lay, arrays in zip(layouts, weights, strict=True)
    ]
    works = [
      self._work(count, bits, values, *map(lay.columns, fixed_arrays))
      for lay, (values, _), fixed_arrays in zip(layouts, columns, fixed, strict=True)
    ]
    sources = _called_back(works, self.remainder)
    return [_execution.gather(arrays, x) for arrays, x in zip(columns, sources, strict=True)]

  def _random_bits(
    self, count: jax.Array, key: jax.Array, layouts: Sequence[_weight_vectors.Layout]
  ) -> jax.Array:
    """Returns random numbers (uint32) for this step, which all leaves share."""
    drawn = [lay.length for lay in layouts if self.method == "exact" and self._draws(lay.length)]
    most = _pairs_and_ranks.ROUNDS if self.method == "pairs" else max(drawn, default=0)
    step_key = jax.random.wrap_key_data(key, impl=jax.random.key_impl(self.key))
    return jax.random.bits(jax.random.fold_in(step_key, count), (most,), jnp.uint32)

  def _draws(self, n: int) -> bool:
    """Returns whether a vector of n weights has several subsets in some step."""
    return self.schedules.sizes(n, self.least)[0] < n

  def _work(
    self,
    count: jax.Array,
    bits: jax.Array,
    values: jax.Array,
    momentum: jax.Array,
    order: jax.Array | None = None,
  ) -> _host_search.Work:
    """Returns the inputs of an exact step; random `bits` shuffle the entries if `order` is None."""
    n = len(values)
    if order is None:
      order = _sorting.argsort(bits[:n]) if self._draws(n) else jnp.arange(n, dtype=jnp.int32)
    size = self.schedules.size(count, n, self.least)
    brackets = self.schedules.brackets(count, n).astype(values.dtype)
    return _host_search.Work(values, momentum, order, size, brackets)

  def _on_host(self) -> bool:
    """Returns whether the exact step runs on the host."""
    if self.backend != "auto":
      return self.backend == "host"
    # On a CPU the host search is faster, but with several devices it would gather sharded leaves.
    alone = jax.default_backend() == "cpu" and jax.device_count() == 1
    return alone and _host_search.have_numba()


# Without `jit` and `sharded_like`, the results of a callback would not be on the weights' mesh.
@functools.partial(jax.jit, static_argnums=1)
def _called_back(works: list[_host_search.Work], remainder: bool) -> list[jax.Array]:
  shapes = [jax.ShapeDtypeStruct(work.weights.shape, jnp.int32) for work in works]
  callback = functools.partial(_permute_on_host, remainder=remainder)
  sources = jax.pure_callback(callback, shapes, works, vmap_method="broadcast_all")
  return [
    _execution.sharded_like(jnp.zeros_like(source), source, work.weights)
    for source, work in zip(sources, works, strict=True)
  ]


def _permute_on_host(works: list[_host_search.Work], *, remainder: bool) -> list[np.ndarray]:
  """Makes the exact step for each leaf; returns for each position where its weight comes from.

  Under ``vmap``, arrays have further axes before (n, vectors); each index of these axes is one
  step. `remainder` is passed on to `_host_search.permute`.
  """
  results = []
  for work in works:
    arrays = jax.tree.map(np.asarray, work)
    sources = np.empty(arrays.weights.shape, np.int32)
    for index in np.ndindex(sources.shape[:-2]):
      work_of_run = jax.tree.map(lambda x, index=index: x[index], arrays)
      sources[index] = _host_search.permute(work_of_run, remainder=remainder)
    results.append(sources)
  return results


def _orders_to_replay(
  partitions: optax.Params | None,
  updates: optax.Updates,
  layouts: list[_weight_vectors.Layout],
) -> list[list[jax.Array]]:
  """Returns ``[leaves]``, the leaves of `partitions` in the shapes of the params' leaves.

  Returns [] if `partitions` is None. Raises ValueError if `partitions` do not fit the params, which
  have the tree structure of `updates`.
  """
  if partitions is None:
    return []
  structure: _types.TreeDef = jax.tree.structure(updates)
  if jax.tree.structure(partitions) != structure:
    raise ValueError(
      f"`partitions` must have the tree structure of the params; got"
      f" {jax.tree.structure(partitions)} for {structure}."
    )
  orders = jax.tree.leaves(partitions)
  for lay, order in zip(layouts, orders, strict=True):
    dtype = jnp.result_type(order)
    if jnp.shape(order) != (lay.length, lay.vectors) or not jnp.issubdtype(dtype, jnp.integer):
      raise ValueError(
        f"`partitions` must hold integers of shape (n, vectors), for the leaf '{lay.name}'"
        f" {(lay.length, lay.vectors)}; got {dtype} of shape {jnp.shape(order)}."
      )
    _permuted_params.check_indices(order, lay.length, "partitions", lay.name)
  return [[lay.leaf(jnp.asarray(x, jnp.int32)) for lay, x in zip(layouts, orders, strict=True)]]
