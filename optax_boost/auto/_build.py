"""From a level and a configuration to the transformation and the train step."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import ClassVar

import jax
import optax

from optax_boost import _accumulation
from optax_boost import _adasum
from optax_boost import _average_params
from optax_boost import _base
from optax_boost import _centralization
from optax_boost import _freezing
from optax_boost import _groups
from optax_boost import _layers
from optax_boost import _less_bn
from optax_boost import _precision
from optax_boost import _train_step
from optax_boost import _tree
from optax_boost.auto import _config
from optax_boost.auto import _levels
from optax_boost.auto import _methods


@dataclasses.dataclass(frozen=True)
class AutoBoost:
  """The methods that a level and a configuration turn on; made by :func:`auto_boost`.

  Attributes:
    level: the level.
    config: the configuration.
    decisions: whether each method is on, and why.
    axis_name: the named axis of adasum, or None.
    key: the seed of the freezing schedule.
    local_axis_name: the named axis over the devices of one server, or None.
    adasum_on: ``"gradients"`` or ``"updates"``.
    reference: whether `dim_reduce` takes MindSpore's steps, through the optimizer.
  """

  level: str
  config: _config.BoostConfig
  decisions: tuple[_levels.Decision, ...]
  axis_name: Any = None
  key: jax.Array | int = 0
  local_axis_name: Any = None
  adasum_on: str = "gradients"
  reference: bool = False

  def is_on(self, method: str) -> bool:
    """Whether a method is on, by its key in the configuration, as ``"grad_freeze"``.

    Raises:
      ValueError: there is no such method.
    """
    if not (isinstance(method, str) and method in _levels.METHODS):
      hint = _config.nearest(method, _levels.METHODS)
      raise ValueError(f"There is no method {_base.shorten(method)}.{hint}")
    return next(decision.on for decision in self.decisions if decision.method == method)

  def explain(self) -> str:
    """Explains the decision: the methods that are on and off, and why.

    Returns:
      A table: for each method whether it is on, why, its settings, and the savings to expect; and,
      in the forms for Flax, the effect of `less_bn` on a model without BatchNorms. Measured savings
      of the levels are in ``docs/cards/auto_boost.md``.
    """
    rows = [(d.method, "on" if d.on else "off", d.why, *self._effect(d)) for d in self.decisions]
    rows.insert(0, ("method", "", "why", "settings", "saves"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([f"level {self.level}, mode {self.config.boost.mode}", *lines, *self._notes()])

  def _effect(self, decision: _levels.Decision) -> tuple[str, str]:
    """A method's settings and savings; in plain JAX, `less_bn` has no model to change."""
    if decision.method != "less_bn" or not decision.on:
      return decision.settings, decision.saves
    return _levels.gradients_of(self.config), "nothing: only the forms for Flax change the model"

  def _notes(self) -> list[str]:
    """Lines below the table."""
    return []

  def optimizer(
    self,
    tx: optax.GradientTransformation,
    loss_fn: Callable[..., Any] | None = None,
    params: optax.Params | None = None,
    *args: Any,
    groups: _groups.Groups | None = None,
    decay: optax.GradientTransformation | None = None,
  ) -> optax.GradientTransformationExtraArgs:
    """Puts the methods that are on around an optimizer.

    From the inside out: centralization, `decay`, adaptive summation, freezing, accumulation, loss
    scales, the average of the params. Layers of a scan are found in the trace of the loss and count
    each for itself.

    If `dim_reduce` is on, it alone: in the subspace of the file ``pca_mat_path``, if there is one,
    else fitted to the checkpoints in ``weight_load_dir`` (and saved to the file). It takes the
    place of `tx`, which is not used, since its steps in the subspace need no learning rate. With
    `reference` its steps go through `tx`, as in MindSpore.

    Args:
      tx: the optimizer.
      loss_fn: the loss ``loss_fn(params, *args)``, whose trace gives the groups of layers.
      params: the params, for freezing, loss scales and the subspace.
      *args: the loss's other arguments.
      groups: groups of :func:`layer_groups`, or regular expressions, instead of params and loss.
      decay: the weight decay, as ``optax.add_decayed_weights(1e-4)``, centralized together with the
        gradients, as in MindSpore; leave it out of `tx` then. None: none, or one inside `tx`.

    Raises:
      TypeError: `tx` or `decay` is no transformation.
      ValueError: a method that needs groups is on without them or a loss, or the loss has too few
        layers; `dim_reduce` is on without params, or neither finds nor can fit their subspace, or
        there is a `decay` beside it.
    """
    find_groups = find_layers = None
    if loss_fn is not None and params is not None:
      find_groups = functools.partial(_groups.layer_groups, loss_fn, params, *args)
      find_layers = functools.partial(_layers.layer_axes, loss_fn, params, *args)
    return self._wrap(tx, params, find_groups, find_layers, groups, decay)

  def _wrap(
    self,
    tx: optax.GradientTransformation,
    params: Any,
    find_groups: Callable[..., _groups.LayerGroups] | None,
    find_layers: Callable[[], _layers.Layers] | None,
    groups: Any,
    decay: optax.GradientTransformation | None,
  ) -> optax.GradientTransformationExtraArgs:
    """:meth:`optimizer` for all forms; the functions read groups and layers from a trace."""
    tx = _base.check_transformation("tx", tx)
    if params is not None:
      _tree.check_inexact(params, "auto_boost", _tree.KEEP_OUT)
    if groups is None:
      groups = self._read_groups(find_groups)
    if decay is not None:
      decay = _base.check_transformation("decay", decay)
    if self.is_on("dim_reduce"):
      if decay is not None:
        raise ValueError(
          "`dim_reduce` runs alone, without weight decay; got a `decay`. Leave it out, or turn"
          " `dim_reduce` off."
        )
      return _methods.subspace_optimizer(
        self.config.dim_reduce, params, tx, reference=self.reference
      )
    centralizes = self.is_on("less_bn") and self.config.less_bn.gc_flag
    layerwise = centralizes or self.is_on("adasum")
    layers = find_layers() if layerwise and find_layers is not None else None
    # From the inside out. A new method joins here and in `_levels`.
    if centralizes:
      tx = optax.chain(_centralization.centralize(layers=layers), tx)
    if decay is not None:
      tx = optax.chain(decay, tx)
    axes: tuple[str, ...] | None = None
    if self.is_on("adasum"):
      axes = tuple(jax.tree.leaves((self.axis_name, self.local_axis_name)))
      tx = _methods.with_adasum(
        tx,
        _adasum.adasum(self.axis_name, local_axis_name=self.local_axis_name, layers=layers),
        self.local_axis_name,
        self.adasum_on,
        self.config.common.device_number,
      )
    if self.is_on("grad_freeze"):
      schedule = _methods.freezing_schedule(self.config.grad_freeze)
      tx = _freezing.freeze_layers(tx, groups, schedule, key=self.key)
    if self.is_on("grad_accumulation"):
      tx = _accumulation.accumulate(tx, self.config.grad_accumulation.grad_accumulation_step)
    if self.is_on("loss_scale_group"):
      # Where replicas have gradients of their own, the overflow of one counts for all.
      tx = _precision.group_loss_scale(tx, groups, axis_name=axes)
    if self.is_on("average"):
      tx = _average_params.average_params(tx, **_methods.average_options(self.config.average))
    return tx

  def _read_groups(
    self, find_groups: Callable[..., _groups.LayerGroups] | None
  ) -> _groups.LayerGroups | None:
    needing = [method for method in ("grad_freeze", "loss_scale_group") if self.is_on(method)]
    if not needing:
      return None
    if find_groups is None:
      raise ValueError(
        f"`{needing[0]}` is on, so the optimizer must know the order of the layers: pass the"
        " params or the model, the loss and its arguments, or groups=..."
      )
    number = self.config.grad_freeze.param_groups
    try:
      return find_groups(num_groups=number)
    except ValueError as error:
      raise ValueError(f"`grad_freeze.param_groups` is {number}: {error}") from error

  def train_step(
    self, loss_fn: Callable[..., Any], tx: optax.GradientTransformation, **options: Any
  ) -> Any:
    """Makes the train step: :func:`make_train_step` with the result of :meth:`optimizer`."""
    return _train_step.make_train_step(loss_fn, tx, **options)


class ModelBoost(AutoBoost):
  """The common part of the forms for Flax, which also change the model."""

  # The module of `plan_less_bn` and `less_bn` for the kind of model.
  _less_bn: ClassVar[Any]

  def _effect(self, decision: _levels.Decision) -> tuple[str, str]:
    return decision.settings, decision.saves

  def _notes(self) -> list[str]:
    if not self.is_on("less_bn"):
      return []
    parts = {"centralized gradients": "gc_flag", "a normalized head": "fn_flag"}
    left = [words for words, flag in parts.items() if getattr(self.config.less_bn, flag)]
    freezes = self.is_on("grad_freeze") and "grad_freeze" not in _levels.without_effect(self.config)
    saves = "only grad_freeze" if freezes else "no method"
    return [
      "in a model without BatchNorms (a transformer), less_bn is"
      f" {' and '.join(left) or 'without effect'}, and {saves} saves time per step"
    ]

  def plan(self, model: Any, /, *args: Any, **kwargs: Any) -> _less_bn.LessBNPlan | None:
    """Plans the changes of :meth:`model` to a model.

    Args:
      model: the NNX model or Linen module.
      *args: its inputs, as for a call; ``jax.ShapeDtypeStruct`` will do. In Linen, the module's
        variables may come first, see :func:`optax_boost.linen.plan_less_bn`.
      **kwargs: its keyword arguments, such as ``train=True``.

    Returns:
      A plan that prints, or None if `less_bn` is off.
    """
    if not self.is_on("less_bn"):
      return None
    return self._less_bn.plan_less_bn(model, *args, fn_flag=self.config.less_bn.fn_flag, **kwargs)

  def model(self, model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Prepares a model for training; arguments as for :meth:`plan`.

    Returns:
      A copy after :func:`optax_boost.nnx.less_bn` or :func:`optax_boost.linen.less_bn`, or `model`
      itself if that is off.
    """
    plan = self.plan(model, *args, **kwargs)
    return model if plan is None else self._less_bn.less_bn(model, plan=plan)


def auto_boost(
  level: str = "O0",
  config: _config.Config = None,
  *,
  axis_name: Any = None,
  local_axis_name: Any = None,
  adasum_on: str | None = None,
  compose: bool = False,
  key: jax.Array | int = 0,
  reference: bool = False,
  total_steps: int | None = None,
) -> AutoBoost:
  """Chooses and sets up several methods at once, by level or by a configuration.

  For models in Flax use ``optax_boost.nnx.auto_boost`` or ``optax_boost.linen.auto_boost``, which
  take the same arguments and also change the model; in plain JAX `less_bn` is centralized gradients
  alone.

  Args:
    level: ``"O0"``: nothing; ``"O1"``: fewer BatchNorms, centralized gradients, the first half of
      the layers frozen in the last 30 % of the training, and an average of the params over its last
      quarter, to evaluate (:func:`averaged_params`); ``"O2"``: frozen in its last 45 %, and
      adaptive summation where `axis_name` is given. Both are meant for a learning rate that decays
      over the training.
    config: a :class:`BoostConfig`, a dict of its schema (that of MindSpore), or the path of a JSON
      file. Keys that a dict or a file leaves out have the level's settings (``auto_boost(level)
      .config``); a :class:`BoostConfig` is taken as it is.
    axis_name: the named axis over which `adasum` runs, as for :func:`adasum`; None: one replica.
    local_axis_name: a further axis, over the devices of one server, which are averaged before
      `adasum` runs over servers. Its size must be ``common.device_number`` of the configuration, if
      that is set; the levels leave it open, MindSpore's default is 8. None: no such axis.
    adasum_on: ``"gradients"``: `adasum` goes before the optimizer; ``"updates"``: after it, on the
      weight deltas, as in MindSpore and Horovod. Each server then has an optimizer state of its
      own, which must be kept apart; see :func:`adasum`. None: ``"updates"`` with `reference`, else
      ``"gradients"``.
    compose: whether methods are combined that MindSpore runs alone: its freezing turns adaptive
      summation and accumulation off. (`dim_reduce` is always alone.)
    key: the seed of the freezing schedule, or a key.
    reference: whether keys that are left out have MindSpore's defaults (a normalized head; the
      interval schedule with 10 groups, in 30 % of the steps) instead of the level's settings.
      Freezing then turns adaptive summation off unless `compose` is True, and `dim_reduce` searches
      as MindSpore does, its steps through the optimizer.
    total_steps: the length of the training in steps of the optimizer, for freezing and averaging at
      its end; None: ``grad_freeze.total_steps`` and ``average.total_steps`` of the configuration.

  Returns:
    An :class:`AutoBoost`: ``tx = boost.optimizer(tx, loss_fn, params, batch)``, ``step =
    boost.train_step(loss_fn, tx)``, ``print(boost.explain())``.

  Raises:
    ValueError: a level, block or key is unknown, a value wrong, two settings contradict each
      other, or adasum is on without an axis. In ``optimizer``: a level's freezing or averaging is
      on without `total_steps`.
    TypeError: an argument is of the wrong kind.
    FileNotFoundError: `config` names no file.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"body": jnp.eye(3), "head": jnp.ones((3, 1))}
    >>> def loss_fn(params, x):
    ...   return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - 1) ** 2)
    >>> boost = optax_boost.auto_boost("O1", total_steps=10)
    >>> tx = boost.optimizer(optax.sgd(0.1), loss_fn, params, jnp.eye(3))
    >>> step = boost.train_step(loss_fn, tx)
    >>> state = step.init(params)
    >>> for _ in range(3):
    ...   state, metrics = step(state, jnp.eye(3))
    >>> [decision.method for decision in boost.decisions if decision.on]
    ['less_bn', 'grad_freeze', 'average']

  References:
    MindSpore's ``mindspore.boost.AutoBoost``. There the first configuration of a process counts
    for all that follow, and unknown levels and keys pass silently.
  """
  _levels.check_level(level)
  _base.check_axis_name("axis_name", axis_name)
  _base.check_axis_name("local_axis_name", local_axis_name)
  _base.check_bool("compose", compose)
  _base.check_bool("reference", reference)
  if adasum_on is not None:
    _base.check_name("adasum_on", adasum_on, _methods.ADASUM_PLACES)
  _base.as_key("key", key)
  if axis_name is None and local_axis_name is not None:
    raise ValueError(
      "`local_axis_name` is the axis inside of a server, so adasum needs `axis_name`, the axis over"
      f" servers, beside it; got local_axis_name={local_axis_name!r} and axis_name=None."
    )
  base = _config.BoostConfig() if reference else _levels.SETTINGS[level]
  config = _config.read_config(config, base)
  if total_steps is not None:
    _base.check_whole_number("total_steps", total_steps, static=True)
    steps = {name: {"total_steps": int(total_steps)} for name in ("grad_freeze", "average")}
    config = _config.BoostConfig.from_dict(steps, config)
  place = adasum_on or ("updates" if reference else "gradients")
  decisions = _levels.decide(
    level, config, axis_name, local_axis_name, place, compose=compose, reference=reference
  )
  boost = AutoBoost(level, config, decisions, axis_name, key, local_axis_name, place, reference)
  if axis_name is None and boost.is_on("adasum"):
    raise ValueError(
      f"level {level!r} with this configuration has `adasum` on, which runs over a named axis;"
      " got axis_name=None. Pass the axis of your `shard_map`, or turn adasum off: mode 'manual',"
      " adasum false."
    )
  return boost
