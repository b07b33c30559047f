"""Results of races as JSON."""

from collections.abc import Collection
import dataclasses
import json
import math
from typing import Any
from typing import TypeVar

import numpy as np

from optax_boost import _base
from optax_boost.race import _curves

# Of the format of files; those without a version are of the first.
VERSION = 1
_Result = TypeVar("_Result")


def text(result: Any) -> str:
  """A result as the text of a file."""
  content = {"version": VERSION, **_to_json(dataclasses.asdict(result))}
  return json.dumps(content, indent=1, allow_nan=False) + "\n"


def read(content: Any, kind: type[_Result]) -> _Result:
  """The result, a dataclass of type `kind`, in the content of a file."""
  fields = _read_fields("the file", content, kind, optional=("version",))
  version = fields.pop("version", VERSION)
  if type(version) is not int or version != VERSION:
    raise ValueError(f"`version` must be {VERSION}; got {_base.shorten(version)}.")
  _base.check_type("curves", fields["curves"], dict, "an object")
  _base.check_type("seeds", fields["seeds"], list, "a list")
  curves = {}
  for name, values in fields["curves"].items():
    try:
      curves[name] = _read_curves(values)
    except (ArithmeticError, TypeError, ValueError) as error:
      raise ValueError(f"`curves[{name!r}]`: {error}") from error
  return kind(**fields | {"curves": curves, "seeds": tuple(fields["seeds"])})


def _to_json(value: Any) -> Any:
  """Values of JSON's types; numbers that are not finite become their names."""
  if isinstance(value, dict):
    return {key: _to_json(item) for key, item in value.items()}
  if isinstance(value, np.ndarray | np.generic):
    value = value.tolist()
  if isinstance(value, list | tuple):
    return [_to_json(item) for item in value]
  return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _read_curves(content: Any) -> _curves.RaceCurves:
  fields = _read_fields("the curves", content, _curves.RaceCurves)
  _base.check_type("steps", fields["steps"], list, "a list")
  for step in fields["steps"]:
    _base.check_whole_number("steps", step, static=True)
  _base.check_type("metrics", fields["metrics"], dict, "an object")
  metrics = {
    name: _read_rows(f"metrics[{name!r}]", rows) for name, rows in fields["metrics"].items()
  }
  return _curves.RaceCurves(
    np.array(fields["steps"], int),
    _read_rows("loss", fields["loss"]),
    metrics,
    _read_row("gradient_evaluations", fields["gradient_evaluations"]),
    _read_row("seconds", fields["seconds"]),
    _read_row("compile_seconds", [fields["compile_seconds"]])[0].item(),
    fields["seeds_at_once"],
  )


def _read_fields(
  where: str, content: Any, kind: Any, optional: Collection[str] = ()
) -> dict[str, Any]:
  """A copy of a JSON object that has the fields of a dataclass as its keys, and no others."""
  if not isinstance(content, dict):
    raise TypeError(f"{where} must be an object; got {_base.shorten(content)}.")
  names = [field.name for field in dataclasses.fields(kind)]
  missing = [name for name in names if name not in content]
  unknown = [name for name in content if name not in {*names, *optional}]
  if missing or unknown:
    listed = [f"lacks {_base.shorten(missing)}"] if missing else []
    listed += [f"has {_base.shorten(unknown)}, which is unknown"] if unknown else []
    raise ValueError(f"{where} {' and '.join(listed)}.")
  return dict(content)


def _read_row(name: str, values: Any) -> np.ndarray:
  _base.check_type(name, values, list, "a list")
  for value in values:
    # JSON has no names for them but strings.
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number or (isinstance(value, str) and value in ("nan", "inf", "-inf"))):
      raise TypeError(f"`{name}` must hold numbers; got {_base.shorten(value)}.")
  return np.array([float(value) for value in values])


def _read_rows(name: str, values: Any) -> np.ndarray:
  _base.check_type(name, values, list, "a list")
  rows = [_read_row(name, row) for row in values]
  lengths = [len(row) for row in rows]
  if len(set(lengths)) > 1:
    raise ValueError(f"`{name}` must have rows of one length; got {lengths}.")
  return np.array(rows).reshape(len(rows), max(lengths, default=0))
