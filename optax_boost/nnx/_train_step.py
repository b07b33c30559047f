"""The train step for Flax NNX models."""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import inspect
import sys
from typing import Any, TypeAlias, TypeVar
import weakref

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from optax_boost import _train_step
from optax_boost._foundation import _checks, _tree_checks, _types
from optax_boost.nnx import _batch, _loss, _model

# The source of a loss's random numbers.
Rng: TypeAlias = jax.Array | nnx.Rngs | nnx.RngStream

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Names the contexts in which Flax finds model, optimizer and rngs again after a step.
_STEP_CONTEXT = "optax_boost.step"


@dataclasses.dataclass
class _OptimizerRecord:
  """What a step knows of the training of one optimizer.

  Attributes:
    tx: the optimizer's transformation, when it was checked.
    placement: where the arrays of the training lie.
    depths: reads how many groups the next step freezes.
    made: the arrays that the last call returned, in the order of Flax's flattening.
  """

  tx: optax.GradientTransformation
  placement: Any
  depths: _train_step.DepthReader
  made: Sequence[weakref.ref[Any]] = ()


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`."""

  def __init__(self, program: _train_step.Program, donate: bool):
    self._program = program
    self._donate = donate
    self._jitted = jax.jit(self._step, donate_argnums=(1,) if donate else (), static_argnums=(5, 6))
    self._trainings: weakref.WeakKeyDictionary[Any, _OptimizerRecord] = weakref.WeakKeyDictionary()

  def __call__(
    self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Rng | None = None
  ) -> _types.Metrics:
    """Makes one step, in place; arguments as :func:`make_train_step` says."""
    rngs, settings, steps = self._settings(model, optimizer, batch, rng)
    training = self._trainings[optimizer]
    try:
      # As `nnx.jit` does, which can't tell which arrays it may donate.
      with nnx.update_context(_STEP_CONTEXT):
        with nnx.split_context(_STEP_CONTEXT) as context:
          graphdef, arrays = context.flatten((model, optimizer, rngs), with_paths=False)
        if self._donate:
          arrays = _copy_shared(arrays, training.made)
        graphdef, arrays, metrics = self._jitted(graphdef, arrays, *settings)
        training.made = list(map(weakref.ref, jax.tree.leaves(arrays)))
        with nnx.merge_context(_STEP_CONTEXT, inner=False) as context:
          context.unflatten(graphdef, arrays)
    except (TypeError, ValueError):
      _tree_checks.check_traceable("batch", settings[0])
      raise
    training.depths.follow(optimizer.opt_state, settings[3], steps)
    return metrics

  def refresh(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batches: Iterable[Any],
    rng: Rng | None = None,
    *,
    weight_fn: _types.WeightFn | None = None,
    progress: bool = False,
  ) -> None:
    """Renews the snapshot of ``svrg`` in the optimizer with one pass over the data.

    As :meth:`optax_boost.TrainStep.refresh`. The model and `rng` stay as they are. Dropout draws
    masks of its own for each batch.
    """
    program, state, key = self._open(model, optimizer, rng)
    batches = _batch.close_all(batches)
    if callable(weight_fn):
      weight_fn = _batch.on_user_batch(weight_fn)
    key = jax.random.key(_loss.PASS_SEED) if key is None else key
    state = _train_step.TrainStep(program).refresh(
      state, batches, key, weight_fn=weight_fn, progress=progress
    )
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))

  def lower(self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Rng | None = None) -> Any:
    """Lowers the step for inspection, like ``jax.jit(...).lower``; changes nothing.

    Arguments as for a step; the batch may be abstract.
    """
    rngs, settings, _ = self._settings(model, optimizer, batch, rng)
    with nnx.update_context(_STEP_CONTEXT):
      with nnx.split_context(_STEP_CONTEXT) as context:
        graphdef, arrays = context.flatten((model, optimizer, rngs), with_paths=False)
      return self._jitted.lower(graphdef, arrays, *settings)

  def _settings(
    self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Any
  ) -> tuple[tuple[Any, ...], tuple[Any, ...], int]:
    """The rngs of a call, the arguments of :meth:`_step` after the arrays, and a number of steps.

    For so many steps it is known that the number of frozen groups stays.
    An optimizer that is new is checked, and brought into the form that a step returns.
    """
    rngs, key = _split_rng(rng)
    is_new = not isinstance(optimizer, nnx.Optimizer) or optimizer not in self._trainings
    # By equality: Flax 0.11 rebuilds the tuple in each call.
    if is_new or self._trainings[optimizer].tx != optimizer.tx:
      state = self._open(model, optimizer, rng)[1]
      if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        _write_state(state, optimizer)
        _model.write(state.params, state.model_state, model, *rngs)
      depths = _train_step.DepthReader(optimizer.opt_state)
      placement = _train_step.placement(state)
      self._trainings[optimizer] = _OptimizerRecord(optimizer.tx, placement, depths)
    training = self._trainings[optimizer]
    depth, steps = training.depths.read(optimizer.opt_state)
    batch = _batch.close(batch)
    return rngs, (batch, key, self._program.data, depth, training.placement), steps

  def _step(
    self,
    graphdef: nnx.GraphDef,
    arrays: list[Any],
    batch: _types.Tree,
    key: jax.Array | None,
    data: dict[str, _types.Tree],
    depth: int | None,
    placement: Any,
  ) -> tuple[Any, list[Any], _types.Metrics]:
    """One step on the arrays of model, optimizer and rngs, which it returns."""
    with nnx.merge_context(_STEP_CONTEXT, inner=True) as context:
      model, optimizer, rngs = context.unflatten(graphdef, arrays)
    program, state = self._split(model, optimizer, rngs, key)
    # The model has another structure than when the places were looked up.
    if len(placement) != len(jax.tree.leaves(state)):
      placement = ()
    if key is not None:
      batch = _batch.KeyedBatch(batch)
    elif program.full_grad_fn is not None:
      data = {**data, "rng": jax.random.key(_loss.PASS_SEED)}
    state, metrics = program.step(state, batch, key, data, depth, placement)
    _write_state(state, optimizer)
    _model.write(state.params, state.model_state, model, *rngs)
    with nnx.split_context(_STEP_CONTEXT) as context:
      graphdef, arrays = context.flatten((model, optimizer, rngs), with_paths=False)
    return graphdef, arrays, metrics

  def _split(
    self, model: Any, optimizer: nnx.Optimizer, rngs: tuple[Any, ...], key: jax.Array | None
  ) -> tuple[_train_step.Program, _train_step.TrainState]:
    """The program for this model, and its state."""
    graphdef, params, model_state = _model.split(optimizer.wrt, model, *rngs)
    loss_fn = _loss.pure_loss(
      self._program.loss_fn, graphdef, optimizer.wrt, has_key=key is not None
    )
    tx = _checks.check_transformation("optimizer.tx", optimizer.tx)
    program = dataclasses.replace(self._program, loss_fn=loss_fn, tx=tx)
    opt_state = _model.as_pure(optimizer.opt_state)
    return program, _train_step.TrainState(params, opt_state, model_state, optimizer.step[...])

  def _open(
    self, model: Any, optimizer: nnx.Optimizer, rng: Any
  ) -> tuple[_train_step.Program, _train_step.TrainState, jax.Array | None]:
    """The program for this model, its state and a key, after checks."""
    rngs, key = _split_rng(rng)
    _model.check(model, tree=True)
    words = "what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns"
    _checks.check_type("optimizer", optimizer, nnx.Optimizer, words)
    program, state = self._split(model, optimizer, rngs, key)
    if not jax.tree.leaves(state.params):
      raise ValueError(
        "`optimizer.wrt` must select variables of the model; got"
        f" {_checks.shorten(optimizer.wrt)}, which selects none."
      )
    _tree_checks.check_inexact(state.params, "make_train_step", _tree_checks.KEEP_OUT)
    return program, _train_step.canonicalize_state(state), key


def _copy_shared(arrays: list[Any], made: Sequence[weakref.ref[Any]]) -> Any:
  """Copies the arrays that a step may not donate: those that anything else may hold.

  A step may donate what its last call `made`, if nothing but a variable refers to it: neither a
  clone of the model, nor another model that was given its arrays, nor the user. Takes the arrays
  out of the list `arrays`, which would count as a reference.
  """
  leaves, structure = jax.tree.flatten(arrays)
  arrays.clear()
  holder = [object()]
  (unshared,) = _count_references(list(holder))
  for i, references in enumerate(_count_references(leaves)):
    leaf = leaves[i]
    is_made = i < len(made) and made[i]() is leaf
    if is_made and references == unshared:
      continue
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
      continue
    # One process alone may hold an array that lies over several, which all would have to copy.
    if not is_made or leaf.is_fully_addressable:
      leaves[i] = jnp.array(leaf)
  return jax.tree.unflatten(structure, leaves)


def _count_references(values: list[Any]) -> list[int]:
  return [sys.getrefcount(value) for value in values]


def _write_state(state: _train_step.TrainState, optimizer: nnx.Optimizer) -> None:
  nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
  nnx.update(optimizer, {"step": state.step})


def _split_rng(rng: Any) -> tuple[tuple[Any, ...], jax.Array | None]:
  """The rngs that a loss draws from, and the key of a step."""
  if isinstance(rng, _model.RNG_TYPES):
    return (rng,), None
  if not (rng is None or hasattr(rng, "dtype")):
    raise TypeError(
      "`rng` must be a key, an `nnx.Rngs`, one of its streams, or None; got"
      f" {_checks.shorten(rng)}."
    )
  return (), rng


def _with_keywords_of(core: Callable[..., Any], *without: str) -> Callable[[_Function], _Function]:
  """Shows, in a function's signature, the keywords of `core` in place of its ``**options``.

  Its ``*args`` are not shown: it takes them to refuse them.
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
  """Makes a jitted train step for NNX: :func:`optax_boost.make_train_step` for models.

  Statistics and rng counts come from the one forward pass at the current params; trial points of a
  line search see the same dropout masks and change nothing.

  Other writes of the forward pass take effect as with ``nnx.jit``. An update starts from trained
  variables as the forward pass leaves them (``nnx.WeightNorm``, weight clipping). The model keeps
  variables that the forward pass creates, such as ``sow``'s, and attributes that it sets;
  the next step then compiles again, so pop intermediates, after the step or in the loss.

  Args:
    loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(model, batch, rng)`` if the step is called with
      a key or with ``nnx.Rngs``. Returns the scalar loss, or ``(loss, aux)``. A second model (a
      teacher, the other half of a GAN) goes into the batch, as a module or an ``nnx.State``: the
      step reads its present values. The loss must not change it, so put it into evaluation mode.
    **options: as in :func:`optax_boost.make_train_step`, no `has_model_state`; `full_grad_fn` is
      always called as ``full_grad_fn(grad_fn, params, rng=key)``, with ``grad_fn(params, batch,
      key)`` for pure trees of params; the key moves all rng streams, and is handed to a loss that
      takes one.

  Returns:
    The step, called as ``metrics = step(model, optimizer, batch)`` or ``metrics = step(model,
    optimizer, batch, rng)``, which updates model and optimizer in place. It donates their old
    arrays if its last call made them and nothing else holds them; it copies those that a clone,
    another model or a variable of yours holds. `rng` is a key, into which the number of the step
    (``optimizer.step``) is folded; or ``nnx.Rngs``, or one of its streams, whose counts go on by
    the draws of one forward pass.
    ``step.refresh(model, optimizer, batches)`` and ``step.lower(model, optimizer, batch)`` are as
    in :class:`optax_boost.TrainStep`. One step serves any number of models, in turns or from
    several threads at once, but two threads must not train the same model. Model and optimizer may
    change between steps, in values and in structure.

  Raises:
    TypeError: an argument is of the wrong kind; when traced: the loss returns something else.
    ValueError: when called: the optimizer was made for another model, or for no variable of this
      one; when traced: the loss creates, removes or reshapes trained variables, or changes an
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

    Dropout from rngs that are passed with each call, as in Flax's guide on randomness:

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
      "`optax_boost.nnx.make_train_step` takes the loss alone, and options as keywords; got"
      f" {_checks.shorten(_optimizers[0] if _optimizers else options['tx'])}, too. A transformation"
      " belongs to the optimizer, which each step is called with: `optimizer = nnx.Optimizer(model,"
      " tx, wrt=nnx.Param)`, `step(model, optimizer, batch)`."
    )
  if callable(weight := options.get("weight")):
    options["weight"] = _batch.on_user_batch(weight)
  # The transformation is known with the model only.
  step = _train_step.make_train_step(loss_fn, optax.identity(), **options)
  program = dataclasses.replace(step.program, has_model_state=True)
  return TrainStep(program, options.get("donate", True))
