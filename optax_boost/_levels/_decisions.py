"""Decides which methods are on: by one of our levels, or by MindSpore's rules."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from optax_boost import _sequences
from optax_boost._levels import _config

METHODS = tuple(_config.SCHEMA["boost"])[1:]
# MindSpore's levels turn on less_bn and grad_freeze at O1, and adasum, too, at O2.
LEVELS = {"O0": METHODS[:0], "O1": METHODS[1:3], "O2": METHODS[1:4]}
# Our levels freeze from this share of the training on, since freezing costs least accuracy when the
# learning rate is low. MindSpore freezes throughout the training, mostly few
# layers, which saves little time and costs accuracy. Levels for tokens freeze nothing, since that
# costs a transformer more than it saves. `fn_flag` is off, since a normalized head saves no time
# and learns slowly.
_FREEZES_FROM = {"O1": 0.7, "O2": 0.55}
_AVERAGES_FROM, _SNAPSHOTS = 0.75, 20
# Our levels use public names for methods; a configuration uses MindSpore's names.
SEQUENCES = "sequence_length_warmup"
CENTRALIZE, FREEZE, AVERAGE = "centralize", "freeze_layers", "average_params"
# Methods from which a tuned transformer gains nothing, with or without sequences cut short.
_NOT_FOR_TOKENS = ("less_bn", CENTRALIZE, FREEZE, AVERAGE)
# The share of the steps before sequences are full. The larger share takes less time, but leaves too
# few steps to train the last half of a table of learned positions.
_WARMUP_FRACTION, _LONG_WARMUP_FRACTION = 0.5, 0.75
_ONE_REPLICA = "one replica: axis_name is None"
# The settings of each method that is on, the reason why each method is on or off, and a text that
# names the keys of a configuration that have no effect.
Decision: TypeAlias = tuple[_config.Blocks, dict[str, str], str]


def decide_level(
  level: str, total_steps: int | None, sequence_length: int | None, axes: dict[str, Any]
) -> Decision:
  """Returns the :data:`Decision` for one of our levels.

  `axes` has the arguments `axis_name` and `local_axis_name` of :func:`auto_boost`.
  """
  if level == "O0":
    return {}, {}, ""
  if total_steps is None:
    raise ValueError(
      f"`total_steps` must be the number of optimizer steps of the training at level {level!r}; got"
      " None."
    )
  if sequence_length is None:
    on = _for_images(level, total_steps)
    why = dict.fromkeys(on, f"in level {level}")
    why[FREEZE] += ", if it gets `groups`"
  else:
    on = _for_tokens(total_steps, sequence_length)
    why = dict.fromkeys(on, f"in level {level}")
    why |= dict.fromkeys(_NOT_FOR_TOKENS, "a model of tokens gains nothing by it")
  if level == "O1":
    why["adasum"] = f"not in level {level}"
  elif axes["axis_name"] is None:
    why["adasum"] = _ONE_REPLICA
  else:
    on["adasum"], why["adasum"] = {"on": "gradients", **axes}, f"in level {level}"
  return on, why, ""


def _for_images(level: str, total_steps: int) -> _config.Blocks:
  """Returns the settings of each method that a level for images turns on, except `adasum`."""
  start = round(_AVERAGES_FROM * total_steps)
  return {
    "less_bn": {"fn_flag": False},
    CENTRALIZE: {},
    FREEZE: {"param_groups": 2, "first": _FREEZES_FROM[level], "total_steps": total_steps},
    AVERAGE: {"start": start, "every": max(1, round((total_steps - start) / _SNAPSHOTS))},
  }


def _for_tokens(total_steps: int, full_length: int) -> _config.Blocks:
  """Returns the settings of each method that a level for tokens turns on, except `adasum`."""
  warmup = {
    "full_length": full_length,
    "total_steps": total_steps,
    "warmup_fraction": _WARMUP_FRACTION,
    "growth": "linear",
  }
  return {SEQUENCES: warmup}


def warmup_fraction(level: str, tables: list[str] | None) -> tuple[float, str]:
  """Returns the share of steps before sequences are full, and the reason, or "" at level O1.

  `tables` are the paths of the model's tables of learned positions; None if these are unknown.
  """
  if level != "O2":
    return _WARMUP_FRACTION, ""
  if tables is None:
    reason = "the optimizer got no loss, params and batch that tell the positions"
  elif tables:
    reason = f"'{tables[0]}' is of learned positions, whose last ones need the steps"
  else:
    return _LONG_WARMUP_FRACTION, "no positions are learned"
  return _WARMUP_FRACTION, f"as at O1: {reason}"


def explain_prices(prices: Mapping[int, float] | None, schedule: _sequences.LengthSchedule) -> str:
  """Returns a line about the measured prices of lengths, and which lengths they leave out."""
  full = schedule.full_length
  if prices is None:
    return (
      "what a step on short sequences costs on this device is not known:"
      " `boost.measure(step.on_copy(state), batch)` measures it"
    )
  short = {length: price for length, price in prices.items() if length != full}
  listed = ", ".join(f"{price:.2f} at {length}" for length, price in short.items())
  dear = [str(length) for length, price in short.items() if price > _sequences.HIGHEST_PRICE]
  decision = "all are kept"
  if len(schedule.lengths) == 1:
    decision = "none saves time, so sequences stay whole"
  elif dear:
    decision = f"{' and '.join(dear)} left out, above {_sequences.HIGHEST_PRICE}"
  return f"measured, a step takes {listed} of the time of one at {full}: {decision}"


def decide_config(level: str, config: _config.Blocks, axes: dict[str, Any]) -> Decision:
  """Returns the :data:`Decision` for a configuration of MindSpore.

  MindSpore's defaults are used, and methods that exclude each other are turned off as in MindSpore.
  `axes` has the arguments `axis_name` and `local_axis_name` of :func:`auto_boost`.
  """
  values = {
    name: {key: config.get(name, {}).get(key, k.default) for key, k in keys.items()}
    for name, keys in _config.SCHEMA.items()
  }
  switches = config.get("boost", {})
  on, why = _requests(level, values["boost"]["mode"], switches)

  def leave_out(names: Iterable[str], reason: str) -> None:
    for name in on.intersection(names):
      on.remove(name)
      why[name] = reason

  if "dim_reduce" in on:
    why["dim_reduce"] += "; an SGD of rate 1 takes the optimizer's place, as in MindSpore"
    leave_out(METHODS[1:], "dim_reduce runs alone, as in MindSpore")
  if "grad_freeze" in on:
    leave_out(METHODS[3:5], "grad_freeze rules it out, as in MindSpore")
  if "loss_scale_group" in on:
    raise ValueError(
      "`boost.loss_scale_group` must be false; got true. Put `optax_boost.dynamic_loss_scale`"
      " around the optimizer."
    )
  if axes["axis_name"] is None:
    leave_out(("adasum",), _ONE_REPLICA)
  if 1 in (values["grad_freeze"]["param_groups"], values["grad_freeze"]["freeze_p"]):
    leave_out(("grad_freeze",), "with param_groups 1 or freeze_p 1 nothing freezes")
  if values["grad_accumulation"]["grad_accumulation_step"] == 1:
    leave_out(("grad_accumulation",), "grad_accumulation_step is 1")
  values["adasum"] = {"on": "updates", **axes}
  reasons = {
    f"{block}.{key}": k.ignored for block, v in _config.SCHEMA.items() for key, k in v.items()
  }
  settings = {
    name: {key: v for key, v in values[name].items() if not reasons.get(f"{name}.{key}")}
    for name in METHODS
    if name in on
  }
  for name in METHODS:
    if name in switches and switches[name] != (name in on):
      reasons[f"boost.{name}"] = f"{str(switches[name]).lower()}, but {why[name]}"
  keys = [f"{name}.{key}" for name, block in config.items() for key in block]
  ignored = "; ".join(f"`{key}` ({reasons[key]})" for key in keys if reasons[key])
  return settings, why, ignored


def _requests(level: str, mode: str, switches: dict[str, bool]) -> tuple[set[str], dict[str, str]]:
  """Returns the methods that MindSpore turns on, and for each method why it is on or off.

  `mode` is the configuration's ``boost.mode``. `switches` are the values of the block ``boost``,
  such as True for ``less_bn``; they count only in the mode "manual".
  """
  on, why = set(), {}
  for name in METHODS:
    if mode == "manual" and name in switches:
      wanted, why[name] = switches[name], f"boost.{name} is {str(switches[name]).lower()}"
    elif mode in ("enable_all", "disable_all"):
      wanted, why[name] = mode == "enable_all", f"mode {mode!r}"
    else:
      wanted = name in LEVELS[level]
      why[name] = f"{'' if wanted else 'not '}in MindSpore's level {level}"
    if wanted:
      on.add(name)
  return on, why
