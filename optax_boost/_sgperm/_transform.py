r"""SGPerm: training by permuting weights.

For each weight vector w (the n weights that lead into one output), its initial value range R and
a gradient g:

  m <- momentum_lr g + momentum m       recommendations: increase where m < 0, decrease where m > 0
  subsets of floor(lamda n) weights are drawn; in a subset with k nonzero recommendations
  epsilon = R (alpha + 1 / k)           no weight may change by more
  for each weight, by falling |m|: the nearest cycle of moves, each as its weight recommends and
  within epsilon, is carried out; a weight moves at most once per step

"Nearest" means, down to ties and roundings, as in SGPerm.py, the program of arXiv:2003.02570. With
distinct weights the cycle has a closed form: from a weight that wants to increase, the nearest
larger one that wants to decrease and all between (and the mirror image of this), if within epsilon.
"""

from typing import Literal

import jax
import optax

from optax_boost import _base
from optax_boost import _layers
from optax_boost._sgperm import _layout
from optax_boost._sgperm import _schedules
from optax_boost._sgperm import _step

_METHOD = "sgperm"


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
  layers: _layers.Layers | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains by permuting the weights that lead into each output; no value ever changes.

  A whole model is its initial weights, which may come from a seed, and integers: see
  :class:`PermutedParams`. Three methods of permuting:

  - ``"exact"``: the published algorithm, weight for weight, with equal bits on the device and on
    the host, which on a CPU is faster if numba is installed (``pip install ".[host]"`` in a clone).
  - ``"pairs"``: not the paper's. Drawn pairs of weights swap if that brings them into the order of
    their targets :math:`w - R (\alpha + 1/n)\, m / \max |m|`. No sort: made for accelerators, and
    many times faster.
  - ``"rank"``: not the paper's. The weights are handed out in the order of those targets.

  It takes plain gradients and returns the difference to the permuted weights: no scaling of updates
  and no weight decay may follow it in a chain. With :func:`make_train_step` and
  :func:`apply_gradients` params are exactly a permutation of the initial ones, to the bit. With
  ``optax.apply_updates`` they stay within one rounding of it: ``p + (q - p)`` is not always ``q``.

  A weight vector holds the weights into one output: for Flax all axes but the last, and a whole
  bias, of any rank. Leaves that should not be permuted, such as BatchNorm's, go to another
  optimizer by ``optax.partition``. A gradient entry that is not finite leaves its momentum
  unchanged.

  Args:
    alpha: how far a weight may move in one step, as a share of its vector's range, before the
      schedule. Raising it makes larger steps.
    lamda: the size of a subset as a share of its vector, before the schedule. Raising it finds
      more moves and costs more; at 1 there is a single subset. ``"exact"`` only.
    beta1: factor of alpha at the start of each step, at most 1.
    beta2: factor of lamda at the start of each step.
    alpha_min: lower bound of alpha.
    lamda_max: upper bound of lamda.
    momentum_lr: weight of the gradient in the momentum; counts relative to the old momentum.
    momentum: raising it averages gradients over more steps.
    partition_size_min: the least size of a subset. Static.
    include_partition_remainder: whether the last, smaller subset of a vector takes part.
    method: see above.
    backend: where ``"exact"`` runs. ``"auto"``: on the host if that is a CPU, has numba, and JAX
      sees one device; else on the device. The host kernel gathers sharded leaves on one device.
    key: a key of ``jax.random.key`` or a seed. Not needed for ``"rank"``, nor if lamda is 1 in
      every step: `lamda` and `lamda_max` are 1, and `beta2` at least 1.
    layout: where a kernel has its output axis: ``"flax"``, last; ``"torch"``, first.
    layers: what :func:`layer_axes` returns: vectors then run along the fan-in that the loss tells,
      in each layer and expert. None: along all axes but the output axis, of one layer per leaf;
      Flax's attention projections are known by name. Not the extra argument of ``update``: `init`
      orders the weights.

  Returns:
    An :class:`optax.GradientTransformationExtraArgs` that needs `params`. Its updates have the
    wider of the dtypes of params and gradients. The extra argument `partitions` replays recorded
    ones: a tree like the params of int32 (n, vectors), each vector's positions after the shuffle.

  Raises:
    ValueError: the key is missing; in ``init`` outside of ``jit``: weights that are not finite.

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
    SGPerm.py orders equal recommendations by an unstable sort, and draws subsets for each vector;
    this function reverses a stable sort, and vectors of the same length share one draw by the order
    of their weights, equal ones in natural order. Leaves of any rank are permuted. Inside
    ``shard_map`` they must be whole: a permutation counts the entries of the whole leaf.
  """
  _base.check_number("alpha", alpha, minimum=0.0)
  _base.check_number("lamda", lamda, positive=True, maximum=1.0)
  _base.check_number("beta1", beta1, positive=True, maximum=1.0)
  _base.check_number("beta2", beta2, positive=True)
  _base.check_number("alpha_min", alpha_min, minimum=0.0)
  _base.check_number("lamda_max", lamda_max, positive=True, maximum=1.0)
  _base.check_number("momentum_lr", momentum_lr, positive=True)
  _base.check_number("momentum", momentum, minimum=0.0, below=1.0)
  _base.check_whole_number("partition_size_min", partition_size_min, static=True)
  _base.check_bool("include_partition_remainder", include_partition_remainder)
  _base.check_name("method", method, ("exact", "pairs", "rank"))
  _base.check_name("backend", backend, ("auto", "device", "host"))
  schedules = _schedules.Schedules(alpha, lamda, beta1, beta2, alpha_min, lamda_max)
  draws = method == "pairs" or (method == "exact" and not schedules.always_whole)
  if key is None and draws:
    raise ValueError(
      f"`{_METHOD}` draws {'pairs' if method == 'pairs' else 'subsets'} and needs a `key`; got"
      " none. Pass `key=jax.random.key(...)` or a seed."
    )
  transform = _step.Transform(
    cutter=_layout.Cutter(_METHOD, layout, layers),
    schedules=schedules,
    momentum=_schedules.as_float(momentum),
    momentum_lr=_schedules.as_float(momentum_lr),
    partition_size_min=partition_size_min,
    remainder=include_partition_remainder,
    method=method,
    backend=backend,
    key=_base.as_key("key", 0 if key is None else key),
  )
  return optax.GradientTransformationExtraArgs(transform.init, transform.update)
