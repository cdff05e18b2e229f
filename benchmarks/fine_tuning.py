"""Shows that fine-tuning teaches a format that the model does not know, measured on unseen prompts, for each way of training.

  python benchmarks/fine_tuning.py [--only WORDS] [--out DIR] [--seed N]

Pretrains a small Gemma 3 on the source code of this machine's Python library, with a tokenizer trained on it. Then it teaches
the model to answer with the kind of statement of a line of Python, as JSON: with all weights, with an adapter, and with an
adapter over quantized weights, in bfloat16 and in float16. Prints how often the answer to a held-out line is exactly right,
before and after. Held-out lines are from other files than training lines. A run that is in --out already is not repeated;
--only selects the rows whose names contain the words, such as "LoRA float16". The settings are the same for every seed and
every kind of adapter.
"""

import argparse
import hashlib
import itertools
import json
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("import", "from", "def", "class", "return", "raise", "if", "for", "while", "with")
EACH, HELD_OUT_EACH = 400, 40  # largest number of lines of a kind; some kinds have fewer
VOCABULARY = 768
SPECIAL = ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
MODEL = {"num_decoder_layers": 3, "vocab_size": VOCABULARY, "max_target_length": 64, "per_device_batch_size": 16}
PRETRAINING = {"steps": 300, "dataset": "python-stdlib", "dataset_documents_max": 400, "learning_rate": 3e-3}
TUNING = {"epochs": 4, "eval_interval": 50, "eval_steps": 4, "keep_best": True}
ALL = {"learning_rate": 2e-3}
LORA = {"lora_rank": 16, "lora_alpha": 32, "learning_rate": 1e-2}
WAYS: dict[str, dict[str, Any]] = {"all weights": ALL, "LoRA": LORA}
WAYS |= {f"LoRA over {form}": LORA | {"base_weights": form} for form in ("nf4", "int8")}
DTYPES = ("bfloat16", "float16")


def lines() -> Iterator[tuple[str, str, bool]]:
  """Yields every line of the library once, with its kind and whether its file is held out."""
  seen = set()
  for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
    held_out = hashlib.sha256(path.name.encode()).digest()[0] < 64
    for line in path.read_text("utf-8", "ignore").splitlines():
      text = line.strip()
      kind = text.split(" ")[0]
      if kind in KINDS and 12 <= len(text) <= 48 and text.isascii() and text not in seen:
        seen.add(text)
        yield text, kind, held_out


def answer(kind: str) -> str:
  """Returns the correct answer."""
  return json.dumps({"kind": kind})


def write_conversations(folder: Path) -> list[tuple[str, str]]:
  """Writes learn.jsonl and held_out.jsonl with a similar number of each kind. Returns the held-out lines with their kinds."""
  found: dict[tuple[str, bool], list[str]] = {}
  for text, kind, held_out in lines():
    found.setdefault((kind, held_out), []).append(text)
  chosen = random.Random(0)
  held = []
  for name, is_held, most in (("learn.jsonl", False, EACH), ("held_out.jsonl", True, HELD_OUT_EACH)):
    pairs = []
    for kind in KINDS:
      texts = found[kind, is_held]
      pairs += [(text, kind) for text in chosen.sample(texts, min(most, len(texts)))]
    chosen.shuffle(pairs)
    with (folder / name).open("w") as file:
      for text, kind in pairs:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": answer(kind)}]
        file.write(json.dumps({"messages": messages}) + "\n")
    held = pairs
  return held


def write_tokenizer(folder: Path) -> Path:
  """Trains a byte-pair tokenizer on the library's lines, with the special tokens of Gemma 3, and returns its folder."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
  tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
  special: list[Any] = [AddedToken(text, special=True) for text in SPECIAL]
  trainer = trainers.BpeTrainer(
    vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  tokenizer.train_from_iterator((text for text, _, _ in lines()), trainer)
  folder.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder


def exact(run: Any, held: list[tuple[str, str]], dtype: str) -> float:
  """Returns the share of the held-out lines whose answer is exactly right."""
  import maxtext_like

  prompts = [maxtext_like.Prompt.chat(text) for text, _ in held]
  found = maxtext_like.generate(run, prompts, max_tokens=12, temperature=0, dtype=dtype)
  return sum(a.text == answer(kind) for a, (_, kind) in zip(found.answers, held, strict=True)) / len(held)


def rows(folder: Path, only: str, **keys: Any) -> Iterator[tuple[str, str, float, float, float, float]]:
  """Yields (way, dtype, share before, share after, held-out loss, seconds) for each way of training.

  Args:
    folder: folder of data and runs.
    only: words that a row's name must contain.
    keys: override the keys of every run.
  """
  import maxtext_like

  held = write_conversations(folder)
  common = MODEL | {"tokenizer": write_tokenizer(folder / "tokenizer"), "output_dir": folder, "enable_tensorboard": False}
  base = maxtext_like.train("gemma3-tiny", run_name="base", **{**common, **PRETRAINING, **keys})
  data = {"dataset": "jsonl", "dataset_path": folder / "learn.jsonl", "eval_path": folder / "held_out.jsonl"}
  before = {dtype: exact(base, held, dtype) for dtype in DTYPES}
  for (way, settings), dtype in itertools.product(WAYS.items(), DTYPES):
    name = f"{way} {dtype}"
    if not set(only.split()) <= set(name.split()):
      continue
    begin = time.monotonic()
    given = {**common, **data, **TUNING, **settings, "dtype": dtype, **keys}
    run = maxtext_like.sft("gemma3-tiny", init_from=base, run_name=name.replace(" ", "-"), **given)
    seconds = time.monotonic() - begin
    loss = min(row["eval_loss"] for row in run.metrics if "eval_loss" in row)
    yield way, dtype, before[dtype], exact(run, held, dtype), loss, seconds


def main() -> int:
  """Prints the table."""
  parser = argparse.ArgumentParser(description="Exact answers before and after a fine-tune, for every way of training.")
  parser.add_argument("--only", default="", help="rows whose names hold these words")
  parser.add_argument("--out", type=Path, help="folder that keeps data and runs")
  parser.add_argument("--seed", type=int, default=0, help="of weights, adapters and the order of the data")
  options = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    folder = options.out or Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    print("| trained | dtype | right before | right after | held-out loss | seconds |\n|---|---|---|---|---|---|")
    shares, seeds = [], {"seed": options.seed, "data_shuffle_seed": options.seed}
    for way, dtype, before, after, loss, seconds in rows(folder, options.only, **seeds):
      shares.append(after)
      print(f"| {way} | {dtype} | {before:.1%} | {after:.1%} | {loss:.4f} | {seconds:.0f} |", flush=True)
    print(f"{len(shares)} rows, right after: {min(shares):.1%} to {max(shares):.1%}" if shares else "no row has these words")
  return 0


if __name__ == "__main__":
  sys.exit(main())
