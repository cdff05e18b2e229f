"""Settings of generation that a model's files have: the tokens that end an answer, and suggested options of sampling."""

from collections.abc import Iterable
from pathlib import Path

from maxtext_like.config.model import ModelConfig
from maxtext_like.data.tokenization.tokenizer import BytesTokenizer, Tokenizer, known_names, token_id
from maxtext_like.errors import UserError
from maxtext_like.strict_json import parse_file, printable


def stop_tokens(tokenizer: Tokenizer, directory: Path | None, model: ModelConfig | None = None) -> frozenset[int]:
  """Returns the ids that end an answer: the tokenizer's eos, and those of the model's files or configuration (Gemma's end of a
  turn).

  Args:
    tokenizer: tokenizer of the model.
    directory: folder with generation_config.json or config.json, whose ``eos_token_id`` is an id or a list; None for no files.
    model: the ``model:`` section. Its ids are used only if they include the tokenizer's eos; otherwise they belong to another
      tokenizer.

  Raises:
    UserError: a file is malformed.
  """
  stops = set() if tokenizer.eos_id is None else {tokenizer.eos_id}
  # The bytes tokenizer has Gemma's id of eos, but the other ids of Gemma's list are ordinary bytes.
  if model is not None and not isinstance(tokenizer, BytesTokenizer) and stops.intersection(model.eos_token_ids):
    stops.update(model.eos_token_ids)
  if directory is not None:
    stops |= _listed(directory)
  return frozenset(stops)


def named_tokens(tokenizer: Tokenizer, names: Iterable[str]) -> set[int]:
  """Returns the ids of tokens in the form of ``tokenizer.token_id``. Raises UserError if a name is not a token."""
  found = set()
  for name in names:
    token = token_id(tokenizer, name)
    if token is None:
      raise UserError(
        f"stop token {name!r}: the tokenizer has no such token\n"
        f"  fix: write a token as the tokenizer spells it, or one of: {', '.join(known_names(tokenizer)) or 'none here'}"
      )
    found.add(token)
  return found


SUGGESTED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def suggested_sampling(directory: Path | None) -> dict[str, float]:
  """Return the options of sampling in generation_config.json, which transformers uses by default; empty if there are none.

  Args:
    directory: as for ``stop_tokens``.

  Raises:
    UserError: the file is malformed.
  """
  path = None if directory is None else directory / "generation_config.json"
  if path is None or not path.is_file():
    return {}
  values = parse_file(path, limit=4 << 20)
  if not isinstance(values, dict):
    raise UserError(f"{printable(path)}: not a JSON object", fix="download the file of the model again")
  if not values.get("do_sample"):
    return {}
  return {name: values[name] for name in SUGGESTED if isinstance(values.get(name), int | float)}


def _listed(directory: Path) -> set[int]:
  """Returns ``eos_token_id`` of generation_config.json, or else of config.json; empty if neither has it."""
  for path in (directory / "generation_config.json", directory / "config.json"):
    if not path.is_file():
      continue
    values = parse_file(path, limit=4 << 20)
    if not isinstance(values, dict):
      raise UserError(f"{printable(path)}: not a JSON object", fix="download the file of the model again")
    text = values.get("text_config")
    found = values.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
    if found is None:
      continue
    ids = found if isinstance(found, list) else [found]
    if not all(type(i) is int and i >= 0 for i in ids):
      raise UserError(
        f"{printable(path)}: eos_token_id is {printable(found)}, expected a token id or a list of them",
        fix="write the id of the token that ends a text, as in the published model",
      )
    return set(ids)
  return set()
