"""Masks secrets in text that people share: passwords in URLs, tokens of known services, values of keys such as ``api_key``.

Masking reduces the risk but cannot prove that a text is clean: a secret without a recognizable name, place or format stays.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

MASK = "***"

_KEY_OF = (
  "api|access|account|auth|deploy|encryption|hmac|license|master|private|service|shared|signing|ssh|storage|subscription|"
  "anthropic|aws|azure|comet|gcp|gemini|google|hf|kaggle|neptune|openai|wandb"
)
_TOKEN_OF = "access|api|auth|bearer|bot|gh|github|gitlab|hf|hub|id|refresh|sas|secret|security|session|slack|user"
_WORDS = (
  rf"(?:{_KEY_OF})[_-]?key(?:[_-]?id)?", "secret(?:[_-]?(?:access[_-]?)?key(?:[_-]?base)?)?",
  r"(?:\b|[_-])token", rf"(?:{_TOKEN_OF})token",
  "passw(?:or)?d", "passphrase", "passcode", r"(?:\b|[_-])p(?:ass|wd)", "[_-]pat", "credentials?", r"(?:\b|[_-])auth",
  "authorization", "signature", r"(?:\b|[_-])sig", "webhook(?:[_-]?url)?", r"(?:\b|[_-])cookie",
)  # fmt: skip
# Names of special tokens are not secrets.
_SPECIAL = r"[\w.-]*?(?:bos|eos|pad|unk|mask|sep|cls|image|video|audio|special|start|end|stop)_token\b"
_NAME = rf"(?!{_SPECIAL})[\w.-]*?(?:{'|'.join(_WORDS)})"
_SECRET_NAME = re.compile(rf"(?:--?)?{_NAME}", re.IGNORECASE)
# A comma ends a value only if another word or name follows it.
_PLAIN_VALUE = r"(?:[^\s'\",\\}\])]|,(?![\s'\"]|[\w.-]+\s*[=:]|$)|\\(?!['\"]))+"
_VALUE = rf"(?:'(?:''|\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|\\\"(?:(?!\\\").)*\\\"|{_PLAIN_VALUE})"

_TOKENS = (
  r"hf_[A-Za-z0-9]{16,}", r"api_org_[A-Za-z0-9]{16,}",  # Hugging Face
  r"nvapi-[\w-]{16,}", r"wandb_v1_\w{16,}",
  # OpenAI, Anthropic, Stripe and others
  r"sk-[\w-]{16,}", r"[sr]k_(?:live|test)_\w{16,}", r"whsec_\w{16,}", r"pplx-\w{16,}", r"gsk_\w{16,}", r"r8_\w{16,}",
  r"xai-\w{16,}", r"gh[pousr]_[A-Za-z0-9]{16,}", r"github_pat_\w{16,}", r"gl(?:pat|dt|rt|cbt|ptt|soat)-[\w.-]{16,}",
  r"npm_[A-Za-z0-9]{16,}", r"pypi-[\w-]{16,}", r"dckr_pat_[\w-]{16,}", r"hv[sbr]\.[\w-]{20,}", r"lin_api_\w{16,}",
  r"ntn_\w{16,}", r"ATATT3[\w=-]{16,}", r"shp(?:at|ca|pa|ss)_[a-fA-F0-9]{16,}", r"AGE-SECRET-KEY-1[A-Z0-9]{16,}",
  r"(?:AKIA|ASIA|ABIA|ACCA)[A-Z0-9]{12,}", r"AIza[\w-]{30,}", r"ya29\.[\w-]{16,}", r"1//0[\w-]{20,}", r"GOCSPX-[\w-]{16,}",
  r"xox[abceoprs][.-][\w.-]{10,}", r"xapp-[\w-]{10,}", r"do[por]_v1_[a-f0-9]{16,}", r"dapi[a-f0-9]{32}(?:-\d)?",
  r"SG\.[\w-]{16,}\.[\w-]{16,}", r"SK[0-9a-f]{32}", r"key-[0-9a-f]{32}", r"(?:bot)?\d{8,10}:AA[\w-]{33}",
  r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",  # JSON web token
  r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|$)",
)  # fmt: skip


def _if_random(found: re.Match[str]) -> str:
  """Masks a long word if it alternates between lower case, upper case and digits more often than a human-chosen name does."""
  kinds = ["lower" if c.islower() else "upper" if c.isupper() else "digit" for c in found[0] if c.isalnum()]
  share = sum(a != b for a, b in itertools.pairwise(kinds)) / len(kinds)
  if "/" in found[0] or "+" in found[0]:  # a path, unless it has the length of an AWS key (40) or an Azure key (88)
    random = share > 0.35 and (len(found[0]) == 40 or len(found[0]) > 80)
  else:
    random = share > 0.45 or (share > 0.25 and kinds.count("digit") >= 3)
  return MASK if random and len(set(kinds)) == 3 else found[0]


_RULES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
  # scheme://user:password@host; the password may contain @ and a slash. Digits and a slash after the colon are a port.
  (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/'\"@:?#]*:(?:(?!\d{1,5}/)|(?=\S*@[\w.-]+\.[a-z]{2,}\b))(?:(?!://)[^\s'\"])*@",
              re.IGNORECASE), rf"\1{MASK}@"),
  (re.compile(r"\b([a-z][a-z0-9+.-]*://)[^\s/'\"]+@", re.IGNORECASE), rf"\1{MASK}@"),
  (re.compile(r"(\bhooks\.slack(?:-gov)?\.com/\w+/)[^\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(r"(\bdiscord(?:app)?\.com/api/(?:v\d+/)?webhooks/)[^\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(r"(\b(?:webhook\.office\.com|outlook\.office(?:365)?\.com/webhook)/)[^\s'\"]+", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(rf"([?&;](?:{_NAME}|key|code)=)[^\s&;'\"#]+", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(r"(\bauthorization\\?['\"]?\s*[=:]\s*(?:\\?['\"])?)(?:(?:basic|bearer|token|digest|apikey)\s+)?[^\s'\",\\]+",
              re.IGNORECASE), rf"\1{MASK}"),
  # Without "authorization" before it, "basic" is usually the English word.
  (re.compile(r"\b(bearer\s+)(?=\S*[\d._~+/=-]|\S{20})[\w.~+/=-]{8,}", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(r"\b(basic\s+)(?=\S*[A-Z0-9])(?:[A-Za-z0-9+/]{4}){2,}[A-Za-z0-9+/]{0,3}={0,2}(?![\w-])",), rf"\1{MASK}"),
  (re.compile(r"((?<![\w-])(?:-u|--user|--proxy-user)[\s=]+[^\s:'\"/]+:)[^\s'\"/][^\s'\"]*"), rf"\1{MASK}"),  # curl
  (re.compile(rf"(\bsshpass\s+-p\s*|\bmysql\w*\s(?:[^\n'\"]*\s)?-p){_VALUE}"), rf"\1{MASK}"),
  (re.compile(rf"(\blogin\s+\S+\s+(?:password|passwd|pwd)\s+){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),  # .netrc
  (re.compile(rf"((?<![\w-])--?{_NAME}\s+)(?!-){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
  # NAME=value and name: value, as a shell, a YAML file or JSON writes it. PWD=/... is the working directory of a shell. Without
  # quotes, "pass:" is usually the English word.
  (re.compile(rf"(?<![\w.?&;-])((?!(?-i:(?:OLD)?PWD=/))(?!pass:\s){_NAME}"
              rf"(?:\\?['\"])?\s*(?:=(?!=)|:\s|:(?=[^\s/:]))\s*){_VALUE}", re.IGNORECASE), rf"\1{MASK}"),
  (re.compile(rf"(?<![A-Za-z0-9])(?:{'|'.join(_TOKENS)})"), MASK),
  # Base64 without a specific format, such as AWS secret keys: 32 characters or more, without a dot, a dash or an underscore.
  (re.compile(r"(?<![\w+/=.-])(?!/)[A-Za-z0-9+/]{32,}={0,2}(?![\w+/=.-])"), _if_random),
)  # fmt: skip


def masked(text: str) -> str:
  """Returns the text with every likely secret replaced by ``***``."""
  for pattern, replacement in _RULES:
    text = pattern.sub(replacement, text)
  return text


def masked_words(words: Sequence[str]) -> list[str]:
  """Masks each word of a command. The word after an option such as ``--token`` is masked entirely."""
  before = ["", *words]
  return [MASK if name.startswith("-") and _SECRET_NAME.fullmatch(name) and not word.startswith("-") else masked(word)
          for name, word in zip(before, words, strict=False)]  # fmt: skip


def masked_values(value: Any) -> Any:
  """Masks every string in JSON values, and every value of a dictionary key such as ``api_key``."""
  if isinstance(value, str):
    return masked(value)
  if isinstance(value, dict):
    return {key: MASK if _SECRET_NAME.fullmatch(key) and v else masked_values(v) for key, v in value.items()}
  return type(value)(masked_values(v) for v in value) if isinstance(value, list | tuple) else value
