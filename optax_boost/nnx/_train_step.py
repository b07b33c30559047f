"""The train step for Flax NNX models."""

from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
from typing import Any
from typing import TypeAlias
import weakref

from flax import nnx
import jax
import optax

from optax_boost import _base
from optax_boost import _protocol
from optax_boost import _train_step
from optax_boost import _tree
from optax_boost.nnx import _adapter

# The source of a loss's random numbers.
Rng: TypeAlias = jax.Array | nnx.Rngs | nnx.RngStream


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`."""

  def __init__(self, program: _train_step.Program, donate: bool):
    self._program = program
    donated = (0, 1, 2) if donate else ()
    self._jitted = nnx.jit(self._step, donate_argnums=donated, static_argnums=(6, 7))
    # Each optimizer's transformation, where the arrays of its training lie, and how to read the
    # number of frozen groups.
    self._seen: weakref.WeakKeyDictionary[Any, tuple[Any, Any, Any]] = weakref.WeakKeyDictionary()

  def __call__(
    self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Rng | None = None
  ) -> _train_step.Metrics:
    """Makes one step, in place; arguments as :func:`make_train_step` says."""
    arguments = self._arguments(model, optimizer, batch, rng)
    try:
      return self._jitted(*arguments)
    except (TypeError, ValueError) as error:
      _explain(error, self._open(model, optimizer, rng)[1], optimizer, batch)
      raise

  def refresh(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batches: Iterable[Any],
    rng: Rng | None = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    progress: bool = False,
  ) -> None:
    """Renews the snapshot of ``svrg`` in the optimizer with one pass over the data.

    As :meth:`optax_boost.TrainStep.refresh`. The model and `rng` stay as they are. Dropout draws
    masks of its own for each batch.
    """
    program, state, key = self._open(model, optimizer, rng)
    key = jax.random.key(_adapter.PASS_SEED) if key is None else key
    state = _train_step.TrainStep(program).refresh(
      state, batches, key, weight_fn=weight_fn, progress=progress
    )
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))

  def lower(self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Rng | None = None) -> Any:
    """Lowers the step for inspection, like ``jax.jit(...).lower``; changes nothing.

    Arguments as for a step; the batch may be abstract.
    """
    return self._jitted.lower(*self._arguments(model, optimizer, batch, rng))

  def _arguments(
    self, model: Any, optimizer: nnx.Optimizer, batch: Any, rng: Any
  ) -> tuple[Any, ...]:
    """The arguments of a step; an optimizer that is new is checked, and brought into its form."""
    rngs, key = _split_rng(rng)
    is_new = not isinstance(optimizer, nnx.Optimizer) or optimizer not in self._seen
    if is_new or self._seen[optimizer][0] is not optimizer.tx:
      state = self._open(model, optimizer, rng)[1]
      if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        _write_state(state, optimizer)
        _adapter.write(state.params, state.model_state, model, *rngs)
      reader = _protocol.request_reader(optimizer.opt_state, _protocol.FROZEN_GROUPS)
      self._seen[optimizer] = optimizer.tx, _train_step.placement(state), reader
    _, placement, frozen_groups = self._seen[optimizer]
    depth = _train_step.known_depth(frozen_groups(optimizer.opt_state))
    return model, optimizer, rngs, batch, key, self._program.data, depth, placement

  def _step(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    rngs: tuple[Any, ...],
    batch: Any,
    key: jax.Array | None,
    data: dict[str, Any],
    depth: int | None,
    placement: Any,
  ) -> _train_step.Metrics:
    """One step on a model whose arrays are traced."""
    _adapter.check_batch(batch)
    program, state = self._split(model, optimizer, rngs, key)
    if len(placement) != len(jax.tree.leaves(state)):
      placement = ()
    if key is not None:
      batch = _adapter.Keyed(batch)
    elif program.full_grad_fn is not None:
      data = {**data, "rng": jax.random.key(_adapter.PASS_SEED)}
    state, metrics = program.step(state, batch, key, data, depth, placement)
    _write_state(state, optimizer)
    _adapter.write(state.params, state.model_state, model, *rngs)
    return metrics

  def _split(
    self, model: Any, optimizer: nnx.Optimizer, rngs: tuple[Any, ...], key: jax.Array | None
  ) -> tuple[_train_step.Program, _train_step.TrainState]:
    """The program for this model, and its state."""
    graphdef, params, model_state = _adapter.split(optimizer.wrt, model, *rngs)
    loss_fn = _adapter.pure_loss(
      self._program.loss_fn, graphdef, optimizer.wrt, has_key=key is not None
    )
    tx = _base.check_transformation("optimizer.tx", optimizer.tx)
    program = dataclasses.replace(self._program, loss_fn=loss_fn, tx=tx)
    opt_state = _adapter.as_pure(optimizer.opt_state)
    return program, _train_step.TrainState(params, opt_state, model_state, optimizer.step[...])

  def _open(
    self, model: Any, optimizer: nnx.Optimizer, rng: Any
  ) -> tuple[_train_step.Program, _train_step.TrainState, jax.Array | None]:
    """The program for this model, its state and a key, after checks."""
    rngs, key = _split_rng(rng)
    _adapter.check_model(model, tree=True)
    words = "what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns"
    _base.check_type("optimizer", optimizer, nnx.Optimizer, words)
    program, state = self._split(model, optimizer, rngs, key)
    if not jax.tree.leaves(state.params):
      raise ValueError(
        "`optimizer.wrt` must select variables of the model; got"
        f" {_base.shorten(optimizer.wrt)}, which selects none."
      )
    _tree.check_inexact(state.params, "make_train_step", _tree.KEEP_OUT)
    return program, _train_step.canonicalize_state(state), key


def _write_state(state: _train_step.TrainState, optimizer: nnx.Optimizer) -> None:
  nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
  nnx.update(optimizer, {"step": state.step})


def _split_rng(rng: Any) -> tuple[tuple[Any, ...], jax.Array | None]:
  """The rngs that a loss draws from, and the key of a step."""
  if isinstance(rng, _adapter.RNG_TYPES):
    return (rng,), None
  if not (rng is None or hasattr(rng, "dtype")):
    raise TypeError(
      f"`rng` must be a key, an `nnx.Rngs`, one of its streams, or None; got {_base.shorten(rng)}."
    )
  return (), rng


def _explain(
  error: Exception, state: _train_step.TrainState, optimizer: nnx.Optimizer, batch: Any
) -> None:
  """Raises an error that names the argument which made a step fail, if it is found."""
  _tree.check_traceable("batch", batch)
  try:
    made = jax.eval_shape(optimizer.tx.init, state.params)
  except Exception:
    # Then the step's own error says more.
    return
  if not _tree.same_shapes(state.opt_state, made):
    raise ValueError(
      "`optimizer` must be made for this model; its state is of other params, or of another"
      " transformation than `optimizer.tx`. Make a new one:"
      " nnx.Optimizer(model, tx, wrt=nnx.Param)."
    ) from error


@_base.with_keywords_of(_train_step.make_train_step, "has_model_state")
def make_train_step(loss_fn: Callable[..., Any], **options: Any) -> TrainStep:
  """Makes a jitted train step for NNX: :func:`optax_boost.make_train_step` for models.

  Statistics and rng counts come from the one forward pass at the current params; trial points of a
  line search see the same dropout masks and change nothing.

  Other writes of the forward pass take effect as with ``nnx.jit``. An update starts from trained
  variables as the forward pass leaves them (``nnx.WeightNorm``, weight clipping). The model keeps
  variables that the forward pass creates, such as ``sow``'s, and attributes that it sets;
  the next step then compiles again, so pop intermediates, after the step or in the loss.

  Args:
    loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(model, batch, rng)`` if the step is called with
      a key or with ``nnx.Rngs``. Returns the scalar loss, or ``(loss, aux)``.
    **options: as in :func:`optax_boost.make_train_step`, no `has_model_state`; `full_grad_fn` is
      always called as ``full_grad_fn(grad_fn, params, rng=key)``, with ``grad_fn(params, batch,
      key)`` for pure trees of params; the key moves all rng streams, and is handed to a loss that
      takes one.

  Returns:
    The step, called as ``metrics = step(model, optimizer, batch)`` or ``metrics = step(model,
    optimizer, batch, rng)``, which updates model and optimizer in place and donates their old
    arrays. `rng` is a key, into which the number of the step (``optimizer.step``) is folded; or
    ``nnx.Rngs``, or one of its streams, whose counts go on by the draws of one forward pass.
    ``step.refresh(model, optimizer, batches)`` and ``step.lower(model, optimizer, batch)`` are as
    in :class:`optax_boost.TrainStep`. One step serves any number of models, in turns or from
    several threads at once, but two threads must not train the same model. Model and optimizer may
    change between steps, in values and in structure.

  Raises:
    TypeError: an argument is of the wrong kind; when traced: the loss returns something else.
    ValueError: when called: the optimizer was made for another model, or for no variable of this
      one; when traced: the loss creates, removes or reshapes trained
      variables.

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
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, batch)")
  if callable(weight := options.get("weight")):
    options["weight"] = lambda batch: weight(_adapter.plain_batch(batch))
  # The transformation is known with the model only.
  step = _train_step.make_train_step(loss_fn, optax.identity(), **options)
  program = dataclasses.replace(step.program, has_model_state=True)
  return TrainStep(program, options.get("donate", True))
