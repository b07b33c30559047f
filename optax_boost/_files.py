"""Files that are written whole or not at all, and JSON that is read strictly."""

from collections.abc import Callable
import contextlib
import errno
import glob
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

fcntl: Any
try:
  import fcntl
except ImportError:
  # Windows: temporary files of killed processes stay.
  fcntl = None


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
  """Writes a file under a temporary name beside it, then renames it; the last writer wins.

  The target of a symbolic link is replaced, not the link; permissions stay. Temporary files are
  locked while they are written: one without a lock is of a killed process, and is removed here.
  An OSError names `path` and leaves the old file unchanged.
  """
  name = check_path("path", path)
  try:
    target = pathlib.Path(os.path.realpath(name))
    if target.exists() and not target.is_file():
      code = errno.EISDIR if target.is_dir() else errno.EINVAL
      raise OSError(code, os.strerror(code))
    _remove_stale(target)
    with _temporary(target) as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
      if target.exists():
        os.chmod(file.name, target.stat().st_mode & 0o777)
      if fcntl is None:
        file.close()  # Windows renames no open file.
      os.replace(file.name, target)
  except OSError as error:
    # A full disk's error names no file, and others name the temporary one.
    if error.errno is None:
      raise OSError(f"Can't write '{name}': {error}") from error
    raise OSError(error.errno, os.strerror(error.errno), name) from error


@contextlib.contextmanager
def _temporary(target: pathlib.Path) -> Any:
  """A new locked file beside the target, removed where the block raises."""
  while True:
    # Not `tempfile.mkstemp`, whose files only their owner may read.
    path = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
    with open(path, "xb") as file:
      if fcntl is not None:
        # A file system without locks keeps stale files.
        with contextlib.suppress(OSError):
          fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file.fileno()).st_nlink:
          # Another process took it for a stale one before it was locked.
          continue
      try:
        yield file
      except BaseException:
        file.close()
        path.unlink(missing_ok=True)
        raise
      return


def _remove_stale(target: pathlib.Path) -> None:
  """Removes temporary files for the same target that nobody has locked."""
  if fcntl is None:
    return
  pattern = f".{glob.escape(target.name[:40])}.{'[0-9a-f]' * 16}.tmp"
  for path in target.parent.glob(pattern):
    with contextlib.suppress(OSError), open(path, "rb") as file:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
      path.unlink()
