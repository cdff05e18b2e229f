"""Writes a tokenizer.json of single letters with Gemma's special tokens, small enough for the golden models' 128 tokens."""

import json
from pathlib import Path

SPECIAL = {"<pad>": 0, "<eos>": 1, "<bos>": 2, "<start_of_turn>": 3, "<end_of_turn>": 4}
LETTERS = "abcdefghijklmnopqrstuvwxyz .,:?<>_/\n"


def write_letters(folder: Path, **special: int) -> Path:
  """Writes tokenizer.json into a folder. ``special`` has additional special tokens by name without angle brackets."""
  from tokenizers import AddedToken, Tokenizer, decoders, models

  tokens = SPECIAL | {f"<{name}>": i for name, i in special.items()}
  letters = {letter: i for i, letter in enumerate(LETTERS, 10)}
  library = Tokenizer(models.BPE(vocab=letters | tokens, merges=[], unk_token=None))
  library.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
  library.add_special_tokens([AddedToken(token, special=True) for token in tokens])
  folder.mkdir(parents=True, exist_ok=True)
  library.save(str(folder / "tokenizer.json"))
  return folder


def copy_golden(case: str, folder: Path, eos: object = None, **special: int) -> Path:
  """Copies a golden checkpoint with this tokenizer, and with a generation_config.json if ``eos`` is set."""
  import shutil

  source = Path(__file__).parents[1] / "golden" / case / "checkpoint"
  shutil.copytree(source, folder, dirs_exist_ok=True)
  if eos is not None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
  return write_letters(folder, **special)
