"""How a call must refuse a bad value: by a statement of ours that names the argument."""

from collections.abc import Callable
import linecache
import pathlib
import re
import traceback
from typing import Any
import warnings

import optax_boost
from tests.bad_input.kinds import Bad

PACKAGE = pathlib.Path(optax_boost.__file__).parent
ACCEPTED = "accepted"
# Words of the messages for arguments that are trees.
_NOUNS = {
  "batches": "batch(es)?",
  "collections": "variables",
  "full_gradient": "gradients?",
  "initial": "params",
  "model_state": "statistics",
  "opt_state": "state",
  "updates": "updates|gradients",
}
# Words for the value that came.
_CAME = re.compile(r"\b(got|has|have|had|holds?|returned|gave|found|sets|sum to|is|are|differ)\b")


def complaint(call: Callable[[], Any], bad: Bad, argument: str) -> str:
  """Says how a call with a bad value went wrong; empty if it was refused as it should be.

  Args:
    call: makes the call.
    bad: the value that it passes.
    argument: the argument, which the message must name unless `bad` says otherwise.

  Returns:
    The complaint; `ACCEPTED` if nothing was raised.
  """
  try:
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      call()
  except Exception as error:
    return _complaint_about(error, bad, argument)
  return ACCEPTED


def _complaint_about(error: Exception, bad: Bad, argument: str) -> str:
  message = f"{type(error).__name__}: {str(error)[:300]}"
  if not isinstance(error, bad.error):
    return f"must be {bad.error}{_raised_at(error)}: {message}"
  # Python's own errors of files name the file.
  if not (isinstance(error, OSError) and error.filename) and not _raised_by_us(error):
    return f"not in our words{_raised_at(error)}: {message}"
  name = bad.mention or rf"\b({re.escape(argument)}|{_NOUNS.get(argument, 'x^')})\b"
  if not re.search(name, str(error), re.IGNORECASE):
    return f"does not name {bad.mention or argument!r}: {message}"
  if not _CAME.search(str(error)) and not isinstance(error, OSError):
    return f"does not say what came: {message}"
  return ""


def _raised_by_us(error: Exception) -> bool:
  """Whether the innermost frame is a `raise` of the package."""
  frame = traceback.extract_tb(error.__traceback__)[-1]
  statement = linecache.getline(frame.filename, frame.lineno or 0).strip()
  return pathlib.Path(frame.filename).is_relative_to(PACKAGE) and statement.startswith("raise")


def _raised_at(error: Exception) -> str:
  frame = traceback.extract_tb(error.__traceback__)[-1]
  return f" (at {'/'.join(pathlib.Path(frame.filename).parts[-3:])}:{frame.lineno}, `{frame.line}`)"
