"""The configuration of ``auto_boost``: MindSpore Boost's dict and JSON schema, typed and strict."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import dataclasses
import difflib
import json
import os
import sys
from typing import Any
from typing import NamedTuple
from typing import TypeAlias

import numpy as np

from optax_boost import _base
from optax_boost import _files

MODES = ("auto", "manual", "enable_all", "disable_all")


class _Rule(NamedTuple):
  """A test that a value must pass, and its words for an error."""

  allows: Callable[[Any], bool]
  words: str


def _one_of(*values: Any) -> _Rule:
  # True equals 1, but is of another type.
  return _Rule(
    lambda v: any(type(v) is type(w) and v == w for w in values), f"one of {list(values)}"
  )


def _or_null(rule: _Rule) -> _Rule:
  return _Rule(lambda v: v is None or rule.allows(v), f"{rule.words} or null")


def _is_number(value: Any) -> bool:
  number = isinstance(value, int | float) and not isinstance(value, bool)
  # Neither nan nor an integer that no float holds.
  return number and abs(value) <= sys.float_info.max


_FLAG = _Rule(lambda v: isinstance(v, bool), "true or false")
_SWITCH = _Rule(lambda v: v is None or isinstance(v, bool), "true or false")
_COUNT = _Rule(
  lambda v: type(v) is int and 1 <= v <= _base.LARGEST_COUNT,
  f"an integer >= 1 and <= {_base.LARGEST_COUNT}",
)
_SHARE = _Rule(lambda v: _is_number(v) and 0 < v <= 1, "a number > 0 and <= 1")
_INSIDE = _Rule(lambda v: _is_number(v) and 0 < v < 1, "a number > 0 and < 1")
_DECAY = _Rule(lambda v: _is_number(v) and 0 <= v < 1, "a number >= 0 and < 1")
_RATE = _Rule(lambda v: _is_number(v) and v >= 0, "a number >= 0")
_PATH = _or_null(_Rule(lambda v: isinstance(v, str) and v != "" and "\0" not in v, "a path"))


def _key(default: Any, rule: _Rule) -> Any:
  return dataclasses.field(default=default, metadata={"rule": rule})


class _Block:
  """A block of the schema; its values are checked however it is made."""

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):  # type: ignore[arg-type]
      value, rule = getattr(self, field.name), field.metadata["rule"]
      if isinstance(value, np.generic):  # JSON knows Python's numbers only
        value = value.item()
        object.__setattr__(self, field.name, value)
      if not rule.allows(value):
        block = next(name for name, kind in _BLOCKS.items() if kind is type(self))
        hint = nearest(value, MODES) if field.name == "mode" and isinstance(value, str) else ""
        raise ValueError(
          f"`{block}.{field.name}` must be {rule.words}; got {_base.shorten(value)}.{hint}"
        )


@dataclasses.dataclass(frozen=True)
class BoostSwitches(_Block):
  """The block ``boost``: which methods are on.

  Attributes:
    mode: ``"auto"``: those of the level; ``"manual"``: those of the level, but where a switch
      below says otherwise; ``"enable_all"``; ``"disable_all"``.
    less_bn: fewer BatchNorms, with a normalized head and gradient centralization. None, here and
      below: not set.
    grad_freeze: freezing.
    adasum: adaptive summation over replicas.
    grad_accumulation: gradient accumulation.
    dim_reduce: training in a subspace.
    loss_scale_group: a loss scale per group of layers, with as many groups as freezing has.
    average: an average of the params over the end of the training (ours).
  """

  mode: str = _key("auto", _one_of(*MODES))
  less_bn: bool | None = _key(None, _SWITCH)
  grad_freeze: bool | None = _key(None, _SWITCH)
  adasum: bool | None = _key(None, _SWITCH)
  grad_accumulation: bool | None = _key(None, _SWITCH)
  dim_reduce: bool | None = _key(None, _SWITCH)
  loss_scale_group: bool | None = _key(None, _SWITCH)
  average: bool | None = _key(None, _SWITCH)


@dataclasses.dataclass(frozen=True)
class CommonConfig(_Block):
  """The block ``common``.

  Attributes:
    device_number: how many devices a server has, over which `adasum` averages before it sums
      adaptively over servers. The axis ``local_axis_name`` of ``auto_boost`` must have this size;
      without such an axis it has no effect. None: any size.
  """

  device_number: int | None = _key(8, _or_null(_COUNT))


@dataclasses.dataclass(frozen=True)
class LessBNConfig(_Block):
  """The block ``less_bn``.

  Attributes:
    fn_flag: whether the last dense layer is normalized.
    gc_flag: whether gradients are centralized.
  """

  fn_flag: bool = _key(True, _FLAG)
  gc_flag: bool = _key(True, _FLAG)


@dataclasses.dataclass(frozen=True)
class GradFreezeConfig(_Block):
  """The block ``grad_freeze``.

  Attributes:
    param_groups: the number of groups of layers, for `loss_scale_group` too.
    freeze_type: the schedule, 0: continuous, 1: interval, as in MindSpore; 2: ours, at the
      end of the training, for good.
    freeze_p: the share of steps in which nothing is frozen.
    total_steps: the number of training steps, for freeze_type 2; the others do not depend on it.
      None: not known. The default is MindSpore's, hardly the length of yours.
  """

  param_groups: int = _key(10, _COUNT)
  freeze_type: int = _key(1, _one_of(0, 1, 2))
  freeze_p: float = _key(0.7, _SHARE)
  total_steps: int | None = _key(65536, _or_null(_COUNT))


@dataclasses.dataclass(frozen=True)
class GradAccumulationConfig(_Block):
  """The block ``grad_accumulation``.

  Attributes:
    grad_accumulation_step: the number of micro-batches in a step.
  """

  grad_accumulation_step: int = _key(1, _COUNT)


@dataclasses.dataclass(frozen=True)
class AverageConfig(_Block):
  """The block ``average``, ours: :func:`average_params` over the end of the training.

  Attributes:
    start: the share of the training before the first snapshot.
    snapshots: about how many snapshots; their distance is a whole number of steps.
    total_steps: the number of training steps; None: not known.
  """

  start: float = _key(0.75, _INSIDE)
  snapshots: int = _key(20, _COUNT)
  total_steps: int | None = _key(None, _or_null(_COUNT))


@dataclasses.dataclass(frozen=True)
class DimReduceConfig(_Block):
  """The block ``dim_reduce``.

  The method takes the optimizer's place, and searches as :func:`dim_reduce` does by default. With
  ``auto_boost(..., reference=True)`` it tries two step lengths, and its steps go through the
  optimizer, as in MindSpore.

  Attributes:
    rho: factor of the line search from one trial to the next.
    gamma: momentum of the residual.
    alpha: learning rate of the residual.
    sigma: sufficient decrease in the line search.
    n_components: dimensions of the subspace.
    pca_mat_path: a file of :func:`save_subspace`, or None. It is read if it exists, else written.
    weight_load_dir: a directory of checkpoints of the params, as :func:`checkpoint_snapshots` reads
      them, to fit the subspace to if there is no file yet; or None.
  """

  rho: float = _key(0.55, _INSIDE)
  gamma: float = _key(0.9, _DECAY)
  alpha: float = _key(0.001, _RATE)
  sigma: float = _key(0.4, _INSIDE)
  n_components: int = _key(32, _COUNT)
  pca_mat_path: str | None = _key(None, _PATH)
  weight_load_dir: str | None = _key(None, _PATH)


@dataclasses.dataclass(frozen=True)
class BoostConfig:
  """The configuration of :func:`auto_boost`, in the schema of MindSpore's AutoBoost.

  A dict and a JSON file have the same blocks and keys; those that are left out have MindSpore's
  defaults. Unknown blocks and keys, wrong types and values out of range are errors, and so are
  MindSpore's ``common.gradient_split_groups`` and ``dim_reduce.timeout``, which would change
  nothing with XLA.

  Attributes:
    boost: which methods are on.
    common: settings of several methods.
    less_bn: fewer BatchNorms.
    grad_freeze: freezing.
    grad_accumulation: gradient accumulation.
    dim_reduce: training in a subspace.
    average: an average of the params.

  Examples:
    >>> from optax_boost.auto import BoostConfig
    >>> config = BoostConfig.from_dict({"boost": {"mode": "manual", "grad_freeze": True}})
    >>> config.grad_freeze.freeze_p
    0.7
    >>> BoostConfig.from_json(config.to_json()) == config
    True
    >>> BoostConfig.from_dict({"grad_freeze": {"freezep": 0.5}})
    Traceback (most recent call last):
    ValueError: `grad_freeze` has no key 'freezep'. Did you mean 'freeze_p'?
  """

  boost: BoostSwitches = BoostSwitches()
  common: CommonConfig = CommonConfig()
  less_bn: LessBNConfig = LessBNConfig()
  grad_freeze: GradFreezeConfig = GradFreezeConfig()
  grad_accumulation: GradAccumulationConfig = GradAccumulationConfig()
  dim_reduce: DimReduceConfig = DimReduceConfig()
  average: AverageConfig = AverageConfig()

  def __post_init__(self) -> None:
    for name, kind in _BLOCKS.items():
      if not isinstance(getattr(self, name), kind):
        raise TypeError(
          f"`{name}` must be a {kind.__name__}; got {_base.shorten(getattr(self, name))}. From a"
          " dict: `BoostConfig.from_dict`."
        )

  @classmethod
  def from_dict(cls, config: Mapping[str, Any], base: "BoostConfig | None" = None) -> "BoostConfig":
    """Reads a dict of MindSpore's schema.

    Args:
      config: blocks by name, each a dict of values by key; both may be left out.
      base: the values of keys that are left out; None: the defaults.

    Raises:
      TypeError: `config` or a block is no mapping, or `base` no configuration.
      ValueError: a block or a key is unknown, or a value wrong.
    """
    if not isinstance(config, Mapping):
      raise TypeError(
        f"The configuration must be a mapping of blocks; got {_base.shorten(config)}."
      )
    base = _checked_base(base)
    blocks = {}
    for name, values in config.items():
      if name not in _BLOCKS:
        hint = _hint(name, _BLOCKS)
        raise ValueError(f"The configuration has no block {_base.shorten(name)}.{hint}")
      _base.check_type(name, values, Mapping, "a mapping of keys to values")
      for key in values:
        _check_key(name, key)
      blocks[name] = dataclasses.replace(getattr(base, name), **values)
    return dataclasses.replace(base, **blocks)

  def to_dict(self) -> dict[str, dict[str, Any]]:
    """Writes a dict of MindSpore's schema: all blocks and keys, but for switches not set.

    The block `average`, which MindSpore does not have, is left out where it has its defaults.
    """
    blocks = dataclasses.asdict(self)
    if self.average == AverageConfig():
      del blocks["average"]
    blocks["boost"] = {key: v for key, v in blocks["boost"].items() if v is not None}
    return blocks

  @classmethod
  def from_json(cls, text: str, base: "BoostConfig | None" = None) -> "BoostConfig":
    """Reads JSON of MindSpore's schema; `base` as for :meth:`from_dict`.

    Raises:
      TypeError: `text` is no string, or `base` no configuration.
      ValueError: the text is no JSON (the message has line and column), a key occurs twice, or
        it is not of the schema.
    """
    _base.check_type("text", text, str, "JSON in a string")
    return cls._from_parsed(_files.parse_json(text, "`text`"), base, "`text`")

  def to_json(self) -> str:
    """Writes indented JSON of MindSpore's schema."""
    return json.dumps(self.to_dict(), indent=2) + "\n"

  @classmethod
  def load(cls, path: str | os.PathLike[str], base: "BoostConfig | None" = None) -> "BoostConfig":
    """Reads a JSON file of MindSpore's schema; `base` as for :meth:`from_dict`.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `path` is no path, or `base` no configuration.
      ValueError: `path` is a directory, or the file is not UTF-8, or as for :meth:`from_json`; the
        message names the file.
    """
    return cls._from_parsed(_files.read_json("path", path), base, os.fspath(path))

  @classmethod
  def _from_parsed(cls, config: Any, base: "BoostConfig | None", source: str) -> "BoostConfig":
    """Reads parsed JSON; errors name its source, and are about its contents."""
    base = _checked_base(base)
    try:
      return cls.from_dict(config, base)
    except (TypeError, ValueError) as error:
      raise ValueError(f"{source}: {error}") from error


# The forms of the argument `config`.
Config: TypeAlias = BoostConfig | Mapping[str, Any] | str | os.PathLike[str] | None

_BLOCKS: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(BoostConfig)}
_KEYS = {name: [field.name for field in dataclasses.fields(_BLOCKS[name])] for name in _BLOCKS}
# MindSpore's keys that change nothing with XLA, and why.
_WITHOUT_EFFECT = {
  "common.gradient_split_groups": "XLA groups collectives by itself",
  "dim_reduce.timeout": "no process waits for another's file: let one write it first",
}


def read_config(config: Config, base: BoostConfig) -> BoostConfig:
  """Reads any form of a configuration; a dict or file takes missing keys from `base`."""
  if isinstance(config, BoostConfig | None):
    return config or base
  if isinstance(config, Mapping):
    return BoostConfig.from_dict(config, base)
  if isinstance(config, str) and config.lstrip().startswith("{"):
    raise ValueError(
      f"`config` must be the path of a JSON file; got JSON itself, {_base.shorten(config)}. Pass"
      " BoostConfig.from_json(...)."
    )
  if isinstance(config, str | os.PathLike):
    return BoostConfig.load(config, base)
  raise TypeError(
    "`config` must be a BoostConfig, a dict, the path of a JSON file or None; got"
    f" {_base.shorten(config)}."
  )


def _checked_base(base: Any) -> BoostConfig:
  _base.check_type("base", base, BoostConfig | None, "a BoostConfig or None")
  return base or BoostConfig()


def _check_key(block: str, key: Any) -> None:
  reason = _WITHOUT_EFFECT.get(f"{block}.{key}")
  if reason is not None:
    raise ValueError(f"`{block}.{key}` has no effect here: {reason}. Remove the key.")
  if key not in _KEYS[block]:
    raise ValueError(f"`{block}` has no key {_base.shorten(key)}.{_hint(key, _KEYS[block])}")


def _hint(name: Any, names: Iterable[str]) -> str:
  homes = [block for block, keys in _KEYS.items() if name in keys and name not in names]
  return f" It belongs to the block {homes[0]!r}." if homes else nearest(name, names)


def nearest(name: Any, names: Iterable[str]) -> str:
  """Words for an error about an unknown name: the nearest known one, or the list of them."""
  names = list(names)
  close = difflib.get_close_matches(name, names, 1, 0.5) if isinstance(name, str) else []
  return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(names)}."
