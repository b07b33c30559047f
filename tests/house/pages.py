"""The Python programs of a page, as its readers put them together."""

import pathlib
import re
import sys

# Sphinx reads pages and fails at a warning; options and folders follow. Collecting garbage takes a
# fifth of the time, for the trees live to the end.
CHECK = (
  sys.executable,
  "-c",
  "import gc, sys; gc.disable(); from sphinx.cmd.build import main; sys.exit(main(sys.argv[1:]))",
  *("-W", "--keep-going", "-q", "-E", "-b", "dummy"),
)
_FENCES = re.compile(
  r"^:::\{tab-item\} (\w+)\n|^:::$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL
)


def programs(page: pathlib.Path) -> dict[str | None, list[str]]:
  """The programs of a page: one for each form, of its tabs and of the blocks outside of tabs."""
  form, blocks = None, []
  for fence in _FENCES.finditer(page.read_text(encoding="utf-8")):
    if fence[2] is None:
      form = fence[1]
    else:
      blocks.append((form, fence[2]))
  forms = dict.fromkeys(form for form, _ in blocks if form) or [None]
  return {form: [code for of, code in blocks if of in (None, form)] for form in forms}


def block_below(page: pathlib.Path, bold: str) -> str:
  """The first block after a paragraph that begins with `bold` in bold face, as README's have."""
  text = page.read_text(encoding="utf-8")
  found = re.search(rf"^\*\*{bold}\*\*.*?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
  if found is None:
    raise ValueError(f"{page} has no block of Python below **{bold}**; correct one of the two")
  return found[1]
