"""``make_train_step``, and :class:`TrainStep`, the jitted train step that it returns."""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost._form import _protocol
from optax_boost._foundation import (
  _checks,
  _full_gradient,
  _paths,
  _placement,
  _tree_checks,
  _types,
)
from optax_boost._trace import _losses
from optax_boost._train_step import (
  _background_compilation,
  _frozen_depth,
  _metrics,
  _replaced_values,
  _state_placement,
  _step_computation,
  _train_state,
)


class TrainStep:
  """A jitted train step; made by :func:`make_train_step`."""

  def __init__(self, computation: _step_computation.StepComputation, donate: bool = True):
    self.computation = computation
    self._step = jax.jit(computation.step, static_argnums=(4, 5))
    # `jax.grad` through a step reads the arrays of the old state again, after the step.
    self._traced_step = self._step
    if donate:
      self._step = jax.jit(computation.step, donate_argnums=0, static_argnums=(4, 5))
    self._depth = _frozen_depth.DepthReader(computation.tx)

  def init(
    self,
    params: optax.Params,
    model_state: _types.ModelState = None,
    *,
    opt_state_sharding: _types.ShardingFn | None = None,
  ) -> _train_state.TrainState:
    """Makes the initial state from copies of the arrays, since the first step donates the state.

    Args:
      params: the initial params. Params that are sharded over a mesh keep their sharding. Params
        may be abstract (``jax.ShapeDtypeStruct``).
      model_state: the initial mutable statistics, if the loss takes statistics.
      opt_state_sharding: a function from a ``jax.ShapeDtypeStruct`` to a sharding, which places
        each array of the optimizer state (ZeRO-1). None: as the params.

    Returns:
      A :class:`TrainState`. If `params` are abstract, the state is abstract, too; restore a
      checkpoint into it. An array of the optimizer state with a param's path and shape, also behind
      leading axes, gets the param's sharding. All other arrays are replicated over the mesh of the
      params.

    Raises:
      TypeError: a leaf is not an array; a param is not floating-point; the params are an
        ``optax.LookaheadParams``, an NNX model with variables other than params, or hold Linen's
        collection of values that the gradient replaces; or the loss takes statistics, and
        `model_state` is None; or it takes none, and `model_state` has arrays.
    """
    if isinstance(params, optax.LookaheadParams):
      raise TypeError(
        "`params` must be the tree that the loss takes; got an optax.LookaheadParams. For"
        " `optax.lookahead` write the step with"
        " `optax_boost.apply_gradients(tx, grads, opt_state, params)`."
      )
    _tree_checks.check_traceable("params", params)
    _tree_checks.check_traceable("model_state", model_state)
    _check_variables(params)
    _checks.check_callable(
      "opt_state_sharding", opt_state_sharding, "opt_state_sharding(x)", optional=True
    )
    if self.computation.has_model_state and model_state is None:
      raise TypeError(
        "`step.init` needs the mutable statistics that the loss takes: `step.init(params,"
        " model_state)`."
      )
    if not self.computation.has_model_state and jax.tree.leaves(model_state):
      raise TypeError(
        "`step.init` takes `model_state` for a loss with mutable statistics; this loss takes none,"
        f" got {_checks.shorten(model_state)}. Leave it out, `step.init(params)`, or pass"
        " `has_model_state=True` to `make_train_step`, for `loss_fn(params, model_state, batch)`."
      )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((params, model_state))):
      state = jax.eval_shape(self.init, params, model_state)
      tx = self.computation.tx
      return _state_placement.place_abstract(state, params, model_state, tx, opt_state_sharding)
    params, model_state = jax.tree.map(_placement.copy, (params, model_state))
    _tree_checks.check_inexact(params, "make_train_step", _tree_checks.KEEP_OUT)
    place = functools.partial(_state_placement.put, sharding_of=opt_state_sharding)
    # The optimizer makes its state where the params are, so no device holds more than its part.
    opt_state = self.computation.tx.init(jax.tree.map(place, params))
    places = _state_placement.by_leaf(opt_state_sharding, self.computation.tx, opt_state)
    leaves, structure = jax.tree.flatten(opt_state)
    del opt_state
    # The optimizer may close over arrays of its state. In a loop, so that each array that only the
    # state holds is freed when it is copied.
    for i, leaf in enumerate(leaves):
      leaves[i] = _state_placement.put(_placement.copy(leaf), places[i])
      del leaf
    opt_state = jax.tree.unflatten(structure, leaves)
    state = _train_state.TrainState(params, opt_state, model_state, jnp.zeros([], jnp.int32))
    return _state_placement.canonicalize_state(state, self.computation.tx)

  def __call__(
    self,
    state: _train_state.TrainState,
    batch: _types.Batch = dataclasses.MISSING,
    rng: jax.Array | None = None,
  ) -> tuple[_train_state.TrainState, _types.Metrics]:
    """Makes one step; `state` is donated and must not be used afterwards.

    Args:
      state: the current state.
      batch: a tree of arrays, which is passed to the loss unchanged.
      rng: a key, or None if the loss takes no key. The step folds ``state.step`` into the key. If
        you pass the same key at every step, a resumed run draws the same numbers.

    Returns:
      The new state, and a dict of metrics, which has ``loss``, ``aux`` if the loss has aux, and
      what the methods report (``trust_ratio``, ``loss_scale``, ``lars/notfinite_count``, ...). If
      two methods report the same name, the second is called, for example, ``trust_ratio_1``.
    """
    _check_call(state, rng)
    if batch is dataclasses.MISSING:
      raise TypeError(
        "A step needs a batch, too: `step(state, batch)`; got none. For a loss without data call"
        " `step(state, None)`, and write the loss as `loss_fn(params, batch)`."
      )
    try:
      depth, steps = self._depth.read(state.opt_state)
      placed = _state_placement.commit_like(state, (batch, rng))
      placement = _state_placement.placement(placed)
      step = self._traced_step if _is_traced(state.params, batch, rng) else self._step
      state, metrics = step(placed, batch, rng, self.computation.data, depth, placement)
    except (RuntimeError, ValueError) as error:
      _explain_deleted(error, state=state, batch=batch, rng=rng)
      raise
    except TypeError:
      _tree_checks.check_traceable("batch", batch)
      raise
    self._depth.remember(state.opt_state, depth, steps)
    return state, metrics

  def refresh(
    self,
    state: _train_state.TrainState,
    batches: Iterable[_types.Batch],
    rng: jax.Array | None = None,
    *,
    weight_fn: _types.WeightFn | None = None,
    progress: bool = False,
  ) -> _train_state.TrainState:
    """Returns the state with a new :func:`svrg` snapshot, from a pass that changes no statistics.

    Args:
      state: the current state; don't use it afterwards, since the new state shares its arrays.
      batches: an iterable of batches for the loss; see :func:`full_gradient`.
      rng: a key, or None if the loss takes no key. ``state.step`` and the number of the batch are
        folded into the key.
      weight_fn: a function from a padded batch to the number of its real examples.
      progress: whether to show a progress bar; needs ``tqdm``.

    Raises:
      ValueError: the optimizer has no ``svrg``, there is no batch, or batches differ in structure.
    """
    _check_call(state, rng)
    gradient = jax.tree_util.Partial(self.computation.gradient, state.model_state)
    try:
      if rng is not None:
        _checks.check_key("rng", rng)
        rng = jax.random.fold_in(rng, state.step)
      full = _full_gradient.full_gradient(
        gradient, state.params, batches, rng=rng, weight_fn=weight_fn, progress=progress
      )
    except (RuntimeError, ValueError) as error:
      _explain_deleted(error, state=state)
      raise
    return _state_placement.canonicalize_state(
      state._replace(opt_state=_protocol.renew_full_gradients(state.opt_state, state.params, full)),
      self.computation.tx,
    )

  def compile_ahead(
    self,
    state: _train_state.TrainState,
    batches: Iterable[_types.Batch],
    rng: jax.Array | None = None,
    *,
    report: _background_compilation.Report | None = None,
  ) -> concurrent.futures.Future[None]:
    """Compiles the step in the background for batches of several shapes, while training goes on.

    JAX compiles a program for each shape of a batch. This method traces the programs and returns; a
    thread meanwhile compiles them one after the other. If a step needs a program that is not ready,
    the step waits. The programs freeze as many layers as a step with `state` does.

    Args:
      state: the state of the next step; it is read, not donated.
      batches: a list with a batch of each shape, as for a step, in the order in which the training
        needs them. Before the first step, begin with its batch: else its program is compiled beside
        the others, and is ready later. Batches may be abstract.
      rng: a key, if the step is called with a key.
      report: a function, such as ``print``, that the thread calls with a line of text when it
        begins to compile a program.

    Returns:
      A future that is done when all programs are compiled. Its ``result()`` raises an error if XLA
      failed.

    Raises:
      TypeError: `batches` is a single batch.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_boost
      >>> step = optax_boost.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = step.init(jnp.ones(3))
      >>> compiled = step.compile_ahead(state, [jnp.ones((4, 3)), jnp.ones((8, 3))])
      >>> state, _ = step(state, jnp.ones((4, 3)))  # waits for the first program only
      >>> compiled.result()
      >>> state, _ = step(state, jnp.ones((8, 3)))  # compiles nothing
    """
    _train_state.check_train_state(state)

    def lower(batch: _types.Batch) -> jax.stages.Lowered:
      return self.lower(_state_placement.commit_like(state, (batch, rng)), batch, rng)

    return _background_compilation.compile_for(batches, lower, report)

  def on_copy(
    self, state: _train_state.TrainState, rng: jax.Array | None = None
  ) -> Callable[[_types.Batch], tuple[_train_state.TrainState, _types.Metrics]]:
    """Returns a function of a batch that makes steps like this one on a copy of `state`.

    With it, :func:`length_prices` and :meth:`AutoBoost.measure` time steps before a training. The
    function has a state of its own, so calls train the copy on.

    Args:
      state: the state of the next step, which is copied, and not donated.
      rng: a key, if the step is called with a key.

    Examples:
      >>> import jax.numpy as jnp, optax, optax_boost
      >>> step = optax_boost.make_train_step(lambda w, x: jnp.mean((x @ w) ** 2), optax.sgd(0.1))
      >>> state = step.init(jnp.ones(3))
      >>> copy, _ = step.on_copy(state)(jnp.eye(3))
      >>> int(copy.step), int(state.step)
      (1, 0)
    """
    copy = jax.tree.map(_placement.copy, state)

    def step(batch: _types.Batch) -> tuple[_train_state.TrainState, _types.Metrics]:
      nonlocal copy
      copy, metrics = self(copy, batch, rng)
      return copy, metrics

    return step

  def explain(
    self, state: _train_state.TrainState, batch: _types.Batch, rng: jax.Array | None = None
  ) -> dict[str, str]:
    """Says for each leaf of the params whether its gradient exists as a whole, and why.

    The arguments are as for a step, and may be abstract. Nothing is computed.

    Returns:
      A sentence for each leaf, by its path.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, optax_boost
      >>> def loss_fn(params, x):
      ...   x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])
      ...   return jnp.mean((x @ params["head"]) ** 2)
      >>> step = optax_boost.make_train_step(loss_fn, optax.adamw(1e-3), update_in_backward=True)
      >>> state = step.init({"head": jnp.ones(8), "layers": jnp.ones((4, 8, 8))})
      >>> for leaf, text in step.explain(state, jnp.ones((2, 8))).items():
      ...   print(f"{leaf}: {text}")
      head: updated after the backward pass, since `dot_general` uses it outside of a scan
      layers: updated in the backward pass, layer by layer
    """
    _check_call(state, rng)
    explained: dict[str, str] = {}
    step = dataclasses.replace(self.computation, explained=explained).step
    depth, _ = self._depth.read(state.opt_state)
    trace = functools.partial(step, depth=depth)
    jax.eval_shape(trace, state, batch, rng, self.computation.data)
    return explained

  def lower(
    self, state: _train_state.TrainState, batch: _types.Batch, rng: jax.Array | None = None
  ) -> jax.stages.Lowered:
    """Lowers the step for inspection, like ``jax.jit(...).lower``.

    The arguments are as for a step, and may be abstract. The program freezes as many layers as a
    step with `state` does. For a compiled program that you can call like a step, use
    ``jax.jit(step).lower(state, batch)``. In that program, frozen layers save no time.
    """
    _check_call(state, rng)
    depth, _ = self._depth.read(state.opt_state)
    placement = _state_placement.placement(state)
    try:
      return self._step.lower(state, batch, rng, self.computation.data, depth, placement)
    except TypeError:
      _tree_checks.check_traceable("batch", batch)
      raise


def _is_traced(*arguments: _types.Tree) -> bool:
  """Returns whether an array in the arguments is traced, as by ``jax.grad`` or ``jax.vmap``."""
  types = set(map(type, jax.tree.leaves(arguments)))
  return any(issubclass(type_, jax.core.Tracer) for type_ in types)


def _check_variables(params: _types.Unchecked) -> None:
  """Raises TypeError for Flax variables that are not trained; does not import Flax."""
  if _replaced_values.find(params):
    raise TypeError(
      "`params` must be the arrays that are trained; got the collection"
      f" '{_replaced_values.REPLACED_VALUES}', too, whose values the gradient replaces. Keep it in"
      " the model state, as `optax_boost.linen.split_loss` does."
    )
  _tree_checks.refuse_other_variables(params)


def _check_call(state: _types.Unchecked, rng: _types.Unchecked) -> None:
  _train_state.check_train_state(state)
  # An array is checked in `StepComputation.step`. That check runs only while the step is traced, so
  # it takes no time in later calls.
  if rng is not None and not isinstance(rng, jax.Array):
    _checks.check_key("rng", rng)


def _explain_deleted(error: Exception, **arguments: _types.Tree) -> None:
  """Raises ValueError if deleted arrays in an argument explain the `error` of a step."""
  for name, tree in arguments.items():
    for path, leaf in zip(_paths.leaf_paths(tree), jax.tree.leaves(tree), strict=True):
      if isinstance(leaf, jax.core.Tracer) or not getattr(leaf, "is_deleted", bool)():
        continue
      advice = " Don't donate it to a program before the step."
      if name == "state":
        advice = (
          " Use the state that the last step returned, or make the step with `donate=False` to use"
          " a state twice."
        )
      raise ValueError(
        f"`{name}` must hold arrays that exist; the leaf '{path or name}' was donated or"
        f" deleted.{advice}"
      ) from error


def make_train_step(
  loss_fn: _types.LossFn,
  tx: optax.GradientTransformation,
  *,
  has_aux: bool = False,
  has_model_state: bool = False,
  full_grad_fn: _types.Closure | None = None,
  donate: bool = True,
  hold_frozen_statistics: bool = True,
  weight: str | _types.WeightFn | None = None,
  metrics: Sequence[str] = (),
  update_in_backward: bool = False,
) -> TrainStep:
  """Makes a jitted train step for any optax transformation.

  The step passes `value`, `grad`, `value_fn` and `grad_fn` to ``tx.update``, so line searches
  (``optax.lbfgs``), ``optax.contrib.reduce_on_plateau`` and the methods of this package work
  without further code. For complex params, the step conjugates the gradients of ``jax.grad``, so
  that minus the gradient is a direction of descent.

  Args:
    loss_fn: ``loss_fn(params, batch)``, or ``loss_fn(params, batch, rng)`` if the step is called
      with a key. It returns the scalar loss, or ``(loss, aux)``.
    tx: the transformation.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    has_model_state: whether the loss has mutable statistics. The step then calls
      ``loss_fn(params, model_state, batch[, rng])``, which returns ``(loss, model_state)``, or,
      with `has_aux`, ``(loss, (model_state, aux))``. Not needed for a loss from ``nnx.split_loss``
      or ``linen.split_loss``. In the collection ``_overwrite_with_gradient``, where Flax's fp8
      layers keep their scales, the gradient of the loss, times the loss scale if there is one, is
      the new value.
    full_grad_fn: computes the mean gradient over all of the data, for ``svrg(refresh_every=n)``.
      The step calls ``full_grad_fn(grad_fn, params)``, where ``grad_fn(params, batch)`` is the
      gradient of the loss. If the step has a key, it calls ``full_grad_fn(grad_fn, params,
      rng=key)``, and the gradient is ``grad_fn(params, batch, key)``. Bind the data as in
      ``functools.partial(full_gradient, stacked=True, batches=data)``, since arrays that a partial
      binds are arguments of the compiled step, not constants.
    donate: whether the new state reuses the memory of the old one.
    hold_frozen_statistics: whether the mutable statistics of frozen layers do not change. A
      statistic belongs to the layer whose params have the same path, without ``params`` or
      ``batch_stats`` in front. Without such a path, a statistic is frozen if the loss computes it
      from no trained param. A count, of batches for example, is frozen with the statistics of its
      module that are computed from it; other integers always change.
    weight: the weight of a batch in :func:`accumulate`, such as its number of real examples or
      tokens: the name of an entry of the loss's aux, or a function of the batch. None: all batches
      count equally.
    metrics: names of metrics that the step computes only if they are named here.
      ``"gradient_norm"``: the global norm of the gradient of ``metrics["loss"]``, in float32,
      without the loss scale, and before any clipping. In :func:`accumulate` it is the
      micro-batch's; frozen layers don't count; a skipped step has its norm, too, which may be NaN.
      ``"learning_rate"``: the rate of the last step that the optimizer made, read from the state of
      ``optax.inject_hyperparams``. If there are several rates, the second is ``learning_rate_1``.
    update_in_backward: whether the backward pass of a scan over layers updates each layer as soon
      as its gradient is known, so that the gradients of the scan never exist at once. Params and
      state are the same, but random numbers that the optimizer draws for each entry are others.
      The optimizer must treat each layer by itself, as AdamW does. See :meth:`TrainStep.explain`.

  Returns:
    A :class:`TrainStep`, whose ``init(params)`` returns the state for ``step(state, batch)``.

  Raises:
    TypeError: when traced, if the loss does not return what the options say.
    ValueError: when called, if the state has several loss scales or several :func:`freeze_layers`,
      or lacks the learning rate that `metrics` names; or, with `update_in_backward`, if the
      optimizer needs the gradients of several layers at once, as for their global norm.

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
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
  tx = _checks.check_transformation("tx", tx)
  options: dict[str, Any] = {
    "has_aux": has_aux,
    "has_model_state": has_model_state,
    "hold_frozen_statistics": hold_frozen_statistics,
    "weight": weight,
    "metrics": _metrics.check_names(metrics),
    "update_in_backward": update_in_backward,
  }
  for name in ("has_aux", "has_model_state", "hold_frozen_statistics", "update_in_backward"):
    _checks.check_bool(name, options[name])
  _checks.check_bool("donate", donate)
  _checks.check_callable(
    "full_grad_fn", full_grad_fn, "full_grad_fn(grad_fn, params)", optional=True
  )
  if not (weight is None or callable(weight) or (isinstance(weight, str) and has_aux)):
    raise TypeError(
      "`weight` must be a function of the batch, or the name of an entry of the loss's aux, with"
      f" has_aux=True; got {_checks.shorten(weight)}."
    )
  options["has_model_state"] |= _losses.is_stateful(loss_fn)
  full_grad_fn, data = _bound_arrays(full_grad_fn)
  computation = _step_computation.StepComputation(loss_fn, tx, full_grad_fn, data, **options)
  return TrainStep(computation, donate)


def _bound_arrays(
  function: _types.Closure | None,
) -> tuple[_types.Closure | None, dict[str, _types.Tree]]:
  """Separates a ``functools.partial`` from the arrays that it binds by name; returns both.

  The step takes the arrays as arguments. In the partial, they would be constants of the compiled
  step. A `function` that is not a partial is returned with an empty dict.
  """
  if not isinstance(function, functools.partial):
    return function, {}
  arrays: dict[str, _types.Tree] = {}
  static: dict[str, Any] = {}
  for name, value in function.keywords.items():
    leaves = jax.tree.leaves(value)
    if leaves and all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves):
      arrays[name] = jax.tree.map(jnp.asarray, value)
    else:
      static[name] = value
  return functools.partial(function.func, *function.args, **static), arrays
