"""Files that are written whole or not at all."""

from collections.abc import Callable
import os
import pathlib
import secrets
from typing import Any
from typing import BinaryIO

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
