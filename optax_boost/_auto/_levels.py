"""The levels, what rules out what, and the decision that follows, as data."""

from collections.abc import Callable
import dataclasses
from typing import Any
import warnings

from optax_boost import _base
from optax_boost._auto import _config

# What each level turns on, as in the reference.
LEVELS: dict[str, tuple[str, ...]] = {
  "O0": (),
  "O1": ("less_bn", "grad_freeze"),
  "O2": ("less_bn", "grad_freeze", "adasum"),
}

# What each level takes for what is left out, instead of the reference's defaults. There, 30 % of
# the steps freeze, all along the training, mostly few groups: that saves little and costs accuracy.
# At the end of the training, when the learning rate is low, the first half of the layers costs
# least; in a convolutional network it has most of the work and few of the weights. The normalized
# head saves no time and, from the reference's multiplier of 1, learns slowly.
_SETTINGS = _config.BoostConfig(
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

# What the levels did with these settings, for `explain`; from benchmarks/results/auto_boost.md.
_NETWORK = "steps per second (ResNet-29 with bottlenecks, 32 x 32 images, batch 32, NNX, CPU)"
_ACCURACY = "ResNet-11, test accuracy: as O0's on digits, after four epochs of CIFAR-10"
MEASURED: dict[str, str] = {
  "O1": (
    f"1.31 times O0's {_NETWORK}; {_ACCURACY} 0.5 points lower, after 20 with augmented images 2.2"
  ),
  "O2": (
    f"1.47 times O0's {_NETWORK}; {_ACCURACY} 1.1 points lower, after 20 with augmented images 2.5"
  ),
}


@dataclasses.dataclass(frozen=True)
class Method:
  """What the decision must know of a method.

  Attributes:
    settings: how it is set, from the configuration.
    saves: what is expected of it, from the configuration.
    rules_out: the methods that it turns off, as in the reference.
    alone: whether it can't be combined with those even if asked to.
  """

  settings: Callable[[_config.BoostConfig], str]
  saves: Callable[[_config.BoostConfig], str]
  rules_out: tuple[str, ...] = ()
  alone: bool = False


def _less_bn_settings(config: _config.BoostConfig) -> str:
  block = config.less_bn
  head = "normalized head" if block.fn_flag else "head as it is"
  return head + (", centralized gradients" if block.gc_flag else ", gradients as they are")


def _freeze_settings(config: _config.BoostConfig) -> str:
  block = config.grad_freeze
  kind = ("continuous", "interval", "at the end")[block.freeze_type]
  return f"{kind}, {block.param_groups} groups, {1 - block.freeze_p:.0%} of the steps"


# In the order of their precedence.
METHODS: dict[str, Method] = {
  "dim_reduce": Method(
    settings=lambda c: f"{c.dim_reduce.n_components} dimensions, in the optimizer's place",
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
    settings=lambda c: "on gradients",
    saves=lambda c: "steps with large batches; costs an all-reduce's bytes",
  ),
  "grad_accumulation": Method(
    settings=lambda c: f"{c.grad_accumulation.grad_accumulation_step} micro-batches per step",
    saves=lambda c: "memory",
  ),
  "loss_scale_group": Method(
    settings=lambda c: f"a scale for each of {c.grad_freeze.param_groups} groups",
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
    settings: how it is set; empty if it is off.
    saves: what is expected of it; empty if it is off.
  """

  method: str
  on: bool
  why: str
  settings: str = ""
  saves: str = ""


def check_level(level: Any) -> None:
  """Checks a level's name.

  Args:
    level: what came.

  Raises:
    ValueError: there is no such level.
  """
  if level not in LEVELS:
    hint = _config.nearest(str(level).upper(), LEVELS)
    raise ValueError(f"There is no level {level!r}.{hint}")


def decide(
  level: str, config: _config.BoostConfig, *, compose: bool, replicas: bool = False
) -> tuple[Decision, ...]:
  """Decides which methods are on.

  Args:
    level: one of :data:`LEVELS`.
    config: the configuration.
    compose: whether methods that the reference runs alone are combined where ours do combine.
    replicas: whether there is an axis to sum over: then adasum stays on beside freezing.

  Returns:
    A decision per method.

  Raises:
    ValueError: the level is unknown, or two settings contradict each other.
  """
  check_level(level)
  wanted = _wanted(level, config)
  on = {name for name, (wants, _) in wanted.items() if wants}
  reasons = {name: why for name, (_, why) in wanted.items()}
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
      others = [other for other in others if method.alone or not (replicas and other == "adasum")]
      on -= set(others)
      for other in others:
        options = "axis_name=... or compose=True" if other == "adasum" else "compose=True"
        hint = "" if method.alone else f"; {options} combines them"
        reasons[other] = f"{name} goes before it, as in the reference{hint}"
  if "grad_accumulation" in on and config.grad_accumulation.grad_accumulation_step == 1:
    warnings.warn(
      "`boost.grad_accumulation` is on with `grad_accumulation.grad_accumulation_step` 1, which"
      " accumulates nothing.",
      _base.NoEffectWarning,
      stacklevel=4,
    )
  return tuple(
    Decision(name, True, reasons[name], METHODS[name].settings(config), METHODS[name].saves(config))
    if name in on
    else Decision(name, False, reasons[name])
    for name in METHODS
  )


def _wanted(level: str, config: _config.BoostConfig) -> dict[str, tuple[bool, str]]:
  mode = config.boost.mode
  wanted: dict[str, tuple[bool, str]] = {}
  for name in METHODS:
    switch = getattr(config.boost, name)
    if mode in ("enable_all", "disable_all"):
      wanted[name] = (mode == "enable_all", f"mode '{mode}'")
    elif mode == "manual" and switch is not None:
      wanted[name] = (switch, f"boost.{name} is {str(switch).lower()}")
    else:
      included = name in LEVELS[level]
      wanted[name] = (included, f"{'' if included else 'not '}in level {level}")
    # False is what the reference's own examples hold beside any mode; True was put there.
    if switch and not wanted[name][0]:
      raise ValueError(
        f"`boost.mode` {mode!r} contradicts `boost.{name}` true: the mode takes no switches"
        f"{f', and level {level} leaves it off' if mode == 'auto' else ''}. Pass mode 'manual'."
      )
  return wanted
