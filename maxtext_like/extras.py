"""The command that installs an extra, for error messages about a missing package."""

from pathlib import Path


def install(extra: str) -> str:
  """Return the command that installs an extra of pyproject.toml: from this checkout, or from the package index for a wheel."""
  checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
  return f"pip install -e '.[{extra}]'" if checkout else f"pip install 'maxtext-like[{extra}]'"
