"""Finds the commands that README.md and the pages print, in code blocks and between backticks, and fills in placeholders."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "gpu/README.md", "tpu/README.md", *sorted(
  str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md") if path.name != "python.md"  # doctest runs that page
))  # fmt: skip
_OURS = re.compile(
  r"(?:time |\. gpu/env\.sh; *|\w+=\S+ )*(?:maxtext-like|python -m maxtext_like(?![.\w])|(python train\.py))(?= |$)(.*)"
)
_SCRIPT = re.compile(
  r"(?:\. gpu/env\.sh; *|\w+=\S+ )*python (?:-m )?((?:benchmarks|tests|docs)[./][\w./]+|maxtext_like\.[\w.]+)(.*)"
)

# Maps a placeholder in a printed command, which the reader replaces, to the value that the tests use.
PLACEHOLDERS = {
  r"CONFIG|MODEL|MODEL\.yml": "gemma3-tiny",
  r"HF_DIR|/models/[\w.-]+|gemma-[\w.-]+|PEFT_DIR": "hf",
  r"runs/\w+/config\.yml": "gemma3-tiny",
  r"RUN|runs/[\w/.-]+": "run",
  r"DIR": "dir",
  r"FILES": "chats.jsonl",
  r"M": "gemma3-tiny",
  r"D": "bfloat16",
}
_SYNOPSIS = re.compile(r"(?<= )(?:\[[^]]*\]|\w+=\.\.\.|\.\.\.|WORDS)(?= |$)")  # optional parts of a synopsis


@dataclass(frozen=True)
class Printed:
  """A printed command.

  Attributes:
    page: the page that prints it.
    text: the command as printed, in one line.
    words: arguments of ``maxtext-like``, starting with the verb, as printed but without the optional parts of a synopsis.
  """

  page: str
  text: str
  words: tuple[str, ...]

  @property
  def mentioned(self) -> bool:
    """True if the text only names a verb, perhaps with an option, so there is no command to run."""
    return self.words[0] != "models" and "--help" not in self.words and all(w.startswith("--") for w in self.words[1:])


def lines(page: str) -> list[str]:
  """Returns every line of a code block and every span between backticks that may be a command, in one line each."""
  text = (ROOT / page).read_text(encoding="utf-8")
  joined = re.sub(r" *\\\n\s*", " ", text)
  found, fenced = [], False
  for line in joined.splitlines():
    if line.lstrip().startswith("```"):
      fenced = not fenced
    elif fenced or line.startswith("    "):
      found += re.split(r" && ", line.strip().removeprefix("$ "))
  prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  spans = re.findall(r"`([^`]+)`", prose)
  return [*found, *(re.sub(r"\s*\n\s*", " ", span).replace("\\|", "|") for span in spans)]


def printed(page: str) -> list[Printed]:
  """Returns the commands of ``maxtext-like`` on a page."""
  found = []
  for line in lines(page):
    if (match := _OURS.fullmatch(line)) is not None:
      words = shlex.split(_SYNOPSIS.sub("", match[2]).replace("$'", "'"), comments=True)
      words = (["train"] if match[1] else []) + words
      if words and words[0] != "VERB":
        found.append(Printed(page, line, tuple(words)))
  return list(dict.fromkeys(found))


def scripts(page: str) -> list[tuple[str, tuple[str, ...]]]:
  """Returns (path of a Python file of the repository, arguments) of the other commands on a page."""
  found = []
  for line in lines(page):
    if (match := _SCRIPT.fullmatch(line)) is not None:
      name = match[1] if match[1].endswith(".py") else match[1].replace(".", "/") + ".py"
      found.append((name, tuple(shlex.split(match[2], comments=True))))
  return list(dict.fromkeys(found))


def examples(page: str) -> list[tuple[str, str]]:
  """Returns (command, output) for every block that shows a command after ``$`` and its output. ``...`` means any text."""
  text = (ROOT / page).read_text(encoding="utf-8")
  blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
  indented = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
  blocks += [
    re.sub(r"^    ", "", b, flags=re.MULTILINE) for b in re.findall(r"(?:^    .*\n|^\n(?=    ))+", indented, flags=re.MULTILINE)
  ]
  found = []
  for block in blocks:
    for part in re.split(r"^\$ ", re.sub(r" *\\\n\s*", " ", block), flags=re.MULTILINE)[1:]:
      command, _, output = part.partition("\n")
      if output.strip() and _OURS.fullmatch(command):
        found.append((command, output))
  return found


def filled(word: str) -> str:
  """Returns a word with its placeholder replaced, also in the value of a key."""
  key, equals, value = word.partition("=")
  for pattern, own in PLACEHOLDERS.items():
    if re.fullmatch(pattern, word):
      return own
    if equals and re.fullmatch(pattern, value):
      return f"{key}={own}"
  return word
