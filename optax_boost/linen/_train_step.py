"""The train step for Flax Linen modules."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import Literal

from flax import linen as nn
import jax
import optax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _train_step


class BoundModel:
  """A Linen module with its variables, as the loss sees it.

  Calls are ``module.apply`` with the params, statistics and rngs of this step. Statistics that a
  call changes are seen by the next call.
  """

  def __init__(self, module: nn.Module, params: Any, collections: Any, rngs: dict[str, jax.Array]):
    _check_module(module)
    for name, value in (("collections", collections), ("rngs", rngs)):
      if not isinstance(value, Mapping):
        raise TypeError(f"`{name}` must be a dict by name; got {_base.shorten(value)}.")
    self._module = module
    self._params = params
    self._rngs = rngs
    self._calls = 0
    self.collections = dict(collections)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Applies the module.

    Args:
      *args: the module's arguments.
      **kwargs: the module's keyword arguments, and `method`.

    Returns:
      What the module returns.
    """
    # Two calls within one loss draw different masks.
    rngs = {name: jax.random.fold_in(rng, self._calls) for name, rng in self._rngs.items()}
    self._calls += 1
    output, changed = self._module.apply(
      {"params": self._params, **self.collections},
      *args,
      rngs=rngs,
      mutable=list(self.collections),
      **kwargs,
    )
    self.collections |= changed
    return output


class TrainStep:
  """A jitted train step for a Linen module; made by :func:`make_train_step`."""

  def __init__(self, step: _train_step.TrainStep):
    self._step = step

  def init(self, variables: Any) -> _train_step.TrainState:
    """Makes the state to start from.

    Args:
      variables: what ``module.init`` returned: the collection ``params``, and others (BatchNorm's
        ``batch_stats``), which are carried as mutable statistics. They are copied.

    Returns:
      A :class:`optax_boost.TrainState`, the other collections in its `model_state`.

    Raises:
      TypeError: `variables` is no mapping.
      ValueError: `variables` has no collection ``params``.
    """
    return self._step.init(*_split_variables(variables))

  def __call__(
    self, state: _train_step.TrainState, batch: Any, rng: jax.Array | None = None
  ) -> tuple[_train_step.TrainState, _train_step.Metrics]:
    """Makes one step; `state` is donated and must not be used afterwards.

    Args:
      state: the current state.
      batch: a tree of arrays, handed to the loss as it is.
      rng: a key, from which the module's rng streams are made, or None. The step number is folded
        in, so the same key may be passed at every step.

    Returns:
      The new state and the metrics, as :class:`optax_boost.TrainStep` does.

    Raises:
      TypeError: an argument is of the wrong kind.
    """
    _check_state(state)
    return self._step(state, batch, rng)

  def refresh(
    self,
    state: _train_step.TrainState,
    batches: Iterable[Any],
    rng: jax.Array | None = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    progress: bool = False,
  ) -> _train_step.TrainState:
    """Renews the snapshot of ``svrg`` with one pass over the data, between two steps.

    Args:
      state: the current state; the new one shares its arrays, so don't use it afterwards.
      batches: an iterable of batches; see :func:`optax_boost.full_gradient`.
      rng: a key for the module's rng streams, or None; each batch draws masks of its own.
      weight_fn: from a batch to the number of its real examples, for padded batches.
      progress: whether to show a progress bar; needs ``tqdm``.

    Returns:
      The state to go on with, its statistics unchanged.
    """
    _check_state(state)
    return self._step.refresh(state, batches, rng, weight_fn=weight_fn, progress=progress)

  def lower(self, state: _train_step.TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Lowers the step for inspection, like ``jax.jit(...).lower``.

    Args:
      state: a state, or abstract values of one.
      batch: a batch, or abstract values.
      rng: a key, or None.

    Returns:
      A ``jax.stages.Lowered``.
    """
    _check_state(state)
    return self._step.lower(state, batch, rng)

  def trace(self, state: _train_step.TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Traces the step for inspection, like ``jax.jit(...).trace``.

    Args:
      state: a state, or abstract values of one.
      batch: a batch, or abstract values.
      rng: a key, or None.

    Returns:
      A ``jax.stages.Traced``, whose `jaxpr` is the step's program.
    """
    _check_state(state)
    return self._step.trace(state, batch, rng)

  def cache_size(self) -> int:
    """The number of programs that were compiled: one, or one per depth where groups are frozen."""
    return self._step.cache_size()


def variables(state: _train_step.TrainState) -> dict[str, Any]:
  """The variables of a state, for ``module.apply``.

  Args:
    state: a state made by this module's train step.

  Returns:
    The params and the other collections.

  Raises:
    TypeError: `state` is no state of a train step.
  """
  _check_state(state)
  return {"params": state.params, **state.model_state}


def make_train_step(
  module: nn.Module,
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  rngs: Sequence[str] = ("dropout",),
  has_aux: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  donate: bool = True,
  freezing: Literal["auto", "per_depth", "switch"] = "auto",
  hold_frozen_statistics: bool = True,
  extra_metrics: Sequence[str] = (),
) -> TrainStep:
  """Makes a jitted train step for Linen that feeds any optax transformation.

  ``tx.update`` receives `value`, `grad`, `value_fn` and `grad_fn`. Statistics come from the one
  forward pass at the current params; trial points of a line search see the same dropout masks and
  change nothing.

  Args:
    module: the Linen module.
    loss_fn: ``loss_fn(model, batch)``, where ``model(x, ...)`` applies the module; returns the
      scalar loss, or ``(loss, aux)``.
    tx: the transformation.
    rngs: the names of the module's rng streams.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    full_grad_fn: the mean gradient over all of the data, for ``svrg(refresh_every=n)``; see
      :func:`optax_boost.make_train_step`.
    donate: whether the old state's memory is reused for the new one.
    freezing: how the backward pass of what :func:`optax_boost.freeze` freezes is skipped; see
      :func:`optax_boost.make_train_step`.
    hold_frozen_statistics: whether the statistics of frozen layers stand still.
    extra_metrics: ``"grad_norm"`` and ``"learning_rate"``, on request; see
      :func:`optax_boost.make_train_step`.

  Returns:
    A :class:`TrainStep`: ``state = step.init(module.init(key, x))``, then
    ``state, metrics = step(state, batch, key)``.

  Raises:
    TypeError: an argument is of the wrong kind; when traced: the loss returns something else.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax, optax_boost.linen
    >>> module = nn.Dense(1)
    >>> def loss_fn(model, batch):
    ...   return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> step = optax_boost.linen.make_train_step(module, loss_fn, optax.lbfgs())
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)[:, None]}
    >>> state = step.init(module.init(jax.random.key(0), batch["x"]))
    >>> for _ in range(8):
    ...   state, metrics = step(state, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True
  """
  _check_module(module)
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  rngs = _stream_names(rngs)

  def pure_loss(params: Any, collections: Any, batch: Any, rng: jax.Array | None = None) -> Any:
    model = BoundModel(module, params, collections, keys(rng, rngs))
    output = loss_fn(model, batch)
    return _train_step.with_model_state(output, model.collections, has_aux)

  return TrainStep(
    _train_step.make_train_step(
      pure_loss,
      tx,
      has_aux=has_aux,
      has_model_state=True,
      full_grad_fn=full_grad_fn,
      donate=donate,
      freezing=freezing,
      hold_frozen_statistics=hold_frozen_statistics,
      extra_metrics=extra_metrics,
    )
  )


def _check_module(module: Any) -> None:
  if not isinstance(module, nn.Module):
    raise TypeError(
      "`module` must be a Linen module, as `nn.Dense(1)`; got"
      f" {_base.shorten(module)}. For NNX modules there is `optax_boost.nnx`."
    )


def _check_state(state: Any) -> None:
  if not isinstance(state, _train_step.TrainState):
    raise TypeError(
      "`state` must be a TrainState: what `step.init(variables)` or the step before returned; got"
      f" {_base.shorten(state)}."
    )


def _split_variables(variables: Any) -> tuple[Any, dict[str, Any]]:
  """The params, and the other collections."""
  if not isinstance(variables, Mapping):
    raise TypeError(
      "`variables` must be the mapping that `module.init` returned; got"
      f" {_base.shorten(variables)}."
    )
  if "params" not in variables:
    raise ValueError(
      "`variables` must be what `module.init` returned, with a collection 'params'; got"
      f" {sorted(map(str, variables))}."
    )
  return variables["params"], {name: v for name, v in variables.items() if name != "params"}


def _stream_names(rngs: Any) -> tuple[str, ...]:
  sequence = isinstance(rngs, Sequence) and not isinstance(rngs, str)
  if not (sequence and all(isinstance(name, str) for name in rngs)):
    raise TypeError(
      "`rngs` must be a sequence of names of rng streams, as ('dropout',); got"
      f" {_base.shorten(rngs)}."
    )
  return tuple(rngs)


def keys(rng: jax.Array | None, names: Sequence[str]) -> dict[str, jax.Array]:
  if rng is None:
    return {}
  return dict(zip(names, jax.random.split(rng, len(names)), strict=True))


def layer_groups(
  module: nn.Module,
  loss_fn: Callable[..., Any],
  variables: Any,
  batch: Any,
  rng: jax.Array | None = None,
  *,
  rngs: Sequence[str] = ("dropout",),
  num_groups: int = 10,
  overrides: Mapping[str, int] | None = None,
  data: _base.LeafSelector = None,
) -> _groups.LayerGroups:
  """Groups a module's params along the forward pass: :func:`optax_boost.layer_groups` for Linen.

  Collections other than ``params`` are no data.

  Args:
    module: the Linen module.
    loss_fn: ``loss_fn(model, batch)``, as for :func:`make_train_step`.
    variables: what ``module.init`` returned.
    batch: a batch.
    rng: a key, if the module draws.
    rngs: the names of the module's rng streams.
    num_groups: how many groups.
    overrides: group by regular expression.
    data: which leaves of `batch` are data: a tree of bools with its structure or a prefix of it,
      regular expressions, searched in their paths, or a callable from `batch` to such a tree;
      None: all of them.

  Returns:
    A :class:`optax_boost.LayerGroups`.

  Raises:
    ValueError: as :func:`optax_boost.layer_groups`; or `variables` has no collection ``params``.
    TypeError: as :func:`optax_boost.layer_groups`; or `module` is no Linen module.

  Examples:
    >>> from flax import linen as nn
    >>> import jax, jax.numpy as jnp, optax_boost.linen
    >>> module, x = nn.Sequential([nn.Dense(4), nn.Dense(1)]), jnp.ones((2, 3))
    >>> loss_fn = lambda model, x: jnp.mean(model(x))
    >>> variables = module.init(jax.random.key(0), x)
    >>> print(optax_boost.linen.layer_groups(module, loss_fn, variables, x, num_groups=2))
    group 0: 16 parameters (76.2 %): layers_0/kernel, layers_0/bias
    group 1: 5 parameters (23.8 %), never frozen: layers_1/kernel, layers_1/bias
  """
  _check_module(module)
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  params, collections = _split_variables(variables)
  rngs = _stream_names(rngs)
  if rng is not None:
    _base.check_key("rng", rng)

  def pure_loss(params: Any, collections: Any, batch: Any, rng: jax.Array | None) -> Any:
    return loss_fn(BoundModel(module, params, collections, keys(rng, rngs)), batch)

  return _groups.group_by_use(
    pure_loss,
    params,
    collections,
    (batch, rng),
    num_groups=num_groups,
    overrides=overrides,
    is_data=[*_groups.select_data(batch, data), *[False] * len(jax.tree.leaves(rng))],
  )
