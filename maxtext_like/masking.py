"""Secrets in text that people share: passwords in URLs, tokens of well-known services, values under telling names."""

import re
from collections.abc import Sequence
from typing import Any

MASK = "***"

_WORDS = (
  "api[_-]?key", "access[_-]?key(?:[_-]?id)?", "private[_-]?key", "secret(?:[_-]?(?:access[_-]?)?key)?", r"(?:\b|[_-])token",
  "passw(?:or)?d", "passphrase", "credentials?", r"(?:\b|[_-])auth", "authorization", "signature", r"(?:\b|[_-])sig",
)  # fmt: skip
_NAME = rf"[\w.-]*?(?:{'|'.join(_WORDS)})"
_SECRET_NAME = re.compile(rf"--?{_NAME}", re.IGNORECASE)

_TOKENS = (
  r"hf_[A-Za-z0-9]{16,}", r"api_org_[A-Za-z0-9]{16,}",  # Hugging Face
  r"nvapi-[\w-]{16,}",
  r"sk-[\w-]{16,}", r"sk_(?:live|test)_\w{16,}", r"pplx-\w{16,}", r"gsk_\w{16,}", r"r8_\w{16,}", r"xai-\w{16,}",
  r"gh[pousr]_[A-Za-z0-9]{16,}", r"github_pat_\w{16,}", r"glpat-[\w-]{16,}", r"npm_[A-Za-z0-9]{16,}", r"pypi-[\w-]{16,}",
  r"(?:AKIA|ASIA)[A-Z0-9]{12,}", r"AIza[\w-]{30,}", r"ya29\.[\w-]{16,}", r"GOCSPX-[\w-]{16,}",
  r"xox[abeoprs]-[\w-]{10,}", r"dop_v1_[a-f0-9]{16,}", r"dapi[a-f0-9]{32}", r"SG\.[\w-]{16,}\.[\w-]{16,}",
  r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web token
  r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)",
)  # fmt: skip

_RULES = (
  # scheme://user:password@host; a password may hold an @ of its own.
  (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/'\"]+@", re.IGNORECASE), rf"\1{MASK}@"),
  (re.compile(rf"([?&;](?:{_NAME}|key)=)[^\s&;'\"#]+", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(r"\b(bearer|basic)(\s+)[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1\2{MASK}"),
  # NAME=value and name: value, as a shell, a YAML file or JSON write it.
  (re.compile(rf"(?<![\w.?&;-])({_NAME}['\"]?\s*(?:=|:\s)\s*)(?:'[^']*'|\"[^\"]*\"|[^\s'\",]+)", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})"), MASK),
  # Long and of all kinds of characters: nobody names a file like that.
  (re.compile(r"(?<![\w+/=-])(?=\w*[a-z])(?=\w*[A-Z])(?=(?:\w*\d){3})[A-Za-z0-9]{32,}={0,2}(?![\w+/=-])"), MASK),
)


def masked(text: str) -> str:
  """Text with ``***`` in the place of what looks like a secret."""
  for pattern, replacement in _RULES:
    text = pattern.sub(replacement, text)
  return text


def masked_words(words: Sequence[str]) -> list[str]:
  """The words of a command, each masked; the one after ``--token`` and its like whole."""
  before = ["", *words]
  return [MASK if _SECRET_NAME.fullmatch(name) and not word.startswith("-") else masked(word)
          for name, word in zip(before, words, strict=False)]  # fmt: skip


def masked_values(value: Any) -> Any:
  """JSON values with every string in them masked."""
  if isinstance(value, str):
    return masked(value)
  if isinstance(value, dict):
    return {key: masked_values(v) for key, v in value.items()}
  return [masked_values(v) for v in value] if isinstance(value, list) else value
