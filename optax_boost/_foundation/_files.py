"""Files that are written whole or not at all."""

from collections.abc import Callable
import os
import pathlib
import secrets
from typing import Any, BinaryIO


def write_atomically(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any]) -> None:
  """Writes a file under a temporary name in its folder, then renames it; the last writer wins.

  The target of a symbolic link is replaced, not the link; permissions stay. An OSError names
  `path` and leaves the old file unchanged.
  """
  target = pathlib.Path(os.path.realpath(path))
  # Not `tempfile.mkstemp`, whose files only their owner may read.
  temporary = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}.tmp")
  try:
    with open(temporary, "xb") as file:
      write(file)
      file.flush()
      os.fsync(file.fileno())
    if target.exists():
      os.chmod(temporary, target.stat().st_mode & 0o777)
    os.replace(temporary, target)
  except OSError as error:
    # A full disk's error names no file, and others name the temporary one.
    message = os.strerror(error.errno) if error.errno else f"can't be written: {error}"
    raise OSError(error.errno, message, os.fspath(path)) from error
  finally:
    temporary.unlink(missing_ok=True)
