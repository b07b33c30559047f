"""Reads MindSpore's ``boost_config_dict``, word for word: a dict, JSON, or a file of JSON."""

from collections.abc import Callable, Iterable, Mapping
import difflib
import json
import os
import pathlib
import sys
from typing import Any, NamedTuple, TypeAlias

from optax_boost._foundation import _checks, _types

Config: TypeAlias = Mapping[str, Any] | str | os.PathLike[str] | None
# Values by block and key, as in MindSpore's configuration, whose blocks are groups of keys.
Blocks: TypeAlias = dict[str, dict[str, Any]]
MODES = ("auto", "manual", "enable_all", "disable_all")


class Key(NamedTuple):
  """A key of MindSpore: its default, its allowed values, and why it has no effect here, or ""."""

  default: Any
  words: str
  allows: Callable[[Any], bool]
  ignored: str = ""


def _is_number(value: Any) -> bool:
  # False for NaN, and for integers that are too large for a float.
  return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _count(default: int, ignored: str = "") -> Key:
  words = f"an integer >= 1 and <= {_checks.LARGEST_COUNT}"
  return Key(default, words, lambda v: type(v) is int and 1 <= v <= _checks.LARGEST_COUNT, ignored)


_FLAG = Key(True, "true or false", lambda v: isinstance(v, bool))
_PATH = Key(None, "a path", lambda v: isinstance(v, str) and v != "" and "\0" not in v)
_INSIDE = Key(None, "a number > 0 and < 1", lambda v: _is_number(v) and 0 < v < 1)
_SPLITS = Key(
  None,
  "a list of integers",
  lambda v: all(type(i) is int for i in (v if isinstance(v, list | tuple) else [v])),
)
SCHEMA: dict[str, dict[str, Key]] = {
  "boost": {
    "mode": Key("auto", f"one of {', '.join(map(repr, MODES))}", lambda v: str(v) in MODES),
    # The methods, in MindSpore's order of precedence.
    "dim_reduce": _FLAG,
    "less_bn": _FLAG,
    "grad_freeze": _FLAG,
    "adasum": _FLAG,
    "grad_accumulation": _FLAG,
    "loss_scale_group": _FLAG,
  },
  "common": {
    "gradient_split_groups": _SPLITS._replace(ignored="XLA groups collectives by itself"),
    "device_number": _count(8, "the mesh axis `local_axis_name` has its own size"),
  },
  "less_bn": {"fn_flag": _FLAG, "gc_flag": _FLAG},
  "grad_freeze": {
    "param_groups": _count(10),
    "freeze_type": Key(1, "0 or 1", lambda v: type(v) is int and v in (0, 1)),
    "freeze_p": Key(0.7, "a number > 0 and <= 1", lambda v: _is_number(v) and 0 < v <= 1),
    "total_steps": _count(65536, "the schedules have no end"),
  },
  "grad_accumulation": {"grad_accumulation_step": _count(1)},
  "dim_reduce": {
    "rho": _INSIDE._replace(default=0.55),
    "gamma": Key(0.9, "a number >= 0 and < 1", lambda v: _is_number(v) and 0 <= v < 1),
    "alpha": Key(0.001, "a number >= 0", lambda v: _is_number(v) and v >= 0),
    "sigma": _INSIDE._replace(default=0.4),
    "n_components": _count(32),
    "pca_mat_path": _PATH,
    "weight_load_dir": _PATH,
    "timeout": _count(1800, "no process waits for another's file"),
  },
}


def read_config(config: Config) -> Blocks:
  """Returns the keys that a configuration sets, by block; a key of value None is not set."""
  if not isinstance(config, str | os.PathLike):
    return _checked(config)
  is_text = isinstance(config, str) and config.lstrip().startswith("{")
  try:
    text = str(config) if is_text else pathlib.Path(config).read_text(encoding="utf-8")
    return _checked(json.loads(text))
  except (TypeError, ValueError, RecursionError) as error:
    source = "the text" if is_text else os.fspath(config)
    raise ValueError(f"`config`: {source} is not JSON of MindSpore's schema: {error}") from error


def _checked(config: Any) -> Blocks:
  words = "a dict of blocks, JSON in a string, or the path of a JSON file"
  _checks.check_type("config", config, Mapping, words)
  return {block: dict(_checked_block(block, values)) for block, values in config.items()}


def _checked_block(block: str, values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
  if block not in SCHEMA:
    raise ValueError(f"`config` has no block {_checks.shorten(block)}.{nearest(block, SCHEMA)}")
  _checks.check_type(block, values, Mapping, "a dict of keys and values")
  for name, value in values.items():
    if (key := SCHEMA[block].get(name)) is None:
      raise ValueError(
        f"`{block}` has no key {_checks.shorten(name)}.{nearest(name, SCHEMA[block])}"
      )
    if not (value is None or key.allows(value)):
      hint = nearest(value, MODES) if name == "mode" else ""
      raise ValueError(f"`{block}.{name}` must be {key.words}; got {_checks.shorten(value)}.{hint}")
    if value is not None:
      yield name, value


def nearest(name: _types.Unchecked, names: Iterable[str]) -> str:
  """Returns the end of an error about an unknown name: the nearest known name, or all names."""
  names = list(names)
  close = difflib.get_close_matches(name, names, 1, 0.5) if isinstance(name, str) else []
  return f" Did you mean {close[0]!r}?" if close else f" There are: {', '.join(names)}."
