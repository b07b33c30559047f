"""Runs the notebooks and stores their outputs: ``make notebooks``, after a change of their code."""

import base64
from collections.abc import Mapping
import hashlib
import io
import pathlib
import sys
from typing import Any

import nbclient
import nbformat
from PIL import Image

NOTEBOOKS = pathlib.Path(__file__).parent / "notebooks"


def code_hash(notebook: Mapping[str, Any]) -> str:
  """The hash of a notebook's code, which is stored with the outputs of this code."""
  code = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
  return hashlib.sha256("\n\n".join(code).encode()).hexdigest()[:16]


def shrink_pictures(notebook: Mapping[str, Any]) -> None:
  """Stores pictures in few colours, which takes a third of the bytes."""
  for cell in notebook["cells"]:
    for data in (output.get("data", {}) for output in cell.get("outputs", [])):
      if "image/png" in data:
        image = Image.open(io.BytesIO(base64.b64decode(data["image/png"])))
        few = image.convert("RGB").quantize(96, dither=Image.Dither.NONE)
        few.save(drawn := io.BytesIO(), "png", optimize=True, dpi=image.info["dpi"])
        data["image/png"] = base64.b64encode(drawn.getvalue()).decode()


def run(path: pathlib.Path) -> None:
  """Runs a notebook in its folder, and writes it with its outputs; times are not stored."""
  notebook = nbformat.read(path, as_version=4)
  client = nbclient.NotebookClient(notebook, record_timing=False, coalesce_streams=True)
  client.execute(cwd=str(NOTEBOOKS))
  shrink_pictures(notebook)
  kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
  notebook.metadata = {
    "kernelspec": kernel,
    "language_info": {"name": "python"},
    "outputs_of": code_hash(notebook),
  }
  nbformat.write(notebook, path)


if __name__ == "__main__":
  names = sys.argv[1:] or [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))]
  for name in names:
    print(name, flush=True)
    run(NOTEBOOKS / f"{name}.ipynb")
