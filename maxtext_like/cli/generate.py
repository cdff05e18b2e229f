"""``maxtext-like generate``: continues prompts with a trained run or a Hugging Face checkpoint."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.config.load import Loaded
  from maxtext_like.data.tokenizer import Tokenizer
  from maxtext_like.layers.decoder import Decoder

DESCRIPTION = """Continues prompts, one from the command line or one a line of a .jsonl file ({"prompt": "..."}).

DIR is a run directory, one of its checkpoints, or a Hugging Face checkpoint (config.json, safetensors, tokenizer.json)."""
EPILOG = """examples:
  maxtext-like generate --checkpoint runs/gemma4-tiny --prompt "def main():" --max-tokens 100
  maxtext-like generate --checkpoint gemma-3-4b-it --batch prompts.jsonl --temperature 0 dtype=bfloat16

exit codes: 2 wrong usage or input; 3 the logits are not finite"""


@dataclass(frozen=True)
class Model:
  """What generates: a decoder, its parameters and its tokenizer."""

  decoder: "Decoder"
  params: Any
  tokenizer: "Tokenizer"
  loaded: "Loaded"


def run(argv: list[str]) -> int:
  """Runs the verb; see ``DESCRIPTION``."""
  options, overrides = _parse(argv)
  from maxtext_like.generation.sampling import Sampling

  sampling = Sampling(
    temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p, seed=options.seed
  )
  prompts = [options.prompt] if options.prompt is not None else read_prompts(Path(options.batch))
  model = load_model(Path(options.checkpoint), overrides)
  ids = [encode(model.tokenizer, text) for text in prompts]

  from maxtext_like.generation.engine import Prompts, generate

  stop = frozenset(i for i in (model.tokenizer.eos_id, *options.stop_ids) if i is not None)
  answers: list[list[int]] = [[] for _ in ids]
  shown = ""
  if len(prompts) == 1:
    print(prompts[0], end="", flush=True)
  begin, first = time.monotonic(), None
  for rows in generate(model.decoder, model.params, Prompts(ids), max_tokens=options.max_tokens, stop=stop, sampling=sampling):
    first = first or time.monotonic()
    for answer, new in zip(answers, rows, strict=True):
      answer.extend(new)
    if len(prompts) == 1:
      # Decoded as a whole each time: a character may be spread over several tokens.
      text = model.tokenizer.decode(answers[0])
      stable = text.removesuffix("\N{REPLACEMENT CHARACTER}")
      if stable.startswith(shown):
        print(stable[len(shown) :], end="", flush=True)
        shown = stable
  end = time.monotonic()
  if len(prompts) == 1:
    print(model.tokenizer.decode(answers[0])[len(shown) :], flush=True)
  else:
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True), 1):
      print(f"--- {number}\n{prompt}{model.tokenizer.decode(answer)}")
  made = sum(map(len, answers))
  to_first = (first or end) - begin
  print(f"{made} tokens, the first after {to_first:.2f} s (compiling included), {_rate(made, end - begin)}", file=sys.stderr)
  return 0


def _rate(tokens: int, seconds: float) -> str:
  return f"{tokens / seconds:,.1f} tokens/s over all" if seconds > 0 else "at once"


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
  parser = argparse.ArgumentParser(
    prog="maxtext-like generate",
    usage="maxtext-like generate --checkpoint DIR (--prompt TEXT | --batch FILE.jsonl) [options] [key=value ...]",
    description=DESCRIPTION,
    epilog=EPILOG,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    exit_on_error=False,
  )
  parser.add_argument("--checkpoint", metavar="DIR", help="what to generate with")
  parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
  parser.add_argument("--batch", metavar="FILE", help='a .jsonl file with a "prompt" in every line')
  parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="longest answer, in tokens (128)")
  parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="0 takes the most likely token (1)")
  parser.add_argument("--top-k", type=int, default=0, metavar="N", help="the N most likely tokens only (all)")
  parser.add_argument("--top-p", type=float, default=1.0, metavar="X", help="the most likely tokens that make up X (1)")
  parser.add_argument("--min-p", type=float, default=0.0, metavar="X", help="tokens X times as likely as the top one (0)")
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
  parser.add_argument("--stop-id", type=int, action="append", default=[], dest="stop_ids", metavar="ID", help="ends an answer")
  try:
    options, overrides = parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise UserError(f"generate: {error}\n  fix: see maxtext-like generate --help") from None
  if options.checkpoint is None or (options.prompt is None) == (options.batch is None):
    raise UserError("generate needs --checkpoint and either --prompt or --batch\n  fix: see maxtext-like generate --help")
  if unknown := [word for word in overrides if word.startswith("-") or "=" not in word]:
    raise UserError(f"generate: unknown word {unknown[0]!r}\n  fix: see maxtext-like generate --help")
  return options, overrides


def read_prompts(path: Path) -> list[str]:
  """The prompts of a .jsonl file. Raises UserError naming file and line."""
  from maxtext_like.checkpoint.huggingface.strict_json import parse

  try:
    lines = path.read_bytes().splitlines()
  except OSError as error:
    raise UserError(f"{path}: cannot be read: {error.strerror}") from None
  prompts = []
  for number, line in enumerate(lines, 1):
    if line.strip():
      record = parse(line, f"{path}:{number}")
      if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise UserError(f'{path}:{number}: expected an object with a text "prompt"')
      prompts.append(record["prompt"])
  if not prompts:
    raise UserError(f"{path}: has no prompts")
  return prompts


def encode(tokenizer: "Tokenizer", text: str) -> list[int]:
  """A prompt's ids, with the token that begins a text where the tokenizer has one."""
  begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
  try:
    return begin + tokenizer.encode(text)
  except UnicodeEncodeError:
    raise UserError("the prompt is not valid Unicode text") from None


def load_model(directory: Path, overrides: list[str]) -> Model:
  """The model in a run, a checkpoint of ours, or a Hugging Face checkpoint directory.

  Raises:
    UserError: it is none of these, or damaged, or the overrides do not fit it.
  """
  from maxtext_like.checkpoint.huggingface.model_file import load_checkpoint_config
  from maxtext_like.config.load import load_config
  from maxtext_like.data.tokenizer import load_tokenizer

  if not directory.is_dir():
    raise UserError(f"{directory}: no such directory")
  if (directory / "config.json").is_file():
    _, loaded = load_checkpoint_config(directory, overrides)
    named = next((directory / n for n in ("tokenizer.json", "tokenizer.model") if (directory / n).is_file()), None)
    if named is None:
      raise UserError(f"{directory}: has neither tokenizer.json nor tokenizer.model, so text cannot become tokens")
    tokenizer = load_tokenizer(str(named), loaded.config.model.vocab_size)
  else:
    # runs/NAME, runs/NAME/checkpoints or runs/NAME/checkpoints/N
    run_directory = next((d for d in (directory, *directory.absolute().parents[:2]) if (d / "config.yml").is_file()), None)
    if run_directory is None:
      raise UserError(f"{directory}: neither a run (config.yml) nor a Hugging Face checkpoint (config.json)")
    loaded = load_config(run_directory / "config.yml", overrides)
    tokenizer = load_tokenizer(loaded.config.data.tokenizer, loaded.config.model.vocab_size)

  from maxtext_like.training.initial_weights import read_weights
  from maxtext_like.training.program import make_program
  from maxtext_like.training.run import use_compilation_cache

  use_compilation_cache(loaded.config.logging.compilation_cache_dir)
  program = make_program(loaded.config)
  return Model(program.decoder, read_weights(directory, program), tokenizer, loaded)
