"""Every Python block of the README runs, in order, each in a namespace of its own."""

import pathlib
import re

import pytest

README = (pathlib.Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_quick_starts():
  assert len(BLOCKS) >= 3


@pytest.mark.parametrize("code", BLOCKS, ids=range(len(BLOCKS)))
def test_readme_block_runs(code):
  exec(compile(code, "README.md", "exec"), {})


def test_readme_names_the_two_commands():
  assert "make demo" in README
  assert "make test" in README
