"""The train step for Flax NNX models."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import functools
from typing import Any
from typing import Literal

from flax import nnx
import jax

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _train_step
from optax_boost.nnx import _binding

# Before flax 0.12.7 it was called `pure`, a name that warns since.
_as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure
# Seeds the masks of a full pass. They differ from pass to pass all the same: the key only moves the
# model's own rng streams.
PASS_SEED = 0


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`."""

  def __init__(
    self,
    loss_fn: Callable[..., Any],
    has_aux: bool,
    full_grad_fn: Callable[..., Any] | None,
    **options: Any,
  ):
    self._loss_fn = loss_fn
    self._has_aux = has_aux
    self._full_grad_fn = full_grad_fn
    self._options = options
    self._compiled: dict[Any, _train_step.TrainStep] = {}
    # Of the last call.
    self._bound: tuple[_train_step.TrainStep, _binding.Binding] | None = None

  def __call__(self, model: Any, optimizer: nnx.Optimizer, batch: Any) -> _train_step.Metrics:
    """Makes one step, in place.

    The arrays that model and optimizer held before are donated; copy what must outlive the step.
    Both may change between steps, in values and in structure; repeated steps on what kept its
    structure cost the least Python, about what ``nnx.cached_partial`` does.

    Args:
      model: the model.
      optimizer: its optimizer; ``optimizer.wrt`` says what is trained.
      batch: a tree of arrays, handed to the loss as it is.

    Returns:
      The metrics: ``loss``, ``aux`` if the loss has any, and what the methods keep in their state.
    """
    step, state = self._at(model, optimizer)
    state, metrics = step(state, batch)
    if self._bound is None or not self._bound[1].write(state):
      nnx.update(model, state.params, state.model_state)
      nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
      nnx.update(optimizer, {"step": state.step})
      binding = _binding.bind(model, optimizer, state, self._unbind)
      self._bound = None if binding is None else (step, binding)
    return metrics

  def _unbind(self, _: Any = None) -> None:
    self._bound = None

  def refresh(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batches: Iterable[Any],
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    progress: bool = False,
  ) -> None:
    """Renews the snapshot of ``svrg`` in the optimizer with one pass over the data.

    The model stays as it is: statistics and rng counts are those from before. Dropout draws masks
    of its own for each batch.

    Args:
      model: the model.
      optimizer: its optimizer, whose state is updated in place.
      batches: an iterable of batches; see :func:`optax_boost.full_gradient`.
      weight_fn: from a batch to the number of its real examples, for padded batches.
      progress: whether to show a progress bar; needs ``tqdm``.
    """
    step, state = self._at(model, optimizer)
    state = step.refresh(
      state, batches, jax.random.key(PASS_SEED), weight_fn=weight_fn, progress=progress
    )
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))

  def _at(
    self, model: Any, optimizer: nnx.Optimizer
  ) -> tuple[_train_step.TrainStep, _train_step.TrainState]:
    """The pure step for this model, and the state that model and optimizer are in."""
    if self._bound is not None:
      step, binding = self._bound
      if binding.holds(model, optimizer):
        return step, _train_step.settle(binding.read())
      self._unbind()
    graphdef, params, rest = split(model, optimizer.wrt)
    state = _train_step.TrainState(params, _as_pure(optimizer.opt_state), rest, optimizer.step[...])
    return self._step_for(graphdef, optimizer), _train_step.settle(state)

  def _step_for(self, graphdef: Any, optimizer: nnx.Optimizer) -> _train_step.TrainStep:
    key = (graphdef, optimizer.tx, optimizer.wrt)
    # Hashing the structure of a large model takes a while: once per step is enough.
    found = self._compiled.get(key)
    if found is not None:
      return found

    def loss_fn(params: Any, rest: Any, batch: Any, rng: jax.Array | None = None) -> Any:
      # A model of its own for every call: what the forward pass changes in it (statistics, rng
      # counts) is read off afterwards, and a trial point's changes are dropped with it.
      model = nnx.merge(graphdef, params, rest)
      if rng is not None:
        advance(model, jax.random.bits(rng))
      output = self._loss_fn(model, batch)
      _, _, rest = split(model, optimizer.wrt)
      return _train_step.with_model_state(output, rest, self._has_aux)

    full_grad_fn = self._full_grad_fn and functools.partial(
      self._full_grad_fn, rng=jax.random.key(PASS_SEED)
    )
    step = _train_step.make_train_step(
      loss_fn,
      optimizer.tx,
      has_aux=self._has_aux,
      has_model_state=True,
      full_grad_fn=full_grad_fn,
      **self._options,
    )
    self._compiled[key] = step
    return step


def split(model: Any, wrt: Any) -> tuple[Any, Any, Any]:
  """A model's structure, its trainable arrays, and all its other arrays."""
  graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
  return graphdef, _as_pure(params), _as_pure(rest)


def advance(model: Any, by: jax.Array) -> None:
  """Moves all of a model's rng streams ahead, so that it draws other masks."""
  counts = nnx.state(model, nnx.RngCount)
  nnx.update(model, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def make_train_step(
  loss_fn: Callable[..., Any],
  *,
  has_aux: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  donate: bool = True,
  freezing: Literal["auto", "per_depth", "switch"] = "auto",
  hold_frozen_statistics: bool = True,
) -> TrainStep:
  """Makes a jitted train step for NNX that feeds any optax transformation.

  The optimizer's transformation receives `value`, `grad`, `value_fn` and `grad_fn`. Statistics and
  rng counts come from the one forward pass at the current params; trial points of a line search
  see the same dropout masks and change nothing.

  Args:
    loss_fn: ``loss_fn(model, batch)``; returns the scalar loss, or ``(loss, aux)``.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    full_grad_fn: the mean gradient over all of the data, for ``svrg(refresh_every=n)``; see
      :func:`optax_boost.make_train_step`. Always called as ``full_grad_fn(grad_fn, params,
      rng=key)``, with ``grad_fn(params, batch, key)`` for pure trees of params; the key moves the
      model's rng streams.
    donate: whether the memory of the old arrays is reused for the new ones.
    freezing: how the backward pass of what :func:`optax_boost.freeze` freezes is skipped; see
      :func:`optax_boost.make_train_step`.
    hold_frozen_statistics: whether the statistics of frozen layers stand still.

  Returns:
    A :class:`TrainStep`, called as ``metrics = step(model, optimizer, batch)``.

  Raises:
    TypeError: `loss_fn` is not callable; when traced: it returns something else.

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
  """
  if not callable(loss_fn):
    raise TypeError(f"`loss_fn` must be callable; got {loss_fn!r}.")
  return TrainStep(
    loss_fn,
    has_aux,
    full_grad_fn,
    donate=donate,
    freezing=freezing,
    hold_frozen_statistics=hold_frozen_statistics,
  )


def layer_groups(
  loss_fn: Callable[..., Any],
  model: Any,
  *args: Any,
  wrt: Any = nnx.Param,
  num_groups: int = 10,
  overrides: Mapping[str, int] | None = None,
  data: _base.LeafSelector = None,
) -> _groups.LayerGroups:
  """Groups a model's params along the forward pass: :func:`optax_boost.layer_groups` for NNX.

  Variables that are not trained (the base weights of LoRA, statistics) are no data.

  Args:
    loss_fn: ``loss_fn(model, *args)``.
    model: the model; it is not changed.
    *args: the loss's other arguments.
    wrt: what is trained, as in ``nnx.Optimizer``.
    num_groups: how many groups.
    overrides: group by regular expression.
    data: which of `args` are data, as in :func:`optax_boost.layer_groups`; None: all of them.

  Returns:
    A :class:`optax_boost.LayerGroups`.

  Raises:
    ValueError: as :func:`optax_boost.layer_groups`; or `model` has nothing that is trained.
    TypeError: as :func:`optax_boost.layer_groups`.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, optax_boost.nnx
    >>> rngs = nnx.Rngs(0)
    >>> model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs))
    >>> loss_fn = lambda model, x: jnp.mean(model(x))
    >>> print(optax_boost.nnx.layer_groups(loss_fn, model, jnp.ones((2, 3)), num_groups=2))
    group 0: 16 parameters (76.2 %): layers/0/kernel, layers/0/bias
    group 1: 5 parameters (23.8 %), never frozen: layers/1/kernel, layers/1/bias
  """
  _base.check_callable("loss_fn", loss_fn, "loss_fn(model, *args)")
  graphdef, params, rest = split(model, wrt)
  if not jax.tree.leaves(params):
    raise ValueError(
      f"`model` must be an NNX module with variables of `wrt`, {_base.shorten(wrt)}; got"
      f" {_base.shorten(model)}, which has none."
    )

  def pure_loss(params: Any, rest: Any, *args: Any) -> Any:
    return loss_fn(nnx.merge(graphdef, params, rest), *args)

  return _groups.group_by_use(
    pure_loss,
    params,
    rest,
    args,
    num_groups=num_groups,
    overrides=overrides,
    is_data=_groups.select_data(args, data),
  )
