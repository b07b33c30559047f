"""One row per public factory; the contract suite runs every row through every column.

To add a method: export its factory from ``optax_boost`` and add a row here, with the values that it
must refuse. A factory without a row fails ``test_registry.py``.
"""

from collections.abc import Callable
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_boost
from optax_boost._form import _form
from optax_boost._step import _nesting
from tests import problems
from tests.contract.bad_input import kinds


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
  """A factory with arguments that let it act, and what the suite must know of it.

  Attributes:
    factory: the public name.
    kwargs: its arguments.
    baseline: what it is without acting; the suite checks that it differs from this.
    needs_params: whether ``update`` refuses to work without params.
    descends: what turns its output into steps that solve a problem (a learning rate for methods
      that only rewrite gradients).
    params: makes the params of a dtype that most columns run it on, as ``problems.params`` does.
    steps: how many steps it needs to get close.
    reachable: maps any target to one that the method can reach from zero.
    start: maps a target to where the solving starts, for methods that cannot reach it from zero.
    gathers: whether it may gather sharded params.
    calls_host: whether it works on the host, by callbacks, and so on CPUs only.
    static: arguments that ``optax.inject_hyperparams`` must leave alone.
    acts: proves that the method acts, where comparing its first update with the baseline's does
      not: gets the transformation and the baseline.
    widens: whether updates are float32 where gradients have half precision.
    label: tells rows of the same factory apart.
    extra: makes the extra arguments that ``update`` needs from its updates and params.
    wrap: gives the transformation what it needs around it, such as a named axis.
    not_applicable: by column, which is the name of a test, why the row can't act there. The column
      runs all the same and must fail: a reason that no longer holds turns it red.
    quiet: of a wrapper, the arguments with which it leaves every step of `inner` as it is, if those
      of the row don't.
    bad_values: by argument, the values that it must refuse, of tests/contract/bad_input/kinds.py;
      arguments that tests/contract/bad_input/arguments.py knows by name need none.
  """

  factory: str
  kwargs: dict[str, Any]
  baseline: Callable[[], optax.GradientTransformation]
  needs_params: bool
  descends: Callable[[], optax.GradientTransformation] | None = None
  params: Callable[..., Any] = problems.params
  steps: int = 500
  reachable: Callable[[Any], Any] = lambda tree: tree
  start: Callable[[Any], Any] | None = None
  gathers: bool = False
  calls_host: bool = False
  static: tuple[str, ...] = ()
  acts: Callable[[Any, Any], bool] | None = None
  widens: bool = False
  label: str = ""
  wrap: Callable[[Any], optax.GradientTransformationExtraArgs] = lambda tx: tx
  extra: Callable[[Any, Any], dict[str, Any]] | None = None
  not_applicable: dict[str, str] = dataclasses.field(default_factory=dict)
  quiet: dict[str, Any] = dataclasses.field(default_factory=dict)
  bad_values: dict[str, Any] = dataclasses.field(default_factory=dict)

  def make(self) -> optax.GradientTransformationExtraArgs:
    """The transformation itself, given what extra arguments it needs."""
    return self.feed(getattr(optax_boost, self.factory)(**self.kwargs))

  def feed(
    self, tx: optax.GradientTransformationExtraArgs
  ) -> optax.GradientTransformationExtraArgs:
    """Puts around `tx` what the row needs: its surroundings, and extra arguments at each update."""
    tx = self.wrap(tx)
    if self.extra is None:
      return tx

    def update(updates: Any, state: Any, params: Any = None, **more: Any) -> Any:
      return tx.update(updates, state, params, **{**self.extra(updates, params), **more})

    return optax.GradientTransformationExtraArgs(tx.init, update)

  def optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The transformation, made into something that descends."""
    # What descends as it is stays alone: some wrappers must come last in a chain.
    return self.make() if self.descends is None else optax.chain(self.make(), self.descends())

  @property
  def form(self) -> _form.Form | None:
    """The form of the transformation; None if it is a chain of several."""
    return _form.form_of(getattr(optax_boost, self.factory)(**self.kwargs).update)

  @property
  def is_root(self) -> bool:
    """Whether it must be around the whole optimizer."""
    step = None if self.form is None else self.form.step
    return step is not None and any(getattr(step, slot) for slot in _nesting.OF_ROOT)

  @property
  def allows_complex(self) -> bool:
    """Methods that select and average do; the others need an order or a norm of real numbers."""
    return self.form is None or self.form.allows_complex

  def around(
    self, tx: optax.GradientTransformation, **kwargs: Any
  ) -> optax.GradientTransformationExtraArgs:
    """The wrapper around another optimizer than the row's."""
    held = "inner" if "inner" in self.kwargs else "first"
    return getattr(optax_boost, self.factory)(**self.kwargs | {held: tx} | kwargs)

  def __str__(self) -> str:
    return f"{self.factory}-{self.label}" if self.label else self.factory


def _without_fan_in_mean(tree: Any) -> Any:
  def project(x: jax.Array) -> jax.Array:
    return x - jnp.mean(x, range(x.ndim - 1), keepdims=True) if x.ndim > 1 else x

  return jax.tree.map(project, tree)


def _gradients_elsewhere(updates: Any, params: Any) -> dict[str, Any]:
  """Closures of the contract's problem, whose gradients differ as the points do."""

  def grad_fn(point: Any) -> Any:
    return jax.tree.map(lambda g, p, q: g + (q - p), updates, params, point)

  def full_grad_fn(point: Any) -> Any:
    return jax.tree.map(jnp.subtract, point, problems.target(point))

  return {"grad_fn": grad_fn, "full_grad_fn": full_grad_fn}


def _on_two_replicas(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Runs `tx` on the axis "replicas", where gradients differ but have the given ones as mean.

  Their last axis is sharded over the axis "x" of the mesh, if there is one.
  """

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
    mesh = jax.sharding.get_abstract_mesh()

    def one_replica(weight: jax.Array, updates: Any, state: Any, params: Any) -> Any:
      # One replica sees most of what is positive, the other most of what is negative.
      def part(g: jax.Array) -> jax.Array:
        return g * (1 + weight * jnp.sign(g).astype(weight.dtype)).astype(g.dtype)

      own = jax.tree.map(part, jax.tree.map(jnp.asarray, updates))
      return tx.update(own, state, params, **extra)

    def both(*given: Any) -> Any:
      mapped = jax.vmap(one_replica, in_axes=(0, None, None, None), axis_name="replicas")
      return jax.tree.map(lambda x: x[0], mapped(jnp.array([0.8, -0.8]), *given))

    given = (updates, state, params)
    if mesh.empty:
      alone = jax.vmap(both, in_axes=None, out_axes=None, axis_name="x", axis_size=1)
      return alone(*given)
    split = jax.tree.map(lambda g: jax.sharding.PartitionSpec(*[None] * (g.ndim - 1), "x"), updates)
    whole = jax.sharding.PartitionSpec()
    specs = {"in_specs": (split, whole, split), "out_specs": (split, whole)}
    return jax.shard_map(both, **specs, check_vma=False)(*given)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def _three_waves(params: Any) -> optax_boost.Subspace:
  """A subspace for any params: orthonormal rows, as far as there is room for them."""
  leaves, structure = jax.tree.flatten(params)
  sizes = [np.prod(leaf.shape, dtype=int) for leaf in leaves]
  points = np.arange(sum(sizes), dtype=np.float64)
  rows = np.stack([np.sin((0.3 * i + 1.5) * points) for i in range(3)])
  rows = np.linalg.qr(rows.T)[0].T
  rows = np.concatenate([rows, np.zeros((3 - len(rows), len(points)))])
  parts = np.split(rows, np.cumsum(sizes)[:-1], axis=1) if leaves else []
  basis = [part.reshape(3, *leaf.shape) for part, leaf in zip(parts, leaves, strict=True)]
  variance = np.ones(3, np.float32)
  return optax_boost.Subspace(params, jax.tree.unflatten(structure, basis), variance, variance / 3)


def _loss_nearby(updates: Any, params: Any) -> dict[str, Any]:
  """A loss of curvature 1 that has the given gradient at the params."""

  def value_fn(point: Any) -> jax.Array:
    def part(g: Any, p: Any, q: Any) -> jax.Array:
      wide = jnp.float64 if jnp.result_type(p) == jnp.float64 else jnp.float32
      g, p, q = (jnp.asarray(x, wide) for x in (g, p, q))
      return jnp.sum(g * (q - p) + 0.5 * (q - p) ** 2)

    parts = jax.tree.map(part, updates, params, point)
    return sum(jax.tree.leaves(parts), start=jnp.zeros([]))

  return {"value": jnp.zeros([]), "value_fn": value_fn}


def _reversed(tree: Any) -> Any:
  """What leads into each output, in reverse: a permutation of the given params."""
  return jax.tree.map(lambda x: jnp.flip(x, range(max(x.ndim - 1, 1))), tree)


def _ends_in_a_permutation(tx: Any, baseline: Any) -> bool:
  """Whether 20 steps end in the initial values of each output, as they don't in the baseline."""

  def train(tx: Any) -> jax.Array:
    start = problems.params()["dense"]["kernel"]

    def body(carry: Any, _: None) -> tuple[Any, None]:
      params, state = carry
      updates, state = tx.update(problems.grads(params), state, params)
      return (optax.apply_updates(params, updates), state), None

    params, _ = jax.lax.scan(body, (start, tx.init(start)), length=20)[0]
    moved = jnp.any(jnp.abs(params - start) > 0.1)
    return moved & jnp.allclose(jnp.sort(params, axis=0), jnp.sort(start, axis=0), atol=1e-5)

  ours, plain = jax.jit(lambda: (train(tx), train(baseline)))()
  return bool(ours) and not bool(plain)


def _small_steps_arrive(tx: Any, baseline: Any) -> bool:
  """Whether 30 steps too small for bfloat16 move the params' mean, as they don't in the baseline.

  With float32 masters the params are their rounding; rounded at random they are right on average:
  a step of 1 + 1e-3 is one of 2^-7 or none.
  """

  def after(tx: Any) -> jax.Array:
    params = jnp.ones(30, jnp.bfloat16)

    def body(carry: Any, _: None) -> tuple[Any, None]:
      params, state = carry
      updates, state = tx.update(jnp.full(30, -1e-2, params.dtype), state, params)
      return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(body, (params, tx.init(params)), length=30)[0][0].astype(jnp.float32)

  ours, plain = jax.jit(lambda: (after(tx), after(baseline)))()
  return bool((abs(jnp.mean(ours) - 1.03) < 0.015) & jnp.all(plain == 1))


def _first_group_stands_still(tx: Any, baseline: Any) -> bool:
  """Whether a leaf of the first group makes fewer steps than in the baseline."""

  def steps(tx: Any) -> jax.Array:
    params = {"conv": jnp.ones(3), "dense": jnp.ones(3), "norm": jnp.ones(3)}

    def body(state: Any, _: None) -> tuple[Any, jax.Array]:
      updates, state = tx.update(params, state, params)
      return state, jnp.any(updates["conv"])

    return jnp.sum(jax.lax.scan(body, tx.init(params), length=8)[1])

  ours, plain = jax.jit(lambda: (steps(tx), steps(baseline)))()
  return bool((ours > 0) & (ours < plain))


def _path(tx: Any, baseline: Any, steps: int) -> tuple[Any, list[Any]] | None:
  """The state after some steps, and the params after each; None if updates differ."""
  params = [jnp.ones(3)]
  state, other = tx.init(params[0]), baseline.init(params[0])
  update, plain_update = jax.jit(tx.update), jax.jit(baseline.update)
  for _ in range(steps):
    updates, state = update(0.5 * params[-1], state, params[-1])
    expected, other = plain_update(0.5 * params[-1], other, params[-1])
    if jnp.any(updates != expected):
      return None
    params.append(params[-1] + updates)
  return state, params


def _keeps_the_params_it_saw(tx: Any, baseline: Any) -> bool:
  """Whether the state holds every second point of the way, and the updates are the baseline's."""
  path = _path(tx, baseline, 5)
  if path is None:
    return False
  state, params = path
  return bool(jnp.all(optax_boost.snapshots(state) == jnp.stack([params[2], params[4]])))


def _averages_the_params_after_each_step(tx: Any, baseline: Any) -> bool:
  """Whether the average is of every second step's params, and the updates are the baseline's."""
  path = _path(tx, baseline, 4)
  if path is None:
    return False
  state, params = path
  mean = optax_boost.averaged_params(state, params[-1])
  # By `decay`, and uniform from a start on, where the second and the third step are averaged.
  decayed = jnp.array([1, 2]) / 3 @ jnp.stack([params[2], params[4]])
  return bool(jnp.allclose(mean, decayed, rtol=1e-6) | jnp.allclose(mean, params[3], rtol=1e-6))


def _skips_a_long_gradient(tx: Any, baseline: Any) -> bool:
  """Whether of five gradients the fourth, ten times as long, moves nothing, and the others do."""
  params = jnp.ones(3)
  state, other = tx.init(params), baseline.init(params)
  update, plain_update = jax.jit(tx.update), jax.jit(baseline.update)
  moves = []
  for length in (1.0, 1.0, 1.0, 10.0, 1.0):
    updates, state = update(length * params, state, params)
    expected, other = plain_update(length * params, other, params)
    moves.append(bool(jnp.all(updates == expected) & jnp.any(updates != 0)))
  return moves == [True, True, True, False, True]


_SEARCHES_A_LOSS = {
  "test_derivatives_of_steps_are_finite": "its line search is a loop of unknown length",
  "test_inside_shard_map_each_device_may_have_its_own_state": (
    "its line search refuses a loss that varies over the axis of a mesh"
  ),
}

ROWS = (
  Row(
    "accumulate",
    {"inner": optax.sgd(0.1), "every": 2},
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    quiet={"every": 1},
  ),
  Row(
    "dynamic_loss_scale",
    {"inner": optax.sgd(0.1, momentum=0.5), "initial_scale": 2.0},
    baseline=lambda: optax.sgd(0.1, momentum=0.5),
    needs_params=False,
  ),
  Row(
    "master_weights",
    {"inner": optax.sgd(0.1)},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_small_steps_arrive,
    widens=True,
  ),
  Row(
    "stochastic_rounding",
    {"inner": optax.sgd(0.1), "key": 0},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    static=("key",),
    acts=_small_steps_arrive,
    widens=True,
  ),
  Row(
    "freeze_layers",
    {
      "inner": optax.sgd(0.1),
      "groups": ("conv", "dense|norm"),
      "schedule": optax_boost.interval_freezing(2, frozen_fraction=0.4),
    },
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    quiet={"groups": ("a", "b"), "schedule": optax_boost.continuous_freezing(2, 0.0)},
    acts=_first_group_stands_still,
  ),
  Row(
    "freeze_layers",
    {
      "inner": optax.sgd(0.1),
      "groups": ("conv", "dense|norm"),
      "schedule": optax_boost.progressive_freezing(2, 1000, first=0.002),
    },
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    acts=_first_group_stands_still,
    reachable=lambda tree: jax.tree.map_with_path(
      lambda path, x: 0 * x if "conv" in str(path) else x, tree
    ),
    label="progressive",
  ),
  Row(
    "average_params",
    {"inner": optax.sgd(0.1), "start": 1, "every": 2},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_averages_the_params_after_each_step,
  ),
  Row(
    "average_params",
    {"inner": optax.sgd(0.1), "decay": 0.5, "every": 2},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_averages_the_params_after_each_step,
    label="decay",
  ),
  Row(
    "average_params",
    {"inner": optax.sgd(0.1), "decay": 0.5, "every": 2, "model_state": {"mean": jnp.zeros(2)}},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_averages_the_params_after_each_step,
    extra=lambda updates, params: {"model_state": {"mean": jnp.ones(2)}},
    label="statistics",
    not_applicable=dict.fromkeys(
      (
        "test_params_named_like_state_fields_train_as_any_others",
        "test_wrappers_train_around_every_kind_of_optimizer",
        "test_a_state_may_be_kept_in_host_memory",
        "test_a_train_step_on_explicit_axes_trains_as_on_one_device",
        "test_a_train_step_in_a_shard_map_that_checks_what_varies_trains_as_on_one_device",
      ),
      "its extra argument comes from a wrapper of the tests, so it is not the root of the step",
    ),
  ),
  Row(
    "layerwise_decay",
    {"inner": optax.sgd(0.1), "groups": ("dense", "conv|norm"), "decay": 0.5},
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    quiet={"groups": ("a", "b"), "decay": 1.0},
  ),
  Row(
    "skip_spikes",
    {"inner": optax.sgd(0.1), "factor": 5.0, "start": 2},
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
    acts=_skips_a_long_gradient,
    bad_values={
      "factor": kinds.number(0.5, -1),
      "loss_factor": kinds.number(0.5, -1),
      "decay": kinds.number(-1, 1),
    },
  ),
  Row(
    "switch_after",
    {"step": 2, "first": optax.sgd(0.05), "second": optax.sgd(0.1)},
    baseline=lambda: optax.sgd(0.1),
    needs_params=False,
  ),
  Row(
    "scale_by_lars_trust_ratio",
    {"trust_coefficient": 0.02, "weight_decay": 1e-4},
    baseline=optax.identity,
    needs_params=True,
    descends=lambda: optax.scale_by_learning_rate(optax.linear_schedule(1.0, 0.0, 500)),
  ),
  Row(
    "lars",
    {
      "learning_rate": optax.linear_schedule(0.5, 0.0, 500),
      "trust_coefficient": 0.02,
      "weight_decay": 1e-4,
      "momentum": 0.5,
    },
    baseline=lambda: optax.sgd(0.5, 0.5),
    needs_params=True,
  ),
  Row(
    "lars",
    {
      "learning_rate": optax.linear_schedule(1.0, 0.0, 500),
      "trust_coefficient": 0.02,
      "momentum": None,
      "clip": 5.0,
    },
    baseline=lambda: optax.sgd(1.0),
    needs_params=True,
    label="plain",
  ),
  Row(
    "centralize",
    {},
    baseline=optax.identity,
    needs_params=False,
    descends=lambda: optax.sgd(0.1),
    reachable=_without_fan_in_mean,
  ),
  Row(
    "svrg",
    {"refresh_every": 2, "coefficient": optax.linear_schedule(1.0, 0.5, 4)},
    baseline=optax.identity,
    needs_params=True,
    descends=lambda: optax.sgd(0.1),
    extra=_gradients_elsewhere,
    bad_values={
      "refresh_every": kinds.count(),
      "coefficient": kinds.number(-1),
    },
  ),
  Row(
    "record_trajectory",
    {"every": 2, "capacity": 2},
    baseline=optax.identity,
    needs_params=True,
    descends=lambda: optax.sgd(0.1),
    static=("capacity",),
    acts=_keeps_the_params_it_saw,
  ),
  Row(
    "dim_reduce",
    {
      "subspace": _three_waves,
      "alpha": 0.05,
      "groups": ("conv", "dense"),
    },
    baseline=lambda: optax.sgd(0.05, momentum=0.9),
    needs_params=True,
    static=("subspace", "max_search"),
    extra=_loss_nearby,
    not_applicable=_SEARCHES_A_LOSS,
  ),
  Row(
    "dim_reduce",
    {"subspace": _three_waves, "inner": optax.sgd(0.1, momentum=0.5), "alpha": 0.05},
    baseline=lambda: optax.sgd(0.1, momentum=0.5),
    needs_params=True,
    static=("subspace", "max_search"),
    extra=_loss_nearby,
    not_applicable=_SEARCHES_A_LOSS,
    label="inner",
  ),
  Row(
    "adasum",
    {"axis_name": "replicas", "shard_axis_name": "x"},
    baseline=optax.identity,
    needs_params=False,
    descends=lambda: optax.sgd(0.1),
    wrap=_on_two_replicas,
    not_applicable={
      "test_a_train_step_in_a_shard_map_that_checks_what_varies_trains_as_on_one_device": (
        "there `shard_map` sums the gradients of replicated params before AdaSum gets them"
      )
    },
  ),
  Row(
    "sgperm",
    {
      "alpha": 0.5,
      "beta1": 1.0,
      "lamda": 0.5,
      "lamda_max": 1.0,
      "momentum": 0.0,
      "partition_size_min": 4,
      "backend": "host",
      "key": 1,
    },
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    start=_reversed,
    gathers=True,
    calls_host=True,
    static=("partition_size_min", "key"),
    not_applicable={
      "test_derivatives_of_steps_are_finite": "JAX takes no derivatives of a callback to the host"
    },
    label="host",
  ),
  Row(
    "sgperm",
    {
      "alpha": 0.5,
      "beta1": 1.0,
      "lamda": 0.5,
      "lamda_max": 1.0,
      "momentum": 0.0,
      "partition_size_min": 4,
      "backend": "device",
      "key": 1,
    },
    # All weight vectors have eight entries, so one search is compiled for all leaves, not three.
    params=functools.partial(problems.params, conv=(2, 2, 2, 8), dense=(8, 16)),
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    start=_reversed,
    gathers=True,
    static=("partition_size_min", "key"),
    label="device",
  ),
  Row(
    "sgperm",
    {"alpha": 0.5, "momentum": 0.0, "method": "rank"},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    start=_reversed,
    gathers=True,
    static=("partition_size_min",),
    label="rank",
  ),
  Row(
    "sgperm",
    {"alpha": 0.5, "momentum": 0.0, "method": "pairs", "key": 1},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    start=_reversed,
    gathers=True,
    static=("partition_size_min", "key"),
    label="pairs",
  ),
  Row(
    "laperm",
    {"inner": optax.sgd(0.1), "sync_every": 20},
    baseline=lambda: optax.sgd(0.1),
    needs_params=True,
    acts=_ends_in_a_permutation,
    start=_reversed,
    gathers=True,
  ),
)


def holders() -> dict[str, Row]:
  """A row for each factory whose transformation holds another one."""
  reports = lambda row: row.form and hasattr(row.form.state_type, "outcome")  # noqa: E731
  rows = {row.factory: row for row in reversed(ROWS) if reports(row)}
  return dict(reversed(rows.items()))


def wrappers() -> dict[str, Row]:
  """A row for each wrapper, which fills a slot of a step."""
  return {name: row for name, row in holders().items() if row.form and row.form.step is not None}


def public_factories() -> set[str]:
  """The public functions that return a transformation."""
  found = set()
  for name in optax_boost.__all__:
    value = getattr(optax_boost, name)
    if inspect.isfunction(value):
      result = inspect.signature(value).return_annotation
      if inspect.isclass(result) and issubclass(result, optax.GradientTransformation):
        found.add(name)
  return found
