"""``auto_boost`` chooses methods; ``AutoBoost`` applies them to a model, optimizer and batches."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import time
from typing import Any

import optax

from optax_boost import _sequences
from optax_boost._foundation import _checks, _mesh_axes, _tree_checks, _types, _warnings
from optax_boost._levels import _config, _decisions, _mindspore_methods
from optax_boost._methods import _centralization, _layer_arguments, _less_bn
from optax_boost._step import _accumulation, _average_params, _freezing, _wrapper
from optax_boost._trace import _layer_axes, _layer_groups

# What messages ask for if layers can't be frozen.
_GROUPS = (
  "the layers by name, in the order of the forward pass, as `groups=['stem', 'blocks/*', 'head']`"
)


@dataclasses.dataclass
class AutoBoost:
  """The methods that a level or a configuration turns on; made by :func:`auto_boost`.

  Attributes:
    title: the first line of :meth:`explain`, which names the level and a configuration's mode.
    level: ``"O0"``, ``"O1"`` or ``"O2"``.
    on: the settings of each method that is on, by the method's public name
      (``"freeze_layers"``) or, with a configuration, by MindSpore's key (``"grad_freeze"``).
    why: for each method, the reason why it is on or off.
    ignored: the configuration's keys without effect, and why.
    seed: the seed of the freezing schedule.
    axes: how :meth:`batch` cuts leaves that aren't cut along axis 1.
    effects: for each method, what the last call of :meth:`model` or :meth:`optimizer` changed, in
      words, and whether it changed anything.
    length_schedule: the sequence lengths that :meth:`batch` cuts to; None: batches stay whole.
    batches: the number of calls of :meth:`batch`, counted only at a level for tokens.
    cut_batches: the number of batches that :meth:`batch` has cut.
  """

  title: str
  level: str
  on: _config.Blocks
  why: dict[str, str]
  ignored: str = ""
  seed: int = 0
  axes: Mapping[str, _sequences.LeafAxes] | None = None
  effects: dict[str, tuple[str, bool]] = dataclasses.field(
    default_factory=dict, compare=False, repr=False
  )
  length_schedule: _sequences.LengthSchedule | None = dataclasses.field(
    default=None, compare=False, repr=False
  )
  batches: int = dataclasses.field(default=0, compare=False, repr=False)
  cut_batches: int = dataclasses.field(default=0, compare=False, repr=False)

  def __post_init__(self) -> None:
    if (warmup := self.on.get(_decisions.SEQUENCES)) is not None:
      self.length_schedule = _sequences.sequence_length_warmup(**warmup)

  def explain(self) -> str:
    """Returns a table of the methods: whether each is on, why, its settings, and what it changed.

    The first line says whether the level is for images or for tokens. The table says what the calls
    of :meth:`model`, :meth:`optimizer` and :meth:`batch` have changed so far, so print it again
    after the training. A method that changed nothing is shown as off.
    """
    lines = [self.title]
    for name, reason in self.why.items():
      settings = ", ".join(f"{k}={v!r}" for k, v in self.on.get(name, {}).items())
      effect, acts = self.effects.get(name, ("", True))
      if self.length_schedule is not None and name == _decisions.SEQUENCES:
        effect = "\n".join(
          [*self._explain_sequences(self.length_schedule), *filter(None, [effect])]
        )
        acts = self.cut_batches > 0
      word = "on " if name in self.on and acts else "off"
      lines.append(f"{name:22} {word}  {reason:38}  {settings}")
      lines += [f"{'':27} here: {line}" for line in effect.splitlines()]
    if self.ignored:
      lines.append(f"without effect: {self.ignored}")
    return "\n".join(map(str.rstrip, lines))

  def _explain_sequences(self, schedule: _sequences.LengthSchedule) -> list[str]:
    """Returns lines for :meth:`explain` about sequences.

    They tell the lengths, how many batches were cut, and which losses lose targets by the cuts.
    """
    full = schedule.full_length
    begins = ", ".join(
      f"{n} from step {step}" for n, step in zip(schedule.lengths, schedule.starts, strict=True)
    )
    cut = f"{self.cut_batches} of {self.batches} batches were cut"
    if not self.batches:
      cut = "no batch was cut: call `boost.batch(batch, step)` for each"
    return [
      f"sequences of {begins}",
      _decisions.explain_prices(self.on[_decisions.SEQUENCES].get("length_prices"), schedule),
      cut,
      f"a loss that shifts sequences of {full} tokens itself loses the last target of each window;"
      f" sequences of {full + 1} lose none",
    ]

  def model(self, less_bn: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Removes BatchNorms from a Flax model if the method ``"less_bn"`` is on.

    Args:
      less_bn: ``optax_boost.nnx.less_bn`` or ``optax_boost.linen.less_bn``.
      model: the NNX model, or the Linen module.
      *args: the other arguments of `less_bn`, with which it traces the model.
      **kwargs: the keyword arguments of `less_bn`.

    Returns:
      The result of `less_bn`; or `model` itself if the method is off.
    """
    if "less_bn" not in self.on:
      return model
    settings = self.on["less_bn"]

    def record(plan: _less_bn.Plan) -> None:
      effect = f"{len(plan.removed)} of {plan.norms} BatchNorms removed"
      if settings["fn_flag"]:
        effect += f", {plan.head or 'no layer'} normalized"
      if centralizes := settings.get("gc_flag", False):
        effect += "; the optimizer centralizes gradients"
      acts = bool(plan.removed or plan.head or centralizes)
      self.effects["less_bn"] = effect, acts

    return less_bn(model, *args, fn_flag=settings["fn_flag"], on_plan=record, **kwargs)

  def batch(self, batch: _types.Batch, step: int) -> _types.Batch:
    """Returns the batch with sequences cut to the length that the level chooses for a step.

    Call this method for every batch, at each level, before the train step or in the loader. If the
    level doesn't cut sequences in this step, the batch is returned unchanged. :meth:`explain`
    counts the calls in its own process only.

    Args:
      batch: a tree of arrays, as for :func:`cut_sequences`.
      step: the number of the optimizer step, counted from 0, without the micro-steps of
        :func:`accumulate`.

    Raises:
      ValueError: at a level for tokens, the batch has a leaf that must be named in the argument
        `axes` of :func:`auto_boost`; :func:`cut_sequences` explains `axes`.
    """
    if self.length_schedule is None:
      return batch
    length, full = self.length_schedule(step), self.length_schedule.full_length
    # Only the first batch is searched for leaves that hold classes. In a later batch, the values of
    # a mask may look like classes by chance.
    first = self.batches == 0
    windows = _sequences.cut(batch, length, full, self.axes, reads_values=first)
    self.batches += 1
    self.cut_batches += length < full
    return windows

  def coming_batches(self, batch: _types.Batch, step: int = 0) -> list[_types.Batch]:
    """Returns a list: the batch, cut to the length of `step` and to each length that comes later.

    ``train_step.compile_ahead(state, boost.coming_batches(batch))`` compiles the program of the
    next step, and those of later lengths while the first length trains. The list has the batch
    itself if :meth:`batch` cuts nothing; :meth:`explain` doesn't count these batches.

    Args:
      batch: a batch, as for :meth:`batch`; its values don't matter.
      step: the number of the next optimizer step.
    """
    if self.length_schedule is None:
      return [batch]
    lengths, full = self.length_schedule.lengths, self.length_schedule.full_length
    coming = lengths[lengths.index(self.length_schedule(step)) :]
    return [_sequences.cut(batch, length, full, self.axes, reads_values=False) for length in coming]

  def measure(
    self,
    step: Callable[[_types.Batch], Any],
    batch: _types.Batch,
    *,
    rounds: int = 5,
    clock: Callable[[], float] = time.perf_counter,
  ) -> dict[int, float]:
    """Times a step at each length of a level for tokens, and drops lengths that save no time.

    A length is dropped if a step at this length takes more than 0.85 of the time of one on whole
    sequences, as :func:`length_prices` measures it. If all lengths are dropped, the level is
    ``"O0"``. Call this method before the training; :meth:`explain` then shows the prices.

    Args:
      step: a function that makes a step on a copy of the training's state: ``step.on_copy(state)``,
        or for NNX ``step.on_copy(model, optimizer)``.
      batch: a batch of full sequences, as for :meth:`batch`.
      rounds: how often each length is timed, as for :func:`length_prices`.
      clock: a function that returns the time in seconds.

    Returns:
      The prices, for the argument `length_prices` of :func:`auto_boost` in a resumed training. The
      dict is empty, and nothing is timed, if the level cuts no sequences.
    """
    warmup = self.on.get(_decisions.SEQUENCES)
    if warmup is None:
      return {}
    # Lengths that a short training leaves out are measured, too, since `optimizer` may still change
    # from when on sequences are full, and with it which lengths these are.
    all_lengths = warmup | {"length_prices": None, "total_steps": 1000}
    schedule = _sequences.sequence_length_warmup(**all_lengths)
    prices = _sequences.length_prices(
      step, batch, schedule, axes=self.axes, rounds=rounds, clock=clock
    )
    warmup["length_prices"] = prices
    self.length_schedule = _sequences.sequence_length_warmup(**warmup)
    return prices

  def _prepare_sequences(
    self,
    schedule: _sequences.LengthSchedule,
    loss: _types.LossFn | None,
    params: optax.Params | None,
    args: tuple[Any, ...],
  ) -> None:
    """Checks the loss on sequences cut short, and chooses from which step on they stay whole."""
    if len(schedule.lengths) == 1:
      return
    tables, effect = None, "the loss of windows was not tried: the optimizer got no batch"
    if loss is not None and params is not None:
      if _sequences.check_first_windows(loss, params, args, schedule, self.axes):
        effect = ""
      if self.level == "O2":
        tables = _sequences.position_tables(loss, params, args, schedule, self.axes)
    warmup = self.on[_decisions.SEQUENCES]
    warmup["warmup_fraction"], reason = _decisions.warmup_fraction(self.level, tables)
    self.length_schedule = _sequences.sequence_length_warmup(**warmup)
    self.effects[_decisions.SEQUENCES] = "\n".join(filter(None, [reason, effect])), True

  def optimizer(
    self,
    tx: optax.GradientTransformation,
    loss_fn: _types.LossFn | None = None,
    params: optax.Params | None = None,
    *args: Any,
    groups: Sequence[str] | _layer_groups.LayerGroups | None = None,
    layers: _layer_axes.LayerAxes | None = None,
  ) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer, wrapped in the methods that are on.

    From the inside out: centralization, adaptive summation, freezing, accumulation, average. Only
    `dim_reduce` replaces the optimizer.

    Args:
      tx: the optimizer.
      loss_fn: the loss ``loss_fn(params, *args)``; a trace of the loss shows the axes of kernels,
        also of layers in scans. A level for tokens also computes the loss of short sequences. For
        Flax models, make the loss with ``nnx.split_loss`` or ``linen.split_loss``.
      params: the params.
      *args: the loss's other arguments; for a Flax model, the model state, then a batch.
      groups: the layers for freezing: patterns in the order of the forward pass, as for
        :func:`layer_groups`, such as ``["stem", "blocks/*", "head"]``, which the level divides into
        as many groups as it has; or groups that :func:`layer_groups` made. None: a level freezes
        nothing.
      layers: axes from :func:`layer_axes`, for a leaf whose axes the trace doesn't tell. None: axes
        from a trace.

    Raises:
      ValueError: a configuration freezes, and there are no `groups`; `groups` has patterns, and
        there are no params, or too few layers; `dim_reduce` is on without params or a subspace;
        `groups` are given to a level for tokens; the loss of short sequences isn't finite, or
        positions in the batch run past a table of the model.
    """
    tx = _checks.check_transformation("tx", tx)
    if params is not None:
      _tree_checks.check_inexact(params, "auto_boost", _tree_checks.KEEP_OUT)
    if "dim_reduce" in self.on:
      return _mindspore_methods.subspace_optimizer(params, **self.on["dim_reduce"])

    on = self.on
    if self.length_schedule is not None:
      if groups is not None:
        raise ValueError(
          "`groups` must be None at a level for tokens, which freezes no layers; put"
          " optax_boost.freeze_layers(boost.optimizer(...), groups, schedule) around it."
        )
      self._prepare_sequences(self.length_schedule, loss_fn, params, args)
    if "less_bn" in on and "gc_flag" not in on["less_bn"]:  # at a level, without a configuration
      self.effects.setdefault("less_bn", ("`boost.model` was not called", False))
    ours = _decisions.FREEZE in on
    freeze = _decisions.FREEZE if ours else "grad_freeze"
    freezing = on.get(freeze, {})
    centralizes = _decisions.CENTRALIZE in on or on.get("less_bn", {}).get("gc_flag", False)
    layers = _layer_arguments.check_layers(layers)
    needs_layers = layers is None and (centralizes or "adasum" in on)
    if needs_layers and loss_fn is not None and params is not None:
      layers = _layer_axes.layer_axes(loss_fn, params, *args)
    # Each method wraps the methods above it. A new method is added here and in `_decisions`.
    if centralizes:
      centralize = _centralization.centralize(layers=layers)
      tx = _wrapper.replace_inner(tx, lambda inner: optax.chain(centralize, inner))
      if _decisions.CENTRALIZE in on:
        self.effects[_decisions.CENTRALIZE] = _centralized(layers)
    if "adasum" in on:
      adasum = functools.partial(_mindspore_methods.with_adasum, layers=layers, **on["adasum"])
      tx = _wrapper.replace_inner(tx, adasum)
    if freezing and groups is not None:
      groups = _as_groups(groups, params, freezing["param_groups"])
      schedule = _mindspore_methods.schedule(**freezing, seed=self.seed)
      tx = _freezing.freeze_layers(tx, groups, schedule)
      effect = f"layers in {len(groups)} groups, the last of which never freezes"
      if ours:
        begin = round(freezing["first"] * freezing["total_steps"])
        effect += f"; the first is frozen from step {begin} on"
      self.effects[freeze] = effect, True
    elif ours:
      self.effects[freeze] = f"no layers frozen: pass {_GROUPS}", False
    elif freezing:
      raise ValueError(f"`boost.optimizer` must be given {_GROUPS}, since `{freeze}` is on.")
    if accumulation := on.get("grad_accumulation"):
      tx = _accumulation.accumulate(tx, accumulation["grad_accumulation_step"])
    if average := on.get(_decisions.AVERAGE):
      tx = _average_params.average_params(tx, **average)
      often = "each step" if average["every"] == 1 else f"every {average['every']} steps"
      effect = f"from step {average['start']} on, {often} adds its params to the average"
      self.effects[_decisions.AVERAGE] = f"{effect}, which is for evaluation", True
    return tx


def _centralized(layers: _layer_axes.LayerAxes | None) -> tuple[str, bool]:
  """Returns what centralization does to these layers, in words, and whether it does anything."""
  if layers is None:
    return "kernels found by name when the optimizer starts, since no loss was passed", True
  kernels = sum(axes is not None and axes.mixes_inputs for axes in layers.axes)
  return f"the gradients of {kernels} of {len(layers.axes)} leaves are centralized", kernels > 0


def _as_groups(
  groups: Sequence[str] | _layer_groups.LayerGroups, params: optax.Params | None, num_groups: int
) -> _layer_groups.LayerGroups:
  """Returns the argument `groups` of :meth:`AutoBoost.optimizer` as groups."""
  if isinstance(groups, _layer_groups.LayerGroups):
    return groups
  if params is None:
    raise ValueError(
      "`boost.optimizer` must be given `params`, too, if `groups` has names of layers; or pass"
      " `groups=optax_boost.layer_groups(params, names, num_groups=...)`."
    )
  return _layer_groups.layer_groups(params, groups, num_groups=num_groups)


def auto_boost(
  level: str = "O0",
  total_steps: int | None = None,
  *,
  sequence_length: int | None = None,
  axes: Mapping[str, _sequences.LeafAxes] | None = None,
  length_prices: Mapping[Any, float] | None = None,
  axis_name: _types.AxisName | None = None,
  local_axis_name: _types.AxisName | None = None,
  config: _config.Config = None,
  seed: int = 0,
) -> AutoBoost:
  """Chooses and sets up several methods at once, by a level or by MindSpore's configuration.

  For Flax models, :meth:`AutoBoost.model` also removes BatchNorms.

  Args:
    level: ``"O0"`` turns nothing on. For images, ``"O1"`` removes some BatchNorms, centralizes
      gradients, averages the params over the last quarter of the training for evaluation
      (:func:`averaged_params`), and freezes the first half of the layers in the last 30 % of the
      training if :meth:`AutoBoost.optimizer` gets `groups`, which pays off for convolutions.
      ``"O2"`` freezes in the last 45 %, and also sums gradients adaptively over `axis_name`. For
      tokens (`sequence_length`),
      ``"O1"`` begins with short sequences, which are full after half of the steps
      (:meth:`AutoBoost.batch`). ``"O2"`` also sums gradients adaptively, and sequences are full
      after three quarters if :meth:`AutoBoost.optimizer` gets a loss without a table of learned
      positions. Let the learning rate decay. With a `config`: MindSpore's level.
    total_steps: the number of optimizer steps of the training; ``"O1"`` and ``"O2"`` need it.
    sequence_length: the number of tokens of a full sequence that the loss predicts, as for
      :func:`cut_sequences`, for a model of tokens. None: a level for images.
    axes: how to cut leaves of a batch that aren't cut along axis 1, as for :func:`cut_sequences`.
    length_prices: what :meth:`AutoBoost.measure` or :func:`length_prices` returned: lengths at
      which a step takes more than 0.85 of the time of a full one are left out. Pass the prices of a
      training to its resumed runs. None: all lengths are used, until :meth:`AutoBoost.measure`.
    axis_name: the named axis of `adasum`, as for :func:`adasum`. None: one replica.
    local_axis_name: an axis over the devices of a server, averaged first. None: no such axis.
    config: MindSpore's ``boost_config_dict``, word for word, as a dict, a path of a JSON file, or
      JSON. It means the same as in MindSpore: missing keys have MindSpore's defaults; `dim_reduce`
      runs alone, and replaces your optimizer; `grad_freeze` turns off `adasum` and
      `grad_accumulation`; `adasum` acts on updates. One :class:`NoEffectWarning` names the keys
      without effect here. None: a level of `optax_boost`.
    seed: the seed of the freezing schedule.

  Returns:
    An :class:`AutoBoost`, used as below; ``print(boost.explain())`` shows what is on.

  Raises:
    ValueError: a level, or a block or key of the `config`, is unknown; a value is not allowed;
      `axes` or `length_prices` are given without `sequence_length`, or `sequence_length` with a
      `config`.

  Examples:
    >>> import jax.numpy as jnp, optax, optax_boost
    >>> params = {"body": jnp.eye(3), "head": jnp.ones((3, 1))}
    >>> def loss_fn(params, x):
    ...   return jnp.mean((jnp.tanh(x @ params["body"]) @ params["head"] - 1) ** 2)
    >>> boost = optax_boost.auto_boost("O1", total_steps=10)
    >>> tx = boost.optimizer(optax.sgd(0.1), loss_fn, params, jnp.eye(3), groups=["body", "head"])
    >>> step = optax_boost.make_train_step(loss_fn, tx)
    >>> list(boost.on)
    ['less_bn', 'centralize', 'freeze_layers', 'average_params']
  """
  _checks.check_type("level", level, str, f"one of {', '.join(map(repr, _decisions.LEVELS))}")
  if level not in _decisions.LEVELS:
    hint = _config.nearest(level.upper(), _decisions.LEVELS)
    raise ValueError(f"There is no level {_checks.shorten(level)}.{hint}")
  mesh_axes = {"axis_name": axis_name, "local_axis_name": local_axis_name}
  for argument, name in mesh_axes.items():
    _mesh_axes.check_axis_name(argument, name)
  if axis_name is None and local_axis_name is not None:
    raise ValueError(
      "`axis_name` must be the axis over servers with a `local_axis_name`; got None."
    )
  if total_steps is not None:
    _checks.check_whole_number("total_steps", total_steps, static=True)
  if sequence_length is not None:
    _checks.check_whole_number("sequence_length", sequence_length, static=True)
  _sequences.match_axes(axes, [])
  prices = None if length_prices is None else _sequences.read_prices(length_prices)
  for argument, value in {"axes": axes, "length_prices": length_prices}.items():
    if value is not None and sequence_length is None:
      raise ValueError(
        f"`{argument}` must be None without `sequence_length`; got {_checks.shorten(value)}."
      )
  _checks.check_whole_number("seed", seed, minimum=0, static=True)
  if config is None:
    title = f"level {level} for images; for tokens pass `sequence_length`"
    if level == "O0":
      title = "level O0, which changes nothing"
    elif sequence_length is not None:
      title = f"level {level} for tokens, sequences of {sequence_length}"
    decision = _decisions.decide_level(level, total_steps, sequence_length, mesh_axes)
    if prices is not None and _decisions.SEQUENCES in decision[0]:
      decision[0][_decisions.SEQUENCES]["length_prices"] = prices
    return AutoBoost(title, level, *decision, seed=seed, axes=axes)
  values = _config.read_config(config)
  if sequence_length is not None:
    raise ValueError(
      "`sequence_length` must be None with a `config`, for MindSpore's levels leave sequences"
      f" whole; got {sequence_length}."
    )
  on, why, ignored = _decisions.decide_config(level, values, mesh_axes)
  if ignored:
    message = f"keys of MindSpore's configuration without effect here: {ignored}."
    _warnings.warn(message, _warnings.NoEffectWarning)
  mode = values.get("boost", {}).get("mode", "auto")
  title = f"MindSpore's configuration, level {level}, mode {mode}"
  return AutoBoost(title, level, on, why, ignored, seed)
