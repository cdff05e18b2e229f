"""Fills in what the site generates when it is built: the help of every verb in docs/reference/cli.md."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PLACE = "<!-- help of every verb -->"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Called by MkDocs for each page, before it is rendered."""
  return markdown.replace(PLACE, verbs_help()) if page.file.src_uri == "reference/cli.md" else markdown


def verbs_help() -> str:
  """``--help`` of every verb as Markdown. Raises RuntimeError if one fails, which ends the build."""
  files = sorted((ROOT / "maxtext_like" / "cli").glob("*.py"))
  verbs = [path.stem.rstrip("_") for path in files if path.stem != "keys" and "\ndef run(argv" in path.read_text("utf-8")]
  with ThreadPoolExecutor(2) as pool:
    return "\n".join(pool.map(_help, verbs))


def _help(verb: str) -> str:
  environment = {**os.environ, "JAX_PLATFORMS": "cpu", "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
  command = [sys.executable, "-m", "maxtext_like", verb, "--help"]
  run = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
  if run.returncode:
    raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}: {run.stderr}")
  return f"## maxtext-like {verb}\n\n```text\n{run.stdout.rstrip()}\n```\n"
