"""A train step that hands every method what it needs.

Line searches, variance reduction and freezing need more than a gradient. optax passes that as
extra arguments of ``update``; this module makes them, once, for any chain:

  value              the loss at the current params
  grad               its gradient there
  value_fn(params)   the loss elsewhere, on the same batch, rng and mutable statistics
  grad_fn(params)    the gradient elsewhere, likewise
  full_grad_fn(params)
                     the mean gradient over all of the data, where the caller says how

Where the optimizer state holds a `loss_scale`, the two gradients are those of the loss times it;
the values are of the loss itself. Where it holds a `group_loss_scale`, each group's gradients are
multiplied by the group's.

Where it holds a number of `frozen_groups`, their backward pass is not computed.

The closures cost nothing unless a transformation calls them, and what they compute on the side
(aux, new statistics) is dropped: those come from the one forward pass at the current params.
"""

from collections.abc import Callable
from collections.abc import Iterable
import functools
import inspect
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _freezing
from optax_boost import _groups
from optax_boost import _precision
from optax_boost import _svrg

Metrics: TypeAlias = dict[str, Any]

# State fields that are reported, by the name under which every method keeps them.
METRIC_NAMES = (
  "accepted_rho",
  "curvature",
  "explained_gradient",
  "group_loss_scale",
  "line_search_steps",
  "loss_scale",
  "notfinite_count",
  "orthogonality",
  "rejected_count",
  "trust_ratio",
  "variance_ratio",
)


class TrainState(NamedTuple):
  """What training carries from step to step; a tree, to be saved and restored whole.

  Attributes:
    params: the trainable arrays.
    opt_state: the transformation's state.
    model_state: mutable statistics (BatchNorm) that the loss returns anew, or None.
    step: scalar int32, the number of steps made.
  """

  params: optax.Params
  opt_state: optax.OptState
  model_state: Any
  step: jax.Array


class TrainStep:
  """A jitted train step; made by :func:`make_train_step`."""

  def __init__(
    self,
    step: Callable[..., tuple[TrainState, Metrics]],
    tx: optax.GradientTransformation,
    gradient: Callable[..., Any],
    data: dict[str, Any],
    freezing: _freezing.Execution = "auto",
  ):
    self._step = step
    self._tx = tx
    self._gradient = gradient
    self._data = data
    self._freezing = freezing
    self._depths = _freezing.HostDepths()

  def init(self, params: optax.Params, model_state: Any = None) -> TrainState:
    """Makes the state to start from.

    Params and statistics are copied: the first step donates the state, and the caller's arrays
    stay usable. Params that are sharded over a mesh keep their sharding.

    Args:
      params: the initial params.
      model_state: the initial mutable statistics, if the loss takes any.

    Returns:
      A :class:`TrainState`.
    """
    params, model_state = jax.tree.map(jnp.array, (params, model_state))
    state = TrainState(params, self._tx.init(params), model_state, jnp.zeros([], jnp.int32))
    return settle(state)

  def __call__(
    self, state: TrainState, batch: Any, rng: jax.Array | None = None
  ) -> tuple[TrainState, Metrics]:
    """Makes one step; `state` is donated and must not be used afterwards.

    Args:
      state: the current state.
      batch: a tree of arrays, handed to the loss as it is.
      rng: a key, or None if the loss takes none. The step number is folded in, so the same key
        may be passed at every step, and a run that resumes draws what it would have drawn.

    Returns:
      The new state, and the metrics: ``loss``, ``aux`` if the loss has any, and what the methods
      keep in their state (``trust_ratio``, ...). A name that occurs in several states gets a
      number: ``trust_ratio_0``, ``trust_ratio_1``.
    """
    state, metrics = self._step(state, batch, rng, self._data, self._depth(state))
    self._depths.made_step(state.opt_state)
    return state, metrics

  def refresh(
    self,
    state: TrainState,
    batches: Iterable[Any],
    rng: jax.Array | None = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    progress: bool = False,
  ) -> TrainState:
    """Renews the snapshot of :func:`svrg` with one pass over the data, between two steps.

    The statistics that the loss returns are dropped. The pass takes the gradients of one batch
    after the other, so the data need not fit into memory.

    Args:
      state: the current state; the new one shares its arrays, so don't use it afterwards.
      batches: an iterable of batches as the loss takes them; see :func:`full_gradient`.
      rng: a key, or None if the loss takes none. The step number is folded in, and the number of
        the batch.
      weight_fn: from a batch to the number of its real examples, for padded batches.
      progress: whether to show a progress bar; needs ``tqdm``.

    Returns:
      The state to go on with.

    Raises:
      ValueError: the optimizer has no ``svrg``, there is no batch, or a tree does not fit.
    """
    if rng is not None:
      rng = jax.random.fold_in(rng, state.step)
    gradient = jax.tree_util.Partial(self._gradient, state.model_state)
    full = _svrg.full_gradient(
      gradient, state.params, batches, rng=rng, weight_fn=weight_fn, progress=progress
    )
    return settle(state._replace(opt_state=_svrg.refresh_svrg(state.opt_state, state.params, full)))

  def lower(self, state: TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Lowers the step for inspection, like ``jax.jit(...).lower``.

    Args:
      state: a state, or abstract values of one.
      batch: a batch, or abstract values.
      rng: a key, or None.

    Returns:
      A ``jax.stages.Lowered``.
    """
    depth = self._depth(state)
    return self._step.lower(state, batch, rng, self._data, depth)  # type: ignore[attr-defined]

  def trace(self, state: TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Traces the step for inspection, like ``jax.jit(...).trace``.

    Args:
      state: a state, or abstract values of one.
      batch: a batch, or abstract values.
      rng: a key, or None.

    Returns:
      A ``jax.stages.Traced``, whose `jaxpr` is the step's program.
    """
    depth = self._depth(state)
    return self._step.trace(state, batch, rng, self._data, depth)  # type: ignore[attr-defined]

  def cache_size(self) -> int:
    """The number of programs that were compiled: one, or one per depth where groups are frozen."""
    return self._step._cache_size()  # type: ignore[attr-defined]

  def _depth(self, state: TrainState) -> int | None:
    """How many groups are frozen, where the host can know it; it chooses the compiled step."""
    if self._freezing == "switch":
      return None

    def schedule() -> Any:
      return _groups.ask(self._tx, state.params)["freeze"].depth_at

    return self._depths.next(state.opt_state, schedule)


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  has_aux: bool = False,
  has_model_state: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  donate: bool = True,
  freezing: _freezing.Execution = "auto",
  hold_frozen_statistics: bool = True,
) -> TrainStep:
  """Makes a jitted train step that feeds any optax transformation.

  ``tx.update`` receives `value`, `grad`, `value_fn` and `grad_fn`, so that line searches
  (``optax.lbfgs``), ``optax.contrib.reduce_on_plateau`` and our own methods work unwired.

  Args:
    loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)`` if the step is called
      with a key. Returns the scalar loss, or ``(loss, aux)``.
    tx: the transformation.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    has_model_state: whether the loss carries mutable statistics. It is then called as
      ``loss_fn(params, model_state, batch[, rng])`` and returns ``(loss, model_state)``, with
      `has_aux` ``(loss, (model_state, aux))``.
    full_grad_fn: the mean gradient over all of the data, for ``svrg(refresh_every=n)``: called as
      ``full_grad_fn(grad_fn, params)``, with ``grad_fn(params, batch)`` the gradient of the loss
      with this step's statistics; if the step is called with a key, as ``full_grad_fn(grad_fn,
      params, rng=key)``, with ``grad_fn(params, batch, key)``. Of a ``functools.partial``, bound
      arrays are handed to the compiled step as arguments, not built into it:
      ``functools.partial(scan_full_gradient, batches=data)``.
    donate: whether the old state's memory is reused for the new one.
    freezing: how the backward pass of what :func:`freeze` freezes is skipped. ``"per_depth"``: by
      a compiled step for each number of frozen groups, made when it first occurs; the host counts
      along to know it, but where :func:`freeze` stands in a wrapper other than ``optax.chain`` it
      reads it from the state, which waits for the step before. ``"switch"``: by a conditional
      inside one compiled step, which takes as long to compile as all of them. ``"auto"``: per
      depth; inside your own ``jit`` or ``scan``, where only a conditional can do it, the switch,
      but on a CPU not for convolutions, whose gradients it makes slower than no freezing at all (a
      warning says so).
    hold_frozen_statistics: whether the mutable statistics of frozen layers stand still.

  Returns:
    A :class:`TrainStep`: ``state = step.init(params)``, ``state, metrics = step(state, batch)``.

  Raises:
    TypeError: `loss_fn` is not callable or `tx` is no transformation; when traced: the loss
      returns something else than it was said to.
    ValueError: `freezing` is unknown; when called: the state holds several loss scales, or
      several :func:`freeze`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> def loss_fn(params, batch):
    ...   return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> batch = {"x": jnp.eye(3), "y": jnp.array([1.0, 2.0, 3.0])}
    >>> step = optax_boost.make_train_step(loss_fn, optax.lbfgs())
    >>> state = step.init({"w": jnp.zeros(3)})
    >>> for _ in range(5):
    ...   state, metrics = step(state, batch)
    >>> bool(metrics["loss"] < 1e-6), int(state.step)
    (True, 5)
  """
  if not callable(loss_fn):
    raise TypeError(f"`loss_fn` must be callable; got {loss_fn!r}.")
  if full_grad_fn is not None and not callable(full_grad_fn):
    raise TypeError(f"`full_grad_fn` must be callable or None; got {full_grad_fn!r}.")
  if not isinstance(tx, optax.GradientTransformation):
    raise TypeError(
      f"`tx` must be an optax.GradientTransformation; got {tx!r}. Did you pass the factory"
      " instead of what it returns?"
    )

  if freezing not in ("auto", "per_depth", "switch"):
    raise ValueError(f"`freezing` must be 'auto', 'per_depth' or 'switch'; got {freezing!r}.")

  full_grad_fn, data = _bound_arrays(full_grad_fn)

  def gradient(model_state: Any, params: optax.Params, batch: Any, *rngs: jax.Array) -> Any:
    """The gradient of the loss alone, on any batch."""
    stats = (model_state,) if has_model_state else ()

    def loss(params: optax.Params) -> jax.Array:
      return _split_output(loss_fn(params, *stats, batch, *rngs), has_aux, has_model_state)[0]

    return jax.grad(loss)(params)

  def step_fn(
    state: TrainState,
    batch: Any,
    rng: jax.Array | None,
    data: dict[str, Any],
    depth: int | None = None,
  ) -> tuple[TrainState, Metrics]:
    rngs = () if rng is None else (jax.random.fold_in(rng, state.step),)
    stats = (state.model_state,) if has_model_state else ()

    def forward(params: optax.Params) -> tuple[jax.Array, tuple[Any, Any]]:
      return _split_output(loss_fn(params, *stats, batch, *rngs), has_aux, has_model_state)

    # optax's line searches refuse extra arguments that `value_fn` does not name.
    def value_fn(params: optax.Params, grad_fn: Any = None, full_grad_fn: Any = None) -> jax.Array:
      del grad_fn, full_grad_fn
      return forward(params)[0]

    scale = _loss_scale(state.opt_state)

    group_scale = _group_loss_scale(state.opt_state)
    frozen_groups = _frozen_groups(state.opt_state)
    told = {}
    if frozen_groups is not None or group_scale is not None:
      told = _groups.ask(tx, state.params)
    found, scaled_groups = told.get("freeze"), told.get("group_loss_scale")

    def objective(params: optax.Params) -> tuple[jax.Array, Any]:
      value, rest = forward(params)
      return value, (value, rest)

    def scaled(params: optax.Params) -> tuple[jax.Array, Any]:
      if scaled_groups is None or group_scale is None:
        value, rest = objective(params)
      else:
        numbers = scaled_groups.numbers(params)
        value, rest = _precision.scaled_objective(objective, params, numbers, group_scale)
      # In float32: a float16 loss times its scale would overflow.
      return value if scale is None else value.astype(jnp.float32) * scale, rest

    old_opt_state = state.opt_state
    if found is None:
      differentiate = jax.grad(scaled, has_aux=True)
    else:
      if depth is not None:
        frozen_groups = depth
        # A constant in the state: nothing is computed for frozen leaves in `update` either.
        old_opt_state = optax.tree.set(old_opt_state, frozen_groups=np.int32(depth))
      differentiate = _freezing.cut_gradient(scaled, found, frozen_groups, freezing)

    # What is differentiated carries the scale, here as at the current params.
    def grad_fn(params: optax.Params) -> optax.Updates:
      return differentiate(params)[0]

    grad, (value, (model_state, aux)) = differentiate(state.params)
    extra = {"value": value, "grad": grad, "value_fn": value_fn, "grad_fn": grad_fn}
    if full_grad_fn is not None:
      extra["full_grad_fn"] = functools.partial(
        full_grad_fn,
        functools.partial(gradient, state.model_state),
        **data,
        **({"rng": rngs[0]} if rngs else {}),
      )
    updates, opt_state = tx.update(
      grad, old_opt_state, state.params, **_understood(tx.update, extra)
    )
    params = optax.apply_updates(state.params, updates)
    metrics = {"loss": value, **state_metrics(opt_state)}
    if found is not None:
      # Of this step; the new state holds the next one's.
      metrics["frozen_groups"] = jnp.asarray(frozen_groups, jnp.int32)
      if hold_frozen_statistics:
        model_state = _freezing.hold_statistics(
          state.model_state, model_state, state.params, found, frozen_groups
        )
    if has_aux:
      metrics["aux"] = aux
    new_state = TrainState(params, opt_state, model_state, state.step + 1)
    return jax.tree.map(_strong, new_state), metrics

  jitted = jax.jit(step_fn, donate_argnums=(0,) if donate else (), static_argnums=4)
  return TrainStep(jitted, tx, gradient, data, freezing)


def _asked_of_the_loss(opt_state: optax.OptState, field: str, what: str, method: str) -> Any:
  """A state field by which the optimizer asks something of the loss, or None."""
  found = [value for _, value in optax.tree.get_all_with_path(opt_state, field)]
  if len(found) > 1:
    raise ValueError(
      f"`make_train_step` needs one {what}; the optimizer state holds {len(found)}. Put one"
      f" `{method}` around the whole optimizer."
    )
  return found[0] if found else None


def _frozen_groups(opt_state: optax.OptState) -> Any:
  """How many groups of leaves the optimizer freezes in the next step."""
  return _asked_of_the_loss(opt_state, "frozen_groups", "`freeze`", "freeze")


def _loss_scale(opt_state: optax.OptState) -> jax.Array | None:
  """What the optimizer asks the loss to be multiplied by before it is differentiated."""
  return _asked_of_the_loss(opt_state, "loss_scale", "loss scale", "dynamic_loss_scale")


def _group_loss_scale(opt_state: optax.OptState) -> jax.Array | None:
  """What it asks the gradients of each group to be multiplied by on their way back."""
  return _asked_of_the_loss(opt_state, "group_loss_scale", "`group_loss_scale`", "group_loss_scale")


def _bound_arrays(function: Callable[..., Any] | None) -> tuple[Any, dict[str, Any]]:
  """Takes arrays out of a ``functools.partial``, so that jit need not treat them as constants."""
  if not isinstance(function, functools.partial):
    return function, {}
  data: dict[str, Any] = {}
  rest: dict[str, Any] = {}
  for name, value in function.keywords.items():
    leaves = jax.tree.leaves(value)
    arrays = leaves and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    (data if arrays else rest)[name] = jax.tree.map(jnp.asarray, value) if arrays else value
  return functools.partial(function.func, *function.args, **rest), data


def _split_output(output: Any, has_aux: bool, has_model_state: bool) -> tuple[Any, tuple[Any, Any]]:
  """Brings what a loss returns into the form ``loss, (model_state, aux)``."""
  expected = "loss"
  if has_aux and has_model_state:
    expected = "(loss, (model_state, aux))"
  elif has_model_state:
    expected = "(loss, model_state)"
  elif has_aux:
    expected = "(loss, aux)"
  parts = expected.count(",")
  if parts and not (isinstance(output, tuple) and len(output) == 2):
    raise TypeError(f"`loss_fn` must return {expected}; got {_kind(output)}.")
  if parts == 2 and not (isinstance(output[1], tuple) and len(output[1]) == 2):
    raise TypeError(f"`loss_fn` must return {expected}; got (loss, {_kind(output[1])}).")
  rest: Any = None
  loss, rest = output if parts else (output, None)
  if not hasattr(loss, "shape") or jnp.shape(loss) != ():
    hint = "" if has_aux else " If it returns aux as well, pass has_aux=True."
    raise TypeError(
      f"`loss_fn` must return {expected} with a scalar loss; got {_kind(loss)} as the loss."
      f" Take the mean over the batch.{hint}"
    )
  if has_aux and has_model_state:
    return loss, rest
  model_state, aux = (rest, None) if has_model_state else (None, rest)
  return loss, (model_state, aux)


def with_model_state(output: Any, model_state: Any, has_aux: bool) -> Any:
  """Adds the new statistics to what a loss without them returned.

  Args:
    output: the loss, or ``(loss, aux)``.
    model_state: the statistics after the forward pass.
    has_aux: which of the two `output` is.

  Returns:
    ``(loss, model_state)`` or ``(loss, (model_state, aux))``.

  Raises:
    TypeError: `output` is no pair though `has_aux` says so.
  """
  if not has_aux:
    return output, model_state
  loss, (_, aux) = _split_output(output, has_aux, False)
  return loss, (model_state, aux)


def _kind(value: Any) -> str:
  if hasattr(value, "shape"):
    return f"an array of shape {value.shape}"
  if isinstance(value, tuple):
    return f"a tuple of length {len(value)}"
  return f"a {type(value).__name__}"


def _understood(update: Callable[..., Any], extra: dict[str, Any]) -> dict[str, Any]:
  """Those of the extra arguments that `update` takes; some of optax's methods refuse others."""
  parameters = inspect.signature(update).parameters.values()
  if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
    return extra
  return {p.name: extra[p.name] for p in parameters if p.name in extra}


def state_metrics(opt_state: optax.OptState) -> Metrics:
  """Collects the diagnostics that methods keep in their state.

  Args:
    opt_state: the state of any chain.

  Returns:
    Values by name; a name that occurs several times is numbered.
  """
  metrics: Metrics = {}
  for name in METRIC_NAMES:
    found = [value for _, value in optax.tree.get_all_with_path(opt_state, name)]
    if len(found) == 1:
      metrics[name] = found[0]
    else:
      metrics |= {f"{name}_{i}": value for i, value in enumerate(found)}
  return metrics


def settle(state: TrainState) -> TrainState:
  """Makes a fresh state look like the one that a step returns, so that nothing recompiles.

  Weak types are removed, and what the optimizer state adds is replicated over the mesh of the
  params. An array that occurs twice is copied, as donation demands: some of optax's states hold
  the params themselves, and tied weights occur twice.

  Args:
    state: a state that was put together outside of a step.

  Returns:
    The state, each of its arrays a buffer of its own.
  """
  arrays = [p for p in jax.tree.leaves(state.params) if isinstance(p, jax.Array)]
  # Inside a trace there is no placement to ask for.
  shardings = [p.sharding for p in arrays if not isinstance(p, jax.core.Tracer)]
  meshes = [s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)]
  replicated = meshes and jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())
  seen: set[int] = set()

  def settled(leaf: Any) -> jax.Array:
    leaf = _strong(leaf)
    if replicated and not isinstance(leaf.sharding, jax.sharding.NamedSharding):
      leaf = jax.device_put(leaf, replicated)
    if id(leaf) in seen:
      leaf = jnp.array(leaf)
    seen.add(id(leaf))
    return leaf

  return jax.tree.map(settled, state)


def _strong(leaf: Any) -> jax.Array:
  # Typed PRNG keys have no weak type.
  if isinstance(leaf, jax.Array) and not getattr(leaf, "weak_type", False):
    return leaf
  return jnp.asarray(leaf, jnp.result_type(leaf))
