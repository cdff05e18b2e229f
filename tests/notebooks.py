"""Executes the notebooks of ``examples/`` in a new kernel. As a program it stores the new outputs in the notebooks.

python -m tests.notebooks [NAME ...]        (all of them without NAME; needs the extras dev and parity)
"""

import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.processes import ROOT, environment

EXAMPLES = ROOT / "examples"


def execute(path: Path, env: dict[str, str], *, coalesce: bool = False) -> Any:
  """Run every cell of a notebook in an empty directory, and return the notebook with the outputs.

  Args:
    path: the notebook.
    env: environment variables of the kernel.
    coalesce: store lines that a carriage return overwrites only in their last state, as a browser shows them.

  Raises:
    CellExecutionError: a cell raised an error.
  """
  # Imported here, so that the quick tests of the same files run without these packages.
  import nbformat
  from nbclient import NotebookClient

  notebook = nbformat.read(path, as_version=4)
  with tempfile.TemporaryDirectory() as directory:
    client = NotebookClient(
      notebook,
      timeout=1100,  # seconds for one cell
      coalesce_streams=coalesce,
      record_timing=False,
      resources={"metadata": {"path": directory}},
    )
    client.execute(env=env)
  return notebook


def text_of(notebook: Any) -> str:
  """Return everything that the cells printed or returned as text."""
  outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
  return "\n".join(output.get("text") or output.data.get("text/plain", "") for output in outputs)


def store(path: Path, env: dict[str, str]) -> None:
  """Execute a notebook and write it with its outputs, without warnings and folders of this machine."""
  import nbformat

  notebook = execute(path, env, coalesce=True)
  for cell in notebook.cells:
    if cell.cell_type == "code":
      cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
  notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": {"name": "python"}}
  text = nbformat.writes(notebook).replace(f"{ROOT}/", "")
  path.write_text(re.sub(rf"{re.escape(tempfile.gettempdir())}/tmp\w+/", "", text) + "\n", "utf-8")


if __name__ == "__main__":
  for name in sys.argv[1:] or sorted(file.stem for file in EXAMPLES.glob("*.ipynb")):
    store(EXAMPLES / f"{name}.ipynb", environment())
    print(name, flush=True)
