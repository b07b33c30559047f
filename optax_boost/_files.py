"""Files that are written whole or not at all, and JSON that is read strictly."""

from collections.abc import Callable
import json
import math
import os
import pathlib
import secrets
from typing import Any
from typing import BinaryIO
import zipfile

import numpy as np

from optax_boost import _base


def check_path(argument: str, path: Any) -> str:
  """Checks an argument that names a file or a folder, and makes it a string."""
  text = os.fspath(path) if isinstance(path, os.PathLike) else path
  if not isinstance(text, str):
    got = _base.shorten(path)
    raise TypeError(f"`{argument}` must be a path, as str or os.PathLike; got {got}.")
  if not text or "\0" in text:
    raise ValueError(f"`{argument}` must be a path; got {_base.shorten(path)}.")
  return text


def parse_json(text: str, source: str) -> Any:
  """Reads JSON without NaN, infinities or repeated keys; ValueError names `source`."""

  def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
      if key in values:
        raise ValueError(
          f"{source} sets {_base.shorten(key)} twice, to {_base.shorten(values[key])} and to"
          f" {_base.shorten(value)}. Keep one."
        )
      values[key] = value
    return values

  def refuse_constant(constant: str) -> Any:
    raise ValueError(f"{source} has {constant}, which is no JSON number.")

  def whole_number(digits: str) -> int:
    try:
      return int(digits)
    except ValueError as error:
      # Python reads integers of at most 4,300 digits.
      raise ValueError(
        f"{source} has a number of {len(digits)} digits, starting with {digits[:10]}."
      ) from error

  try:
    return json.loads(
      text, object_pairs_hook=unique, parse_constant=refuse_constant, parse_int=whole_number
    )
  except json.JSONDecodeError as error:
    raise ValueError(
      f"{source} is not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}."
    ) from error
  except RecursionError as error:
    raise ValueError(f"{source} is nested too deeply for JSON to be read.") from error


def read_arrays(handle: BinaryIO) -> dict[str, np.ndarray]:
  """The arrays of an uncompressed ``.npz`` file by name; an exception where anything is amiss."""
  with zipfile.ZipFile(handle) as archive:
    return {
      info.filename.removesuffix(".npy"): _array(archive, info) for info in archive.infolist()
    }


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
  """Reads one array, after a check that the file holds as many bytes as its header claims."""
  if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
    raise ValueError(f"{info.filename!r} is compressed")
  with archive.open(info) as entry:
    np.lib.format.read_magic(entry)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(entry)
    data = entry.read()
  if dtype.hasobject:
    raise ValueError(f"{info.filename!r} holds Python objects")
  if any(size < 0 for size in shape) or math.prod(shape) * dtype.itemsize != len(data):
    raise ValueError(
      f"{info.filename!r} claims shape {shape} of {dtype}, and has {len(data)} bytes"
    )
  return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C").copy()


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any]) -> None:
  """Writes a file under a temporary name in its folder, then renames it; the last writer wins.

  The target of a symbolic link is replaced, not the link; permissions stay. An OSError names `path`
  and leaves the old file unchanged.
  """
  name = check_path("path", path)
  target = pathlib.Path(os.path.realpath(name))
  # Not `tempfile.mkstemp`, whose files only their owner may read.
  part = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
  try:
    with open(part, "xb") as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    if target.exists():
      os.chmod(part, target.stat().st_mode & 0o777)
    os.replace(part, target)
  except OSError as error:
    # A full disk's error names no file, and others name the temporary one.
    if error.errno is None:
      raise OSError(f"Can't write '{name}': {error}") from error
    raise OSError(error.errno, os.strerror(error.errno), name) from error
  finally:
    part.unlink(missing_ok=True)
