"""The train step for Flax NNX models."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any
from typing import Literal
from typing import NamedTuple
from typing import TypeAlias

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from optax_boost import _base
from optax_boost import _groups
from optax_boost import _train_step
from optax_boost.nnx import _binding
from optax_boost.nnx import _checks

# Before flax 0.12.7 it was called `pure`, a name that warns since.
_as_pure = nnx.as_pure if hasattr(nnx, "as_pure") else nnx.pure
# Seeds the masks of a full pass. They differ from pass to pass all the same: the key only moves the
# model's own rng streams.
PASS_SEED = 0

# Of a model and the rngs of a call, the arrays that are not trained.
_COLLECTIONS = ("batch_stats", "rngs")

# What a loss may draw from.
Rng: TypeAlias = jax.Array | nnx.Rngs | nnx.RngStream


class _Keyed(NamedTuple):
  """The batch of a step that is called with a key; a full pass has batches without this mark."""

  batch: Any


class TrainStep:
  """A jitted train step that updates model and optimizer; made by :func:`make_train_step`.

  One train step serves any number of models, in turns or from several threads at once. Two threads
  must not train the same model.
  """

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
    # By the identities of model and optimizer, and whether there is a key. Each access is one
    # operation, so no lock is needed.
    self._bound: dict[Any, tuple[_train_step.TrainStep, _binding.Binding]] = {}

  def __call__(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batch: Any,
    rng: Rng | None = None,
  ) -> _train_step.Metrics:
    """Makes one step, in place.

    The arrays that model and optimizer held before are donated; copy what must outlive the step.
    Both may change between steps, in values and in structure; repeated steps on what kept its
    structure cost the least Python, about what ``nnx.cached_partial`` does.

    Args:
      model: the model.
      optimizer: its optimizer; ``optimizer.wrt`` says what is trained.
      batch: a tree of arrays, handed to the loss as it is.
      rng: handed to the loss as a third argument, unless None. A key: the number of the step
        (``optimizer.step``) is folded in, so the same key may be passed at every step.
        ``nnx.Rngs``, or one of its streams: the loss draws from it, and its counts go on by the
        draws of one forward pass; their arrays are donated, too. A model may hold the same rngs.

    Returns:
      The metrics: ``loss``, ``aux`` if the loss has any, and what the methods keep in their state.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: the optimizer was made for another model, or for no variable of this one.
    """
    rngs, key = _rngs_and_key(rng)
    step, state, binding = self._open(model, optimizer, rngs, key)
    try:
      state, metrics = step(state, batch if key is None else _Keyed(batch), key)
    except (TypeError, ValueError) as error:
      _explain(error, state, optimizer, batch)
      raise
    if binding is None or not binding.write(state):
      _write(model, optimizer, rngs, state)
      # Of the three, the callback may hold the identities only.
      bound, place = self._bound, (id(model), id(optimizer), key is not None)
      binding = _binding.bind(model, optimizer, rngs, state, lambda _: bound.pop(place, None))
      if binding is not None:
        bound[place] = step, binding
    return metrics

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

    The model stays as it is: statistics and rng counts are those from before. Dropout draws masks
    of its own for each batch.

    Args:
      model: the model.
      optimizer: its optimizer, whose state is updated in place.
      batches: an iterable of batches; see :func:`optax_boost.full_gradient`.
      rng: as for a step, if the loss takes one. ``nnx.Rngs`` stay as they are, too.
      weight_fn: from a batch to the number of its real examples, for padded batches.
      progress: whether to show a progress bar; needs ``tqdm``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: the optimizer has no ``svrg``, there is no batch, or a tree does not fit.
    """
    rngs, key = _rngs_and_key(rng)
    step, state, _ = self._open(model, optimizer, rngs, key)
    if key is None:
      key = jax.random.key(PASS_SEED)
    state = step.refresh(state, batches, key, weight_fn=weight_fn, progress=progress)
    nnx.update(optimizer.opt_state, nnx.state(state.opt_state))

  def lower(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batch: Any,
    rng: Rng | None = None,
  ) -> Any:
    """Lowers the step for inspection, like ``jax.jit(...).lower``; changes nothing.

    Args:
      model: the model.
      optimizer: its optimizer.
      batch: a batch, or abstract values.
      rng: as for a step.

    Returns:
      A ``jax.stages.Lowered``.
    """
    rngs, key = _rngs_and_key(rng)
    step, state, _ = self._open(model, optimizer, rngs, key)
    return step.lower(state, batch if key is None else _Keyed(batch), key)

  def trace(
    self,
    model: Any,
    optimizer: nnx.Optimizer,
    batch: Any,
    rng: Rng | None = None,
  ) -> Any:
    """Traces the step for inspection, like ``jax.jit(...).trace``; changes nothing.

    Args:
      model: the model.
      optimizer: its optimizer.
      batch: a batch, or abstract values.
      rng: as for a step.

    Returns:
      A ``jax.stages.Traced``, whose `jaxpr` is the step's program.
    """
    rngs, key = _rngs_and_key(rng)
    step, state, _ = self._open(model, optimizer, rngs, key)
    return step.trace(state, batch if key is None else _Keyed(batch), key)

  def cache_size(self) -> int:
    """The number of programs that were compiled, for all models together."""
    return sum(step.cache_size() for step in list(self._compiled.values()))

  def _open(
    self, model: Any, optimizer: nnx.Optimizer, rngs: Any, key: Any
  ) -> tuple[_train_step.TrainStep, _train_step.TrainState, _binding.Binding | None]:
    """The pure step for this model, the state that it is in, and where that state lies."""
    place = (id(model), id(optimizer), key is not None)
    bound = self._bound.get(place)
    if bound is not None:
      step, binding = bound
      if binding.holds(model, optimizer, rngs):
        return step, _train_step.settle(binding.read()), binding
      self._bound.pop(place, None)
    _check_model(model)
    _check_optimizer(optimizer)
    graphdef, params, rest = split(model, optimizer.wrt, rngs)
    if not jax.tree.leaves(params):
      raise ValueError(
        "`optimizer.wrt` must select variables of the model; got"
        f" {_base.shorten(optimizer.wrt)}, which selects none."
      )
    state = _train_step.TrainState(params, _as_pure(optimizer.opt_state), rest, optimizer.step[...])
    step = self._step_for(graphdef, optimizer, rngs is not None, key is not None)
    return step, _train_step.settle(state), None

  def _step_for(
    self, graphdef: Any, optimizer: nnx.Optimizer, has_rngs: bool, has_key: bool
  ) -> _train_step.TrainStep:
    cached = (graphdef, optimizer.tx, optimizer.wrt, has_rngs, has_key)
    # Hashing the structure of a large model takes a while: once per step is enough.
    step = self._compiled.get(cached)
    if step is not None:
      return step
    wrt = optimizer.wrt

    def loss_fn(params: Any, rest: Any, batch: Any, rng: jax.Array | None = None) -> Any:
      # A model of its own for every call: what the forward pass changes in it (statistics, rng
      # counts) is read off afterwards, and a trial point's changes are dropped with it.
      model, rngs = merge(graphdef, params, rest, has_rngs)
      if isinstance(batch, _Keyed):
        batch = batch.batch
      elif rng is not None:
        advance((model, rngs) if has_rngs else model, jax.random.bits(rng))
      _check_batch(batch)
      drawn_from = rngs if has_rngs else rng
      rng_args = (drawn_from,) if has_rngs or has_key else ()
      output = self._loss_fn(model, batch, *rng_args)
      _, _, rest = split(model, wrt, rngs)
      return _train_step.with_model_state(output, rest, self._has_aux)

    full_grad_fn = self._full_grad_fn
    if full_grad_fn is not None and not has_key:
      full_grad_fn = functools.partial(full_grad_fn, rng=jax.random.key(PASS_SEED))
    step = _train_step.make_train_step(
      loss_fn,
      optimizer.tx,
      has_aux=self._has_aux,
      has_model_state=True,
      full_grad_fn=full_grad_fn,
      **self._options,
    )
    # Another thread may have been faster.
    return self._compiled.setdefault(cached, step)


def split(model: Any, wrt: Any, rngs: Any = None) -> tuple[Any, Any, Any]:
  """A model's structure, its trainable arrays, and all its other arrays, those of rngs included.

  Args:
    model: the model.
    wrt: what is trained, as in ``nnx.Optimizer``.
    rngs: the ``nnx.Rngs`` of a call, or None. Streams that the model holds, too, stay one.

  Returns:
    The three, for :func:`merge`.
  """
  if rngs is None:
    graphdef, params, rest = nnx.split(model, wrt, ...)  # type: ignore[misc]
    return graphdef, _as_pure(params), _as_pure(rest)
  selects = nnx.filterlib.to_predicate(wrt)
  graphdef, params, rest = nnx.split(  # type: ignore[misc]
    (model, rngs), lambda path, value: path[0] == 0 and selects(path[1:], value), ...
  )
  params, rest = _as_pure(params), _as_pure(rest)
  # The params bear the paths that they have in the model alone; the rest is in two collections, the
  # first of them under the name by which `hold_frozen_statistics` knows a collection.
  collections = {name: rest[i] for i, name in enumerate(_COLLECTIONS) if i in rest}
  return graphdef, params.get(0, params), collections


def merge(graphdef: Any, params: Any, rest: Any, has_rngs: bool) -> tuple[Any, Any]:
  """The inverse of :func:`split`: a new model, and new rngs or None."""
  if has_rngs:
    return nnx.merge(graphdef, *_states_of_pair(params, rest))
  return nnx.merge(graphdef, params, rest), None


def _states_of_pair(params: Any, collections: Any) -> tuple[nnx.State, nnx.State]:
  """The states of the pair of a model and rngs."""
  rest = {i: collections[name] for i, name in enumerate(_COLLECTIONS) if name in collections}
  return nnx.State({0: params}), nnx.State(rest)


def advance(model: Any, by: jax.Array) -> None:
  """Moves all of a model's rng streams ahead, so that it draws other masks."""
  counts = nnx.state(model, nnx.RngCount)
  nnx.update(model, jax.tree.map(lambda count: count + by.astype(count.dtype), counts))


def _write(model: Any, optimizer: nnx.Optimizer, rngs: Any, state: _train_step.TrainState) -> None:
  """Puts a state's arrays into model, optimizer and rngs, by their paths."""
  if rngs is None:
    nnx.update(model, state.params, state.model_state)
  else:
    nnx.update((model, rngs), *_states_of_pair(state.params, state.model_state))
  nnx.update(optimizer.opt_state, nnx.state(state.opt_state))
  nnx.update(optimizer, {"step": state.step})


def _rngs_and_key(rng: Any) -> tuple[Any, Any]:
  """Checks the argument `rng`, and tells an object with streams from a key."""
  if rng is None:
    return None, None
  if isinstance(rng, nnx.Rngs | nnx.RngStream):
    return rng, None
  if not hasattr(rng, "dtype"):
    raise TypeError(
      f"`rng` must be a key, an `nnx.Rngs`, one of its streams, or None; got {_base.shorten(rng)}."
    )
  return None, rng


def _alike(first: Any, second: Any) -> bool:
  """Whether two trees have the same structure and shapes."""
  leaves, structures = zip(*map(jax.tree.flatten, (first, second)), strict=True)
  shapes = [[jnp.shape(leaf) for leaf in of_one] for of_one in leaves]
  return bool(structures[0] == structures[1]) and shapes[0] == shapes[1]


def _check_model(model: Any) -> None:
  nodes = [] if isinstance(model, type) else jax.tree.leaves(model, is_leaf=_is_nnx)
  if not any(map(_is_nnx, nodes)):
    raise TypeError(
      f"`model` must be an NNX module, as `nnx.Linear(2, 1, rngs=nnx.Rngs(0))`; got"
      f" {_base.shorten(model)}. For Linen modules there is `optax_boost.linen`."
    )


def _check_optimizer(optimizer: Any) -> None:
  if not isinstance(optimizer, nnx.Optimizer):
    raise TypeError(
      "`optimizer` must be what `nnx.Optimizer(model, tx, wrt=nnx.Param)` returns; got"
      f" {_base.shorten(optimizer)}."
    )
  _base.check_transformation("optimizer.tx", optimizer.tx)


def _is_nnx(node: Any) -> bool:
  return isinstance(node, nnx.Module | nnx.Variable | nnx.Rngs | nnx.RngStream)


def _check_batch(batch: Any) -> None:
  """Refuses what a batch must not hold; called while tracing, so it costs a step nothing."""
  found = next(filter(_is_nnx, jax.tree.leaves(batch, is_leaf=_is_nnx)), None)
  if found is not None:
    raise TypeError(
      f"`batch` must hold arrays only; it holds an nnx.{type(found).__name__}. Its changes would"
      " be lost. Pass `nnx.Rngs` as the argument `rng`: step(model, optimizer, batch, rngs) calls"
      " loss_fn(model, batch, rngs)."
    )


def _explain(
  error: Exception, state: _train_step.TrainState, optimizer: nnx.Optimizer, batch: Any
) -> None:
  """Finds which argument made a step fail, and raises an error that names it."""
  for path, leaf in jax.tree.leaves_with_path(batch):
    if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
      raise TypeError(
        f"`batch` must be a tree of arrays; at {jax.tree_util.keystr(path) or 'its root'} it holds"
        f" {_base.shorten(leaf)}."
      ) from error
  try:
    made = jax.eval_shape(optimizer.tx.init, state.params)
  except Exception:
    # Then the step's own error says more.
    return
  if not _alike(state.opt_state, made):
    raise ValueError(
      "`optimizer` must be made for this model; its state is of other params, or of another"
      " transformation than `optimizer.tx`. Make a new one:"
      " nnx.Optimizer(model, tx, wrt=nnx.Param)."
    ) from error


def make_train_step(
  loss_fn: Callable[..., Any],
  *,
  has_aux: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  donate: bool = True,
  freezing: Literal["auto", "per_depth", "switch"] = "auto",
  hold_frozen_statistics: bool = True,
  extra_metrics: Sequence[str] = (),
) -> TrainStep:
  """Makes a jitted train step for NNX that feeds any optax transformation.

  The optimizer's transformation receives `value`, `grad`, `value_fn` and `grad_fn`. Statistics and
  rng counts come from the one forward pass at the current params; trial points of a line search
  see the same dropout masks and change nothing.

  Args:
    loss_fn: ``loss_fn(model, batch)``, or ``loss_fn(model, batch, rng)`` if the step is called with
      a key or with ``nnx.Rngs``. Returns the scalar loss, or ``(loss, aux)``.
    has_aux: whether `loss_fn` returns aux, which becomes ``metrics["aux"]``.
    full_grad_fn: the mean gradient over all of the data, for ``svrg(refresh_every=n)``; see
      :func:`optax_boost.make_train_step`. Always called as ``full_grad_fn(grad_fn, params,
      rng=key)``, with ``grad_fn(params, batch, key)`` for pure trees of params; the key moves all
      rng streams, and is handed to a loss that takes one.
    donate: whether the memory of the old arrays is reused for the new ones.
    freezing: how the backward pass of what :func:`optax_boost.freeze` freezes is skipped; see
      :func:`optax_boost.make_train_step`.
    hold_frozen_statistics: whether the statistics of frozen layers stand still.
    extra_metrics: ``"grad_norm"`` and ``"learning_rate"``, on request; see
      :func:`optax_boost.make_train_step`.

  Returns:
    A :class:`TrainStep`, called as ``metrics = step(model, optimizer, batch)`` or
    ``metrics = step(model, optimizer, batch, rng)``.

  Raises:
    TypeError: an argument is of the wrong kind; when traced: the loss returns something else.
    ValueError: `freezing` is unknown.

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
  _base.check_bool("has_aux", has_aux)
  if full_grad_fn is not None:
    _base.check_callable("full_grad_fn", full_grad_fn, "full_grad_fn(grad_fn, params, rng=key)")
  _base.check_bool("donate", donate)
  _base.check_name("freezing", freezing, ("auto", "per_depth", "switch"))
  _base.check_bool("hold_frozen_statistics", hold_frozen_statistics)
  _train_step.check_extra_metrics(extra_metrics)
  return TrainStep(
    loss_fn,
    has_aux,
    full_grad_fn,
    donate=donate,
    freezing=freezing,
    hold_frozen_statistics=hold_frozen_statistics,
    extra_metrics=extra_metrics,
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
  _check_model(model)
  _checks.check_filter("wrt", wrt)
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
