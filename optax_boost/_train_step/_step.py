"""A train step that feeds any optax transformation.

Line searches, variance reduction and freezing need more than a gradient. optax passes that as
extra arguments of ``update``; this module makes them, once, for any chain:

  value, grad        the loss at the current params, and its gradient
  value_fn(params)   the loss elsewhere, on the same batch, rng and mutable statistics
  grad_fn(params)    the gradient elsewhere, likewise
  obj_fn             `value_fn` under the name that ``optax.contrib.sophia`` knows
  full_grad_fn(params)
                     the mean gradient over all of the data, where the caller says how

The optimizer state may ask for scaled gradients or for a shorter backward pass
(:mod:`optax_boost._protocol`): `grad` and `grad_fn` are of the scaled loss, the values of the loss
itself. Closures that no transformation calls cost nothing; their aux and statistics are dropped.
Leaves that ``optax.masked`` and ``optax.partition`` hide have their current values.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import functools
import re
from typing import Any
from typing import TypeAlias
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_boost import _arrays
from optax_boost import _base
from optax_boost import _full_gradient
from optax_boost import _in_place
from optax_boost import _masking
from optax_boost import _protocol
from optax_boost import _scaled_backward
from optax_boost import _stacked
from optax_boost import _tree
from optax_boost._train_step import _depths
from optax_boost._train_step import _frozen_backward
from optax_boost._train_step import _loss
from optax_boost._train_step import _state
from optax_boost._train_step import _written

Metrics: TypeAlias = dict[str, Any]

# Metrics that cost something or need a wrapper, so they are made on request only.
EXTRA_METRICS = ("grad_norm", "learning_rate")


class TrainStep:
  """A jitted train step; made by :func:`make_train_step`."""

  def __init__(self, program: "Program", donate: bool = True):
    self.program = program
    donated = (0,) if donate else ()
    self._step = jax.jit(program.step, donate_argnums=donated, static_argnums=(4, 5))
    self._depths = _depths.HostDepths()

  def init(self, params: optax.Params, model_state: Any = None) -> _state.TrainState:
    """Makes the state to start from, of copies: the first step donates the state.

    Args:
      params: the initial params; those that are sharded over a mesh keep their sharding.
      model_state: the initial mutable statistics, if the loss takes any.

    Returns:
      A :class:`TrainState`.

    Raises:
      TypeError: a leaf is no array, one of the params is no floating-point array, or the params are
        a pair for ``optax.lookahead``.
    """
    if isinstance(params, optax.LookaheadParams):
      raise TypeError(
        "`params` must be the tree that the loss takes; got an optax.LookaheadParams, whose fast"
        " params alone have gradients. For `optax.lookahead` write the step with"
        " `optax_boost.apply_gradients(tx, grads, opt_state, params)`."
      )
    _tree.check_traceable("params", params)
    _tree.check_traceable("model_state", model_state)
    params, model_state = jax.tree.map(jnp.array, (params, model_state))
    _tree.check_inexact(params, "make_train_step", _tree.KEEP_OUT)
    state = _state.TrainState(
      params, self.program.tx.init(params), model_state, jnp.zeros([], jnp.int32)
    )
    return _state.canonicalize_state(state)

  def __call__(
    self, state: _state.TrainState, batch: Any, rng: jax.Array | None = None
  ) -> tuple[_state.TrainState, Metrics]:
    """Makes one step; `state` is donated and must not be used afterwards.

    Args:
      state: the current state.
      batch: a tree of arrays, handed to the loss as it is.
      rng: a key, or None if the loss takes none. The step number is folded in: pass the same key at
        every step, and a resumed run draws the same numbers.

    Returns:
      The new state, and the metrics: ``loss``, ``aux`` if the loss has any, and those that the
      methods declare (``trust_ratio``, ``loss_scale``, ``lars/notfinite_count``, ...). A name that
      occurs again is numbered: ``trust_ratio_1``.

    Raises:
      TypeError: `state` or `rng` is of the wrong kind.
    """
    place = self._place(state, rng)
    state = _state.commit_like(state, (batch, rng))
    state, metrics = self._step(*self._arguments(state, batch, rng, place))
    self._depths.made_step(place, state.opt_state)
    return state, metrics

  def refresh(
    self,
    state: _state.TrainState,
    batches: Iterable[Any],
    rng: jax.Array | None = None,
    *,
    weight_fn: Callable[[Any], Any] | None = None,
    progress: bool = False,
  ) -> _state.TrainState:
    """Renews the snapshot of :func:`svrg` with one pass over the data, batch by batch.

    The statistics that the loss returns are dropped.

    Args:
      state: the current state; the new one shares its arrays, so don't use it afterwards.
      batches: an iterable of batches as the loss takes them; see :func:`full_gradient`.
      rng: a key, or None if the loss takes none. The numbers of step and batch are folded in.
      weight_fn: from a batch to the number of its real examples, for padded batches.
      progress: whether to show a progress bar; needs ``tqdm``.

    Returns:
      The state to go on with.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: the optimizer has no ``svrg``, there is no batch, or a tree does not fit.
    """
    _check_call(state, rng)
    if rng is not None:
      _base.check_key("rng", rng)
      rng = jax.random.fold_in(rng, state.step)
    gradient = jax.tree_util.Partial(self.program.gradient, state.model_state)
    full = _full_gradient.full_gradient(
      gradient, state.params, batches, rng=rng, weight_fn=weight_fn, progress=progress
    )
    return _state.canonicalize_state(
      state._replace(opt_state=_protocol.renew_full_gradients(state.opt_state, state.params, full))
    )

  def lower(self, state: _state.TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Lowers the step, like ``jax.jit(...).lower``; arguments as for a step, or abstract ones."""
    return self._step.lower(*self._arguments(state, batch, rng, self._place(state, rng)))

  def trace(self, state: _state.TrainState, batch: Any, rng: jax.Array | None = None) -> Any:
    """Traces the step, like ``jax.jit(...).trace``; `jaxpr` of the result is its program."""
    return self._step.trace(*self._arguments(state, batch, rng, self._place(state, rng)))

  def cache_size(self) -> int:
    """The number of programs that were compiled: one, or one per depth where groups are frozen."""
    return self._step._cache_size()  # type: ignore[attr-defined]

  def _arguments(
    self, state: _state.TrainState, batch: Any, rng: Any, place: _depths.Place
  ) -> tuple[Any, ...]:
    return state, batch, rng, self.program.data, place.depth, _state.placement(state)

  def _place(self, state: _state.TrainState, rng: Any) -> _depths.Place:
    """How many groups a checked call freezes, where the host can know it: which program it runs."""
    _check_call(state, rng)
    if self.program.freezing == "switch":
      return _depths.NOWHERE

    def schedule() -> Any:
      groups = _protocol.collect_groups(self.program.tx, state.params)
      return groups[_protocol.FROZEN_GROUPS].depth_at

    return self._depths.locate(state.opt_state, schedule)


def _check_call(state: Any, rng: Any) -> None:
  _state.check_state(state)
  # The array of a key is checked while tracing.
  if rng is not None and not isinstance(rng, jax.Array):
    _base.check_key("rng", rng)


def make_train_step(
  loss_fn: Callable[..., Any],
  tx: optax.GradientTransformation,
  *,
  has_aux: bool = False,
  has_model_state: bool = False,
  full_grad_fn: Callable[..., Any] | None = None,
  donate: bool = True,
  freezing: _frozen_backward.Execution = "auto",
  hold_frozen_statistics: bool = True,
  extra_metrics: Sequence[str] = (),
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
    full_grad_fn: the mean gradient over all of the data, for ``svrg(refresh_every=n)``:
      ``full_grad_fn(grad_fn, params)``, with ``grad_fn(params, batch)`` the gradient of the loss;
      with a key ``full_grad_fn(grad_fn, params, rng=key)`` and ``grad_fn(params, batch, key)``.
      Arrays bound by ``functools.partial`` are arguments of the compiled step, not constants:
      ``functools.partial(scan_full_gradient, batches=data)``.
    donate: whether the old state's memory is reused for the new one.
    freezing: how the backward pass of frozen layers is skipped. ``"per_depth"``: by a compiled step
      for each number of frozen groups, which the host counts along; where :func:`freeze_layers`
      stands in a wrapper other than ``optax.chain``, it waits for the step before to read it.
      ``"switch"``: by a conditional in one compiled step. ``"auto"``: per depth; inside your own
      ``jit`` or ``scan`` the switch, but not for convolutions on a CPU, whose gradients a
      conditional makes slower than no freezing at all (a warning says so).
    hold_frozen_statistics: whether the mutable statistics of frozen layers stand still: those
      whose path is that of frozen params, ``params`` and ``batch_stats`` in front aside.
    extra_metrics: ``"grad_norm"``: the global norm of the unscaled gradient, without frozen leaves;
      ``"learning_rate"``: the current value, from ``optax.inject_hyperparams``.

  Returns:
    A :class:`TrainStep`: ``state = step.init(params)``, ``state, metrics = step(state, batch)``.

  Raises:
    TypeError: `loss_fn` is not callable or `tx` is no transformation; when traced: the loss
      returns something else than it was said to.
    ValueError: `freezing` or a name in `extra_metrics` is unknown; when called: the state holds
      several loss scales, or several :func:`freeze_layers`.

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
  _base.check_callable("loss_fn", loss_fn, "loss_fn(params, batch)")
  tx = _base.check_transformation("tx", tx)
  options: dict[str, Any] = {
    "has_aux": has_aux,
    "has_model_state": has_model_state,
    "freezing": freezing,
    "hold_frozen_statistics": hold_frozen_statistics,
    "extra_metrics": extra_metrics,
  }
  check_options(full_grad_fn, "full_grad_fn(grad_fn, params)", donate=donate, **options)
  full_grad_fn, data = _loss.bound_arrays(full_grad_fn)
  return TrainStep(Program(loss_fn, tx, full_grad_fn, data, **options), donate)


def check_options(
  full_grad_fn: Any, form: str, freezing: Any, extra_metrics: Any, **flags: Any
) -> None:
  """Checks the options of a train step; `form` is the form of `full_grad_fn`."""
  if full_grad_fn is not None:
    _base.check_callable("full_grad_fn", full_grad_fn, form)
  for name, flag in flags.items():
    _base.check_bool(name, flag)
  _base.check_name("freezing", freezing, ("auto", "per_depth", "switch"))
  if isinstance(extra_metrics, str) or not isinstance(extra_metrics, Sequence):
    raise TypeError(
      f"`extra_metrics` must be a sequence of names; got {_base.shorten(extra_metrics)}."
    )
  for name in extra_metrics:
    _base.check_name("extra_metrics", name, EXTRA_METRICS)


# Compared and hashed by identity: jit keeps its programs by the bound methods.
@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """The computation of a train step, from the arguments of :func:`make_train_step`."""

  loss_fn: Callable[..., Any]
  tx: optax.GradientTransformation
  full_grad_fn: Callable[..., Any] | None
  data: dict[str, Any]
  _: dataclasses.KW_ONLY
  has_aux: bool
  has_model_state: bool
  freezing: _frozen_backward.Execution
  hold_frozen_statistics: bool
  extra_metrics: Sequence[str]
  # The kinds of warnings that were given, each once.
  warnings_given: set[type[Warning]] = dataclasses.field(default_factory=set)

  def loss(
    self, model_state: Any, params: optax.Params, batch: Any, *rngs: jax.Array
  ) -> tuple[jax.Array, tuple[Any, Any]]:
    """The loss, and the new statistics with aux."""
    statistics = (model_state,) if self.has_model_state else ()
    output = self.loss_fn(params, *statistics, batch, *rngs)
    return _loss.split_output(output, self.has_aux, self.has_model_state)

  def gradient(self, model_state: Any, params: optax.Params, batch: Any, *rngs: jax.Array) -> Any:
    """The gradient of the loss alone, on any batch."""
    return jax.grad(lambda params: self.loss(model_state, params, batch, *rngs)[0])(params)

  def step(
    self,
    state: _state.TrainState,
    batch: Any,
    rng: jax.Array | None,
    data: dict[str, Any],
    depth: int | None = None,
    placement: tuple[jax.sharding.NamedSharding | None, ...] = (),
  ) -> tuple[_state.TrainState, Metrics]:
    """One step.

    `data` are the arrays of `full_grad_fn`, `depth` the groups frozen, if known, and `placement`
    the state's.
    """
    if rng is not None:
      _base.check_key("rng", rng)
    rngs = () if rng is None else (jax.random.fold_in(rng, state.step),)
    request = _Requests(self.tx, state.opt_state, state.params, depth)

    def forward(params: optax.Params) -> tuple[jax.Array, tuple[Any, Any]]:
      return self.loss(state.model_state, params, batch, *rngs)

    def warn(message: str) -> None:
      self._warn_once(message, _base.NoEffectWarning)

    differentiate = request.gradient_of(forward, self.freezing, warn)
    grad, (value, (model_state, aux)) = differentiate(state.params)
    # An update starts from the params as the forward pass has left them, as in Flax's loop.
    start, model_state = _written.take_written_params(state.params, model_state)

    @_masking.beside_closures
    def value_fn(params: optax.Params) -> jax.Array:
      return forward(_masking.fill_masked(params, start))[0]

    extra = {
      "value": value,
      "grad": grad,
      "value_fn": value_fn,
      # Differentiated is the scaled loss, as at the current params.
      "grad_fn": _of_masked(lambda params: differentiate(params)[0], start),
      "obj_fn": value_fn,
    }
    if self.full_grad_fn is not None:
      gradient = functools.partial(self.gradient, state.model_state)
      rng_args = {"rng": rngs[0]} if rngs else {}
      mean_gradient = functools.partial(self.full_grad_fn, gradient, **data, **rng_args)
      extra["full_grad_fn"] = _of_masked(mean_gradient, start)
    with _protocol.collect_announcements() as announced:
      try:
        params, opt_state = _in_place.apply(
          self.tx, lambda: (grad, dict(extra)), request.opt_state, start
        )
      except (AttributeError, TypeError, ValueError) as error:
        _state.explain_other_state(error, state, self.tx)
        raise
    self._warn_of_stacked_layers(announced.layers, lambda p: forward(p)[0], state.params)
    _state.check_shapes(state.params, params)
    metrics = {"loss": value, **_protocol.read_metrics(opt_state)}
    if request.frozen is not None:
      # Of this step; the new state holds the next one's.
      metrics["frozen_groups"] = jnp.asarray(request.frozen_groups, jnp.int32)
      if self.hold_frozen_statistics:
        model_state = _frozen_backward.hold_statistics(
          state.model_state,
          model_state,
          state.params,
          request.frozen,
          request.frozen_groups,
          lambda: _stacked.layer_axes(
            lambda statistics: self.loss(statistics, state.params, batch, *rngs), state.model_state
          ),
        )
    if "grad_norm" in self.extra_metrics:
      metrics["grad_norm"] = optax.tree.norm(request.unscaled(grad))
    if "learning_rate" in self.extra_metrics:
      metrics["learning_rate"] = _learning_rate(opt_state)
    if self.has_aux:
      metrics["aux"] = aux
    new_state = _state.TrainState(params, opt_state, model_state, state.step + 1)
    new_state = jax.tree.map(_state.drop_weak_type, new_state)
    return _state.keep_placement(new_state, state, placement), metrics

  def _warn_of_stacked_layers(
    self, layerwise: dict[str, str], loss_fn: Callable[..., Any], params: optax.Params
  ) -> None:
    """Warns once of leaves that hold many layers but are taken as one."""
    if not layerwise or _base.StackedLayersWarning in self.warnings_given:
      return
    found = _stacked.stacked_axes(loss_fn, params)
    methods = {
      pattern: method
      for pattern in found
      for path, method in layerwise.items()
      if re.search(pattern, path)
    }
    if methods:
      axes = {pattern: found[pattern] for pattern in methods}
      self._warn_once(
        f"`{next(iter(methods.values()))}` takes leaves that hold many layers as one layer each:"
        f" the loss scans over them. Pass stacked_axes={_base.shorten(axes, 400)} to it, as"
        " `optax_boost.stacked_axes(loss_fn, params, batch)` returns, or {} to keep it as it is.",
        _base.StackedLayersWarning,
      )

  def _warn_once(self, message: str, kind: type[Warning]) -> None:
    """Warns, once of each kind: a step is traced anew for each depth and shape of a batch."""
    if kind not in self.warnings_given:
      self.warnings_given.add(kind)
      warnings.warn(message, kind, stacklevel=3)


def _of_masked(
  gradient: Callable[[optax.Params], optax.Updates], current: optax.Params
) -> Callable[..., optax.Updates]:
  """A gradient function of params in which ``optax.masked`` may have hidden leaves."""

  # Transformations may pass more than params, as `optax.contrib.sam` the number of its inner step.
  def grad_fn(params: optax.Params, *_: Any) -> optax.Updates:
    return _masking.mask_like(gradient(_masking.fill_masked(params, current)), params)

  return grad_fn


class _Requests:
  """The requests of an optimizer state, and their answer: a gradient."""

  def __init__(
    self,
    tx: optax.GradientTransformation,
    opt_state: optax.OptState,
    params: optax.Params,
    depth: int | None,
  ):
    self.opt_state = opt_state
    self._loss_scale = _protocol.requested(opt_state, _protocol.LOSS_SCALE)
    group_scales = _protocol.requested(opt_state, _protocol.GROUP_LOSS_SCALE)
    self.frozen_groups = _protocol.requested(opt_state, _protocol.FROZEN_GROUPS)
    groups: dict[str, _protocol.GroupAssignment] = {}
    if any(x is not None for x in (self._loss_scale, group_scales, self.frozen_groups)):
      groups = _protocol.collect_groups(tx, params)
    self.frozen = groups.get(_protocol.FROZEN_GROUPS)
    # Who asks for one scale need not announce its leaves; all have it then.
    self._has_scale = groups.get(_protocol.LOSS_SCALE)
    self._scaled = None if group_scales is None else groups.get(_protocol.GROUP_LOSS_SCALE)
    if self._scaled is not None:
      # And 1 for leaves that the method has not seen.
      self._group_scales = jnp.append(group_scales, jnp.float32(1))
    if self.frozen is not None and depth is not None:
      # A constant in the state: nothing is computed for frozen leaves in `update` either.
      self.frozen_groups = depth
      self.opt_state = _protocol.map_request(
        opt_state,
        _protocol.FROZEN_GROUPS,
        lambda state: state._replace(frozen_groups=np.int32(depth)),
      )

  def gradient_of(
    self,
    forward: Callable[[optax.Params], tuple[jax.Array, Any]],
    execution: _frozen_backward.Execution,
    warn: Callable[[str], None],
  ) -> Callable[[optax.Params], tuple[optax.Updates, Any]]:
    """From params to the scaled gradient, zero for frozen leaves, and the output of `forward`."""

    def objective(params: optax.Params) -> tuple[jax.Array, Any]:
      value, rest = forward(params)
      return value, (value, rest)

    def scaled(params: optax.Params, cut: Any = lambda loss: loss) -> tuple[jax.Array, Any]:
      if self._loss_scale is not None:
        leaves, structure = jax.tree.flatten(params)
        leaves = [
          p if asks else _scaled_backward.group_boundary(p, 1 / self._loss_scale)
          for p, asks in zip(leaves, self._leaves_that_ask(params), strict=True)
        ]
        params = jax.tree.unflatten(structure, leaves)
      if self._scaled is None:
        value, rest = cut(objective)(params)
      else:
        value, rest = _scaled_backward.scaled_objective(
          cut(objective), params, self._scaled.numbers(params), self._group_scales
        )
      # In float32: a float16 loss times its scale would overflow.
      scale = self._loss_scale
      return value if scale is None else value.astype(jnp.float32) * scale, rest

    if self.frozen is None:
      return jax.grad(scaled, has_aux=True)
    return _frozen_backward.cut_gradient(scaled, self.frozen, self.frozen_groups, execution, warn)

  def _leaves_that_ask(self, tree: Any) -> list[bool]:
    """Whether each leaf's method asks for the loss scale."""
    if self._has_scale is None:
      return [True] * len(jax.tree.leaves(tree))
    return [number == 0 for number in self._has_scale.numbers(tree)]

  def unscaled(self, grad: optax.Updates) -> optax.Updates:
    """A gradient without its scales, in at least float32."""
    leaves, structure = jax.tree.flatten(grad)
    wide = list(map(_arrays.widen, leaves))
    if self._loss_scale is not None:
      pairs = zip(wide, self._leaves_that_ask(grad), strict=True)
      wide = [g / self._loss_scale if asks else g for g, asks in pairs]
    if self._scaled is not None:
      numbers = self._scaled.numbers(grad)
      wide = [g / self._group_scales[n] for g, n in zip(wide, numbers, strict=True)]
    return jax.tree.unflatten(structure, wide)


def _learning_rate(opt_state: optax.OptState) -> Any:
  """The learning rate that ``optax.inject_hyperparams`` keeps."""
  injected = (optax.InjectHyperparamsState, optax.schedules.InjectStatefulHyperparamsState)

  def has_rate(node: Any) -> bool:
    return isinstance(node, injected) and "learning_rate" in node.hyperparams

  states = [s for s in jax.tree.leaves(opt_state, is_leaf=has_rate) if has_rate(s)]
  if len(states) != 1:
    raise ValueError(
      "The metric `learning_rate` needs one optimizer of `optax.inject_hyperparams` with a"
      f" `learning_rate`, as in `optax.inject_hyperparams(optax.adam)(learning_rate=schedule)`;"
      f" the optimizer state holds {len(states)}."
    )
  return states[0].hyperparams["learning_rate"]
