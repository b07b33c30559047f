"""The levels, what rules out what, and the decision that follows, as data."""

from collections.abc import Callable
import dataclasses
from typing import Any
import warnings

from optax_boost import _base
from optax_boost.auto import _config
from optax_boost.auto import _summation

# The methods that each level turns on, as in MindSpore.
LEVELS: dict[str, tuple[str, ...]] = {
  "O0": (),
  "O1": ("less_bn", "grad_freeze"),
  "O2": ("less_bn", "grad_freeze", "adasum"),
}

# Each level's values of keys that are left out, instead of MindSpore's defaults. In MindSpore 30 %
# of the steps freeze, all along the training, mostly few groups: that saves little and costs
# accuracy. At the end of the training, when the learning rate is low, freezing the first half of
# the layers costs least; in a convolutional network it has most of the work and few of the weights.
# The normalized head saves no time and, from MindSpore's multiplier of 1, learns slowly. A server
# has as many devices as its axis.
_SETTINGS = _config.BoostConfig(
  common=_config.CommonConfig(device_number=None),
  less_bn=_config.LessBNConfig(fn_flag=False),
  grad_freeze=_config.GradFreezeConfig(
    param_groups=2, freeze_type=2, freeze_p=0.7, total_steps=None
  ),
)
SETTINGS: dict[str, _config.BoostConfig] = {
  "O0": _SETTINGS,
  "O1": _SETTINGS,
  "O2": dataclasses.replace(
    _SETTINGS, grad_freeze=dataclasses.replace(_SETTINGS.grad_freeze, freeze_p=0.55)
  ),
}


@dataclasses.dataclass(frozen=True)
class Method:
  """A method's entry in the decision: its settings and savings in words, and its precedence."""

  settings: Callable[[_config.BoostConfig, _summation.Summation], str]
  saves: Callable[[_config.BoostConfig], str]
  # The methods that it turns off, as in MindSpore; `alone`: even with `compose`.
  rules_out: tuple[str, ...] = ()
  alone: bool = False


def _less_bn_settings(config: _config.BoostConfig, _: _summation.Summation) -> str:
  block = config.less_bn
  head = "normalized head" if block.fn_flag else "head as it is"
  return head + (", centralized gradients" if block.gc_flag else ", gradients as they are")


def _freeze_settings(config: _config.BoostConfig, _: _summation.Summation) -> str:
  block = config.grad_freeze
  kind = ("continuous", "interval", "at the end")[block.freeze_type]
  return f"{kind}, {block.param_groups} groups, {1 - block.freeze_p:.0%} of the steps"


def _adasum_settings(config: _config.BoostConfig, summation: _summation.Summation) -> str:
  text = f"on {summation.on}, over {summation.axis_name!r}"
  if summation.local_axis_name is not None:
    return f"{text}, mean over {summation.local_axis_name!r}"
  if config.common.device_number in (None, 1):
    return text
  return f"{text} (device_number {config.common.device_number} needs local_axis_name=...)"


# In the order of their precedence.
METHODS: dict[str, Method] = {
  "dim_reduce": Method(
    settings=lambda c, _: f"{c.dim_reduce.n_components} dimensions, in the optimizer's place",
    saves=lambda c: "steps, not time per step",
    rules_out=("less_bn", "grad_freeze", "adasum", "grad_accumulation", "loss_scale_group"),
    alone=True,
  ),
  "less_bn": Method(
    settings=_less_bn_settings,
    saves=lambda c: "the time and memory of the BatchNorms that go",
  ),
  "grad_freeze": Method(
    settings=_freeze_settings,
    saves=lambda c: (
      f"the frozen layers' backward pass in {1 - c.grad_freeze.freeze_p:.0%} of steps"
    ),
    rules_out=("adasum", "grad_accumulation"),
  ),
  "adasum": Method(
    settings=_adasum_settings,
    saves=lambda c: "steps with large batches; costs an all-reduce's bytes",
  ),
  "grad_accumulation": Method(
    settings=lambda c, _: f"{c.grad_accumulation.grad_accumulation_step} micro-batches per step",
    saves=lambda c: "memory",
  ),
  "loss_scale_group": Method(
    settings=lambda c, _: f"a scale for each of {c.grad_freeze.param_groups} groups",
    saves=lambda c: "what half precision saves",
  ),
}


@dataclasses.dataclass(frozen=True)
class Decision:
  """Whether a method is on, and why.

  Attributes:
    method: its key in the configuration.
    on: whether it is on.
    why: the reason.
    settings: its settings; empty if it is off.
    saves: the savings to expect; empty if it is off.
  """

  method: str
  on: bool
  why: str
  settings: str = ""
  saves: str = ""


def check_level(level: Any) -> None:
  """Checks a level's name."""
  if not isinstance(level, str):
    names = ", ".join(map(repr, LEVELS))
    raise TypeError(f"`level` must be one of {names}; got {_base.shorten(level)}.")
  if level not in LEVELS:
    hint = _config.nearest(level.upper(), LEVELS)
    raise ValueError(f"There is no level {_base.shorten(level)}.{hint}")


def decide(
  level: str,
  config: _config.BoostConfig,
  summation: _summation.Summation,
  *,
  compose: bool,
  reference: bool,
) -> tuple[Decision, ...]:
  """Decides which methods are on, with MindSpore's precedence.

  `compose` combines methods that MindSpore runs alone. An axis does so for adasum and freezing,
  unless `reference`.
  """
  requests = _requests(level, config)
  has_axis = summation.axis_name is not None
  on = {name for name, (requested, _) in requests.items() if requested}
  reasons = {name: why for name, (_, why) in requests.items()}

  def keeps_adasum(method: str) -> bool:
    return method == "adasum" and has_axis and not reference

  def combining(method: str) -> str:
    if method != "adasum" or has_axis:
      return "compose=True combines"
    # Without an axis, compose=True alone is an error.
    return "axis_name=... and compose=True combine" if reference else "axis_name=... combines"

  for name, method in METHODS.items():
    if name not in on:
      continue
    others = [other for other in method.rules_out if other in on]
    if compose and method.alone and others:
      raise ValueError(
        f"compose=True contradicts `boost.{name}` beside `boost.{others[0]}`: {name} takes the"
        " optimizer's place. Turn one of them off."
      )
    if not compose:
      others = [other for other in others if method.alone or not keeps_adasum(other)]
      on -= set(others)
      for other in others:
        hint = "" if method.alone else f"; {combining(other)} them"
        reasons[other] = f"{name} goes before it, as in MindSpore{hint}"
  if "grad_accumulation" in on and config.grad_accumulation.grad_accumulation_step == 1:
    warnings.warn(
      "`boost.grad_accumulation` is on with `grad_accumulation.grad_accumulation_step` 1, which"
      " accumulates nothing.",
      _base.NoEffectWarning,
      stacklevel=4,
    )
  return tuple(
    Decision(name, True, reasons[name], method.settings(config, summation), method.saves(config))
    if name in on
    else Decision(name, False, reasons[name])
    for name, method in METHODS.items()
  )


def _requests(level: str, config: _config.BoostConfig) -> dict[str, tuple[bool, str]]:
  mode = config.boost.mode
  requests: dict[str, tuple[bool, str]] = {}
  for name in METHODS:
    switch = getattr(config.boost, name)
    if mode in ("enable_all", "disable_all"):
      requests[name] = (mode == "enable_all", f"mode '{mode}'")
    elif mode == "manual" and switch is not None:
      requests[name] = (switch, f"boost.{name} is {str(switch).lower()}")
    else:
      included = name in LEVELS[level]
      requests[name] = (included, f"{'' if included else 'not '}in level {level}")
    # MindSpore's own examples hold False beside any mode; True was set by the user.
    if switch and not requests[name][0]:
      raise ValueError(
        f"`boost.mode` {mode!r} contradicts `boost.{name}` true: the mode takes no switches"
        f"{f', and level {level} leaves it off' if mode == 'auto' else ''}. Pass mode 'manual'."
      )
  return requests
