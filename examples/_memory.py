"""Lets the C library keep freed memory."""

import ctypes
import sys

# The numbers of options in glibc's malloc.h, and values: 256 MB more with each request for memory,
# none given back, none from maps that are given back when freed.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_OPTIONS = {_TRIM_THRESHOLD: 2**31 - 1, _TOP_PAD: 2**28, _MMAP_THRESHOLD: 2**31 - 1}


def keep_freed_memory() -> None:
  """Makes times comparable between steps that need much memory and steps that need little.

  glibc gives large buffers back to the system when they are freed. Each step then fetches them page
  by page: a step on sequences of 256 took half as much time again, one on 128 next to none.
  Call it before the first computation. On other systems it does nothing.
  """
  if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
    for option, value in _OPTIONS.items():
      libc.mallopt(option, value)
