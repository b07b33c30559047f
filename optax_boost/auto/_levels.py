"""The levels, as data, and the decision that follows."""

import dataclasses
from typing import Any
import warnings

from optax_boost import _base
from optax_boost.auto import _config

# The methods that each level turns on: MindSpore's, and one of ours.
LEVELS: dict[str, tuple[str, ...]] = {
  "O0": (),
  "O1": ("less_bn", "grad_freeze", "average"),
  "O2": ("less_bn", "grad_freeze", "adasum", "average"),
}
# MindSpore does not have these: `reference` leaves them off unless a switch turns them on.
_OURS = ("average",)

# Each level's values of keys that are left out, instead of MindSpore's defaults. In MindSpore 30 %
# of the steps freeze, all along the training, mostly few groups: that saves little and costs
# accuracy. At the end of the training, when the learning rate is low, freezing the first half of
# the layers costs least; in a convolutional network it has most of the work and few of the weights.
# The normalized head saves no time and, from MindSpore's multiplier of 1, learns slowly. A server
# has as many devices as its axis.
_SETTINGS = _config.BoostConfig(
  common=_config.CommonConfig(device_number=None),
  less_bn=_config.LessBNConfig(fn_flag=False),
  grad_freeze=_config.GradFreezeConfig(2, freeze_type=2, freeze_p=0.7, total_steps=None),
)
SETTINGS: dict[str, _config.BoostConfig] = {
  "O0": _SETTINGS,
  "O1": _SETTINGS,
  "O2": _config.BoostConfig.from_dict({"grad_freeze": {"freeze_p": 0.55}}, _SETTINGS),
}

METHODS = (
  "dim_reduce",
  "less_bn",
  "grad_freeze",
  "adasum",
  "grad_accumulation",
  "loss_scale_group",
  "average",
)


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
  _base.check_type("level", level, str, f"one of {', '.join(map(repr, LEVELS))}")
  if level not in LEVELS:
    hint = _config.nearest(level.upper(), LEVELS)
    raise ValueError(f"There is no level {_base.shorten(level)}.{hint}")


def decide(
  level: str,
  config: _config.BoostConfig,
  axis_name: Any,
  local_axis_name: Any,
  adasum_on: str,
  *,
  compose: bool,
  reference: bool,
) -> tuple[Decision, ...]:
  """Decides which methods are on, with MindSpore's precedence.

  `compose` combines methods that MindSpore runs alone. An axis does so for adasum and freezing,
  unless `reference`.
  """
  on, reasons = _requests(level, config, reference)
  # It makes steps of its own.
  if "dim_reduce" in on:
    others = [name for name in METHODS[1:] if name in on]
    if compose and others:
      beside = ", ".join(f"`boost.{other}`" for other in others)
      raise ValueError(
        f"compose=True contradicts `boost.dim_reduce` beside {beside}: dim_reduce runs alone. Pass"
        " mode 'manual' with `boost.dim_reduce` false, or leave out compose=True."
      )
    on = {"dim_reduce"}
    reasons |= dict.fromkeys(others, "dim_reduce goes before it, as in MindSpore")
  if "grad_freeze" in on and not compose:
    # The arguments that combine a method with freezing, as far as they are missing.
    missing: dict[str, list[str]] = {"adasum": [], "grad_accumulation": ["compose=True"]}
    if axis_name is None:
      missing["adasum"].append("axis_name=...")
    if reference:
      missing["adasum"].append("compose=True")
    for other, arguments in missing.items():
      if other in on and arguments:
        on.remove(other)
        combine = f"{' and '.join(arguments)} combine{'s' if len(arguments) == 1 else ''}"
        reasons[other] = f"grad_freeze goes before it, as in MindSpore; {combine} them"
  for name, setting in without_effect(config).items():
    if name in on:
      warnings.warn(f"`boost.{name}` is on with {setting}.", _base.NoEffectWarning, stacklevel=3)
  words = _describe(config, axis_name, local_axis_name, adasum_on, reference=reference)
  return tuple(
    Decision(name, name in on, reasons[name], *(words[name] if name in on else ()))
    for name in METHODS
  )


def _requests(
  level: str, config: _config.BoostConfig, reference: bool
) -> tuple[set[str], dict[str, str]]:
  """The methods that level, mode and switches turn on; for each method, on or not, the reason."""
  mode = config.boost.mode
  on: set[str] = set()
  reasons: dict[str, str] = {}
  for name in METHODS:
    switch = getattr(config.boost, name)
    if mode == "manual" and switch is not None:
      requested, why = switch, f"boost.{name} is {str(switch).lower()}"
    elif reference and name in _OURS:
      requested, why = False, "not in MindSpore"
    elif mode in ("enable_all", "disable_all"):
      requested, why = mode == "enable_all", f"mode '{mode}'"
    else:
      requested = name in LEVELS[level]
      why = f"{'' if requested else 'not '}in level {level}"
      if name == "average" and requested and config.average.total_steps is None:
        requested, why = False, f"{why}, but without total_steps=..."
    # MindSpore's own examples hold False beside any mode; True was set by the user.
    if switch and not requested:
      raise ValueError(
        f"`boost.mode` {mode!r} contradicts `boost.{name}` true: the mode takes no switches"
        f"{f', and level {level} leaves it off' if mode == 'auto' else ''}. Pass mode 'manual'."
      )
    if switch is False and requested:
      why += f"; boost.{name} false is ignored: only mode 'manual' reads it"
    reasons[name] = why
    if requested:
      on.add(name)
  return on, reasons


def without_effect(config: _config.BoostConfig) -> dict[str, str]:
  """For each method whose settings leave nothing of it, these settings, in words."""
  freezing, settings = config.grad_freeze, {}
  if freezing.param_groups == 1:
    settings["grad_freeze"] = "`grad_freeze.param_groups` 1, which freezes nothing"
  elif freezing.freeze_p == 1:
    settings["grad_freeze"] = "`grad_freeze.freeze_p` 1, which freezes nothing"
  if config.grad_accumulation.grad_accumulation_step == 1:
    settings["grad_accumulation"] = (
      "`grad_accumulation.grad_accumulation_step` 1, which accumulates nothing"
    )
  return settings


def _describe(
  config: _config.BoostConfig,
  axis_name: Any,
  local_axis_name: Any,
  adasum_on: str,
  *,
  reference: bool,
) -> dict[str, tuple[str, str]]:
  """For each method its settings and the savings to expect, in words."""
  freezing, devices = config.grad_freeze, config.common.device_number
  share = f"{1 - freezing.freeze_p:.0%}"
  schedule = ("continuous", "interval", "at the end")[freezing.freeze_type]
  head = "normalized head" if config.less_bn.fn_flag else "head as it is"
  gradients = gradients_of(config)
  axes = f"on {adasum_on}, over {axis_name!r}"
  if local_axis_name is not None:
    axes += f", mean over {local_axis_name!r}"
  elif devices not in (None, 1):
    axes += f" (device_number {devices} needs local_axis_name=...)"
  micro_batches = config.grad_accumulation.grad_accumulation_step
  average = config.average
  subspace = "MindSpore's two trials, its steps go through the optimizer given"
  if not reference:
    subspace = "the optimizer given is not used: steps in the subspace need no learning rate"
  words = {
    "dim_reduce": (
      f"{config.dim_reduce.n_components} dimensions; {subspace}",
      "steps, not time per step",
    ),
    "less_bn": (
      f"{head}, {gradients}",
      "the time and memory of the removed BatchNorms; nothing in a model without them",
    ),
    "grad_freeze": (
      f"{schedule}, {freezing.param_groups} groups, {share} of the steps",
      f"the frozen layers' backward pass in {share} of steps",
    ),
    "adasum": (axes, "steps with large batches; costs an all-reduce's bytes"),
    "grad_accumulation": (f"{micro_batches} micro-batches per step", "memory"),
    "loss_scale_group": (
      f"a scale for each of {freezing.param_groups} groups",
      "half precision's time and memory",
    ),
    "average": (
      f"about {average.snapshots} snapshots in the last {1 - average.start:.0%} of the steps",
      "no time: gains accuracy, if the averages are evaluated; costs a copy of the params",
    ),
  }
  for name, setting in without_effect(config).items():
    words[name] = (words[name][0], f"nothing: {setting}")
  return words


def gradients_of(config: _config.BoostConfig) -> str:
  """The effect of `less_bn` on gradients, in words."""
  return "centralized gradients" if config.less_bn.gc_flag else "gradients as they are"
