"""The train step for Flax NNX models."""

from collections.abc import Callable, Iterable, Sequence
import concurrent.futures
import dataclasses
import inspect
import sys
from typing import Any, TypeAlias, TypeVar
import weakref

from flax import nnx
import jax
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _placement, _tree_checks, _types
from optax_boost.nnx import _loss, _model

# The source of a loss's random numbers.
Rng: TypeAlias = jax.Array | nnx.Rngs | nnx.RngStream
# The rngs of a call: an empty tuple, or a tuple of one entry.
_Rngs: TypeAlias = tuple[nnx.Rngs | nnx.RngStream, ...]
# What `_train_step.placement` returns.
_Shardings: TypeAlias = tuple[jax.sharding.NamedSharding | None, ...]

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Flax's classes of optimizers, of which Flax has deprecated the second.
_OPTIMIZERS = ("Optimizer", "ModelAndOptimizer")
# The name of the Flax contexts that match model, optimizer and rngs before and after a step.
_STEP_CONTEXT = "optax_boost.step"


@dataclasses.dataclass
class _Training:
  """What a step remembers between its calls with one optimizer.

  Attributes:
    tx: the optimizer's transformation at the last check of the optimizer.
    placement: the shardings that a step must keep.
    outputs: the arrays that the last call returned, in the order of Flax's flattening.
  """

  tx: optax.GradientTransformation
  placement: _Shardings
  depths: _train_step.DepthReader
  outputs: Sequence[weakref.ref[jax.Array]] = ()


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`."""

  def __init__(self, computation: _train_step.StepComputation, donate: bool):
    self._computation = computation
    self._donate = donate
    self._jitted = jax.jit(self._step, donate_argnums=(1,) if donate else (), static_argnums=(5, 6))
    self._trainings = weakref.WeakKeyDictionary[nnx.Optimizer, _Training]()

  def __call__(
    self,
    model: _model.Model,
    optimizer: nnx.Optimizer,
    batch: _types.Batch = dataclasses.MISSING,
    rng: Rng | None = None,
  ) -> _types.Metrics:
    """Updates model and optimizer in place; returns the metrics. See :func:`make_train_step`."""
    rngs, settings, steps = self._prepare(model, optimizer, batch, rng)
    training = self._trainings[optimizer]
    try:
      # Like `nnx.jit`, but donates only arrays to which nothing else refers.
      with nnx.update_context(_STEP_CONTEXT):
        graphdefs, arrays = _flatten(model, optimizer, *rngs)
        # A model in the batch may be the trained one, whose arrays have only this second reference.
        held = jax.tree.leaves(batch)
        if self._donate:
          arrays = _copy_shared(arrays, training.outputs)
        graphdefs, arrays, metrics = self._jitted(graphdefs, arrays, *settings)
        del held
        training.outputs = list(map(weakref.ref, jax.tree.leaves(arrays)))
        with nnx.merge_context(_STEP_CONTEXT, inner=False) as context:
          for graphdef, leaves in zip(graphdefs, arrays, strict=True):
            context.unflatten(graphdef, leaves)
    except (TypeError, ValueError):
      _tree_checks.check_traceable("batch", settings[0])
      raise
    training.depths.remember(optimizer.opt_state, settings[3], steps)
    return metrics

  def refresh(
    self,
    model: _model.Model,
    optimizer: nnx.Optimizer,
    batches: Iterable[_types.Batch],
    rng: Rng | None = None,
    *,
    weight_fn: _types.WeightFn | None = None,
    progress: bool = False,
  ) -> None:
    """Renews the snapshot of ``svrg`` in the optimizer with one pass over the data.

    Does not change the model or `rng`. Dropout draws new masks for each batch. See
    :meth:`optax_boost.TrainStep.refresh` for the other arguments.
    """
    computation, state, key = self._checked_state(model, optimizer, rng)
    key = jax.random.key(_loss.PASS_SEED) if key is None else key
    state = _train_step.TrainStep(computation).refresh(
      state, batches, key, weight_fn=weight_fn, progress=progress
    )
    _model.write_opt_state(state.opt_state, optimizer)

  def compile_ahead(
    self,
    model: _model.Model,
    optimizer: nnx.Optimizer,
    batches: Iterable[_types.Batch],
    rng: Rng | None = None,
    *,
    report: _train_step.Report | None = None,
  ) -> concurrent.futures.Future[None]:
    """Compiles the step for several batches, like :meth:`optax_boost.TrainStep.compile_ahead`."""
    return _train_step.compile_for(
      batches, lambda batch: self.lower(model, optimizer, batch, rng), report
    )

  def on_copy(
    self, model: _model.Model, optimizer: nnx.Optimizer, rng: Rng | None = None
  ) -> Callable[[_types.Batch], _types.Metrics]:
    """Returns a function that makes steps on copies, like :meth:`optax_boost.TrainStep.on_copy`."""
    rngs, key = _split_rng(rng)
    model, optimizer, rngs = nnx.clone((model, optimizer, rngs))
    return lambda batch: self(model, optimizer, batch, *(rngs or (key,)))

  def explain(
    self,
    model: _model.Model,
    optimizer: nnx.Optimizer,
    batch: _types.Batch,
    rng: Rng | None = None,
  ) -> dict[str, str]:
    """Says what happens to each leaf's gradient, like :meth:`optax_boost.TrainStep.explain`."""
    explained: dict[str, str] = {}
    computation = dataclasses.replace(self._computation, explained=explained)
    TrainStep(computation, donate=False).lower(model, optimizer, batch, rng)
    return explained

  def lower(
    self,
    model: _model.Model,
    optimizer: nnx.Optimizer,
    batch: _types.Batch,
    rng: Rng | None = None,
  ) -> jax.stages.Lowered:
    """Lowers the step, like ``jax.jit(...).lower``; changes nothing. The batch may be abstract."""
    rngs, settings, _ = self._prepare(model, optimizer, batch, rng)
    with nnx.update_context(_STEP_CONTEXT):
      return self._jitted.lower(*_flatten(model, optimizer, *rngs), *settings)

  def _prepare(
    self, model: _model.Model, optimizer: nnx.Optimizer, batch: _types.Batch, rng: Rng | None
  ) -> tuple[_Rngs, tuple[Any, ...], int]:
    """Returns the arguments of a step, made from the arguments of a call.

    These are the rngs, the arguments of :meth:`_step` after `arrays`, and for how many steps the
    number of frozen groups can't change.

    Before the first step with an optimizer, or with a new ``optimizer.tx``, checks the arguments,
    and gives the arrays of model and optimizer the types and placement that a step returns.
    """
    rngs, key = _split_rng(rng)
    is_new = not isinstance(optimizer, nnx.Optimizer) or optimizer not in self._trainings
    # Tuples are compared by `!=`, since Flax 0.11 replaces `optimizer.tx` by an equal new tuple in
    # each call of the step.
    if is_new or self._trainings[optimizer].tx != optimizer.tx:
      state = self._checked_state(model, optimizer, rng)[1]
      if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        _write_state(state, optimizer)
        _model.write(state.params, state.model_state, model, *rngs)
      depths = _train_step.DepthReader(optimizer.tx)
      placement = _train_step.placement(state)
      self._trainings[optimizer] = _Training(optimizer.tx, placement, depths)
    if batch is dataclasses.MISSING:
      # Else `step(model, batch)` would be answered by a missing `batch`, not by the optimizer.
      raise TypeError("A step needs a batch, too: `step(model, optimizer, batch)`; got none.")
    training = self._trainings[optimizer]
    depth, steps = training.depths.read(optimizer.opt_state)
    return rngs, (batch, key, self._computation.data, depth, training.placement), steps

  def _step(
    self,
    graphdefs: list[nnx.GraphDef],
    arrays: list[list[Any]],
    batch: _types.Batch,
    key: jax.Array | None,
    data: dict[str, _types.Tree],
    depth: int | None,
    placement: _Shardings,
  ) -> tuple[list[nnx.GraphDef], list[list[Any]], _types.Metrics]:
    """Computes a step on the arrays of model, optimizer and rngs; returns their new arrays."""
    with nnx.merge_context(_STEP_CONTEXT, inner=True) as context:
      model, optimizer, *rngs = map(context.unflatten, graphdefs, arrays)
    computation, state = self._split(model, optimizer, tuple(rngs), key)
    # If the model's structure has changed since `placement` was computed, the shardings don't fit
    # the arrays of the state.
    if len(placement) != len(jax.tree.leaves(state)):
      placement = ()
    if key is not None:
      batch = _loss.KeyedBatch(batch)
    elif computation.full_grad_fn is not None:
      data = {**data, "rng": jax.random.key(_loss.PASS_SEED)}
    state, metrics = computation.step(state, batch, key, data, depth, placement)
    _write_state(state, optimizer)
    _model.write(state.params, state.model_state, model, *rngs)
    return *_flatten(model, optimizer, *rngs), metrics

  def _split(
    self, model: _model.Model, optimizer: nnx.Optimizer, rngs: _Rngs, key: jax.Array | None
  ) -> tuple[_train_step.StepComputation, _train_step.TrainState]:
    """Returns the computation of a step, and a train state with the arrays of a call.

    The loss takes a key unless `key` is None.
    """
    structure, params, model_state = _model.split(optimizer.wrt, model, *rngs)
    loss_fn = _loss.pure_loss(
      self._computation.loss_fn, structure, optimizer.wrt, has_key=key is not None
    )
    tx = _checks.check_transformation("optimizer.tx", optimizer.tx)
    computation = dataclasses.replace(self._computation, loss_fn=loss_fn, tx=tx)
    opt_state = _model.as_pure(optimizer.opt_state)
    return computation, _train_step.TrainState(params, opt_state, model_state, optimizer.step[...])

  def _checked_state(
    self, model: _model.Model, optimizer: nnx.Optimizer, rng: Rng | None
  ) -> tuple[_train_step.StepComputation, _train_step.TrainState, jax.Array | None]:
    """Checks the arguments of a call; returns the computation, the train state and the key."""
    rngs, key = _split_rng(rng)
    _model.check(model, tree=True)
    words = "what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns"
    _checks.check_type("optimizer", optimizer, nnx.Optimizer, words)
    _check_update(optimizer)
    holds_model = isinstance(optimizer, getattr(nnx, "ModelAndOptimizer", ()))
    if holds_model and getattr(optimizer, "model", None) is not model:
      raise ValueError(
        "`model` must be the one that the optimizer holds; got another model than"
        " `optimizer.model`. Call `step(optimizer.model, optimizer, batch)`."
      )
    computation, state = self._split(model, optimizer, rngs, key)
    if not jax.tree.leaves(state.params):
      raise ValueError(
        "`optimizer.wrt` must select variables of the model; got"
        f" {_checks.shorten(optimizer.wrt)}, which selects none."
      )
    _tree_checks.check_inexact(state.params, "make_train_step", _tree_checks.KEEP_OUT)
    return computation, _train_step.canonicalize_state(state, computation.tx), key


def _check_update(optimizer: nnx.Optimizer) -> None:
  """Raises TypeError if an optimizer has an `update` of its own, which the step would not call."""
  flax_updates = [getattr(nnx, name).update for name in _OPTIMIZERS if hasattr(nnx, name)]
  if getattr(optimizer.update, "__func__", None) not in flax_updates:
    raise TypeError(
      "`optimizer` must have the `update` of `nnx.Optimizer`, since the step makes this update"
      f" itself; got a {type(optimizer).__name__} with an `update` of its own, which would never be"
      " called. Put what it does to gradients into `optimizer.tx`, with `optax.chain`, and do the"
      " rest after the step, which returns its metrics."
    )


def _flatten(*nodes: Any) -> tuple[list[nnx.GraphDef], list[list[Any]]]:
  """Returns the structure and the arrays of each node.

  ``nnx.cached_partial`` caches each node by itself. A step that flattened all nodes as one tuple
  would not find them in its cache, and would write the new arrays into copies.
  """
  with nnx.split_context(_STEP_CONTEXT) as context:
    parts = [context.flatten(node, with_paths=False) for node in nodes]
  return [graphdef for graphdef, _ in parts], [arrays for _, arrays in parts]


def _copy_shared(arrays: list[Any], outputs: Sequence[weakref.ref[jax.Array]]) -> list[Any]:
  """Returns the arrays of a step, with copies of the arrays that the step must not donate.

  A step donates an array only if the step's last call returned it (`outputs`), and if it has one
  reference: no clone, other model or variable of the user holds it. If most arrays are others than
  `outputs`, as in the first step and after a restore, the step donates those with one reference
  that share their memory with no array. Empties `arrays`, since this list would be a second
  reference.
  """
  leaves, structure = jax.tree.flatten(arrays)
  arrays.clear()
  holder = [object()]
  (unshared,) = _count_references(list(holder))
  references = _count_references(leaves)
  is_own = [False] * len(leaves)
  for i, output in enumerate(outputs[: len(leaves)]):
    is_own[i] = output() is leaves[i]
  if 2 * sum(is_own) < len(leaves):
    is_own = _placement.have_own_memory(leaves)
  for i, leaf in enumerate(leaves):
    if is_own[i] and references[i] == unshared:
      continue
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
      leaves[i] = _placement.copy(leaf)
  return jax.tree.unflatten(structure, leaves)


def _count_references(values: list[Any]) -> list[int]:
  """Returns the number of references to each value, including the one in the list `values`."""
  return [sys.getrefcount(value) for value in values]


def _write_state(state: _train_step.TrainState, optimizer: nnx.Optimizer) -> None:
  _model.write_opt_state(state.opt_state, optimizer)
  nnx.update(optimizer, {"step": state.step})


def _split_rng(rng: Any) -> tuple[_Rngs, jax.Array | None]:
  """Returns the argument `rng` as ``(rngs, key)``: ``((rng,), None)`` or ``((), rng)``."""
  if isinstance(rng, _model.RNG_TYPES):
    return (rng,), None
  if not (rng is None or hasattr(rng, "dtype")):
    raise TypeError(
      "`rng` must be a key, an `nnx.Rngs`, one of its streams, or None; got"
      f" {_checks.shorten(rng)}."
    )
  return (), rng


def _with_keywords_of(core: Callable[..., Any], *without: str) -> Callable[[_Function], _Function]:
  """Returns a decorator that changes the signature that ``help`` shows of a function.

  The signature gets the keyword-only arguments of `core`, except those named in `without`, instead
  of ``**options``. It also loses ``*args``, which the function takes only to raise a clear error.
  """

  def decorate(function: _Function) -> _Function:
    signature = inspect.signature(function)
    shown = {
      name: parameter
      for name, parameter in signature.parameters.items()
      if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    for name, parameter in inspect.signature(core).parameters.items():
      if parameter.kind is parameter.KEYWORD_ONLY and name not in {*shown, *without}:
        shown[name] = parameter
    function.__signature__ = signature.replace(parameters=list(shown.values()))  # type: ignore
    return function

  return decorate


@_with_keywords_of(_train_step.make_train_step, "has_model_state")
def make_train_step(loss_fn: _types.LossFn, *_optimizers: Any, **options: Any) -> TrainStep:
  """Makes a jitted train step for NNX models, like :func:`optax_boost.make_train_step`.

  The forward pass at the current params updates statistics and rng counts. The trial points of a
  line search use the same dropout masks and change nothing.

  Other writes of the forward pass take effect as with ``nnx.jit``. If the forward pass writes
  trained variables (``nnx.WeightNorm``, weight clipping), the update is added to the written
  values. If it creates variables (``sow``) or sets attributes, the model keeps them, and the next
  step compiles again. So pop intermediates after the step or in the loss.

  Args:
    loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(model, batch, rng)`` if the step is called with
      a key or with ``nnx.Rngs``. Returns the scalar loss, or ``(loss, aux)``. Pass a second model
      (a teacher, the other half of a GAN) in the batch, as a module or an ``nnx.State``, which are
      trees of arrays to JAX; each step reads its current values. The loss must not change the
      second model, so put it into evaluation mode.
    **options: the keywords of :func:`optax_boost.make_train_step` except `has_model_state`. The
      step always calls ``full_grad_fn(grad_fn, params, rng=key)``, and ``grad_fn(params, batch,
      key)`` takes pure trees of params. The key moves all rng streams, and a loss that takes a key
      gets it.

  Returns:
    The step, which updates model and optimizer in place. Call ``metrics = step(model, optimizer,
    batch)`` or ``metrics = step(model, optimizer, batch, rng)``. `rng` is a key, into which the
    step folds ``optimizer.step``; or ``nnx.Rngs`` or one of its streams, whose counts grow by the
    draws of one forward pass.
    The step donates the old arrays of model and optimizer to which nothing else refers. It copies
    arrays that a clone, another model or a variable of yours holds.
    ``step.refresh(model, optimizer, batches)``, ``step.lower(model, optimizer, batch)``,
    ``step.compile_ahead(model, optimizer, batches)`` and ``step.on_copy(model, optimizer)`` do what
    they do in :class:`optax_boost.TrainStep`. One step can train any number of models, in turns or
    in several threads, but two threads must not train the same model. Values and structure of model
    and optimizer may change between steps.

  Raises:
    TypeError: an argument is of the wrong kind; the optimizer has an `update` of its own, which the
      step would not call; or, when traced, the loss returns neither a scalar
      nor ``(loss, aux)``.
    ValueError: the optimizer was made for another model, or its filter selects no variable of this
      model; or, when traced, the loss creates, removes or reshapes trained variables, or changes an
      NNX object of the batch.

  Examples:
    >>> from flax import nnx
    >>> import jax, jax.numpy as jnp, optax, optax_boost.nnx
    >>> model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.lbfgs(), wrt=nnx.Param)
    >>> def loss_fn(model, batch):
    ...   return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> step = optax_boost.nnx.make_train_step(loss_fn)
    >>> batch = {"x": jnp.eye(3), "y": jnp.arange(3.0)[:, None]}
    >>> for _ in range(8):
    ...   metrics = step(model, optimizer, batch)
    >>> bool(metrics["loss"] < 1e-3)
    True

    Dropout that draws from rngs passed in each call, as in Flax's guide on randomness:

    >>> dropout, rngs = nnx.Dropout(0.5), nnx.Rngs(dropout=1)
    >>> def noisy_loss(model, batch, rngs):
    ...   return jnp.mean((model(dropout(batch["x"], rngs=rngs)) - batch["y"]) ** 2)
    >>> step = optax_boost.nnx.make_train_step(noisy_loss)
    >>> metrics = step(model, optimizer, batch, rngs)
    >>> int(rngs.dropout.count[...])
    1
  """
  _checks.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  if _optimizers or "tx" in options:
    raise TypeError(
      "`optax_boost.nnx.make_train_step` takes the loss, and options as keywords; got also"
      f" {_checks.shorten(_optimizers[0] if _optimizers else options['tx'])}. Pass a transformation"
      " to the optimizer, `optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)`, and call"
      " `step(model, optimizer, batch)`."
    )
  if callable(weight := options.get("weight")):
    options["weight"] = lambda batch: weight(_loss.user_batch(batch))
  # `optax.identity()` is a placeholder, which each call of the step replaces by `optimizer.tx`.
  step = _train_step.make_train_step(loss_fn, optax.identity(), **options)
  computation = dataclasses.replace(step.computation, has_model_state=True)
  return TrainStep(computation, options.get("donate", True))
