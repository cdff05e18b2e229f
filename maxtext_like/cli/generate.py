"""``maxtext-like generate``: generates text with a trained run or a Hugging Face checkpoint."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import existing_path
from maxtext_like.errors import UserError

if TYPE_CHECKING:
  from maxtext_like.generation.prompts import Prompt

DESCRIPTION = """Continues prompts: one from the command line, or one per line of a .jsonl file:

  {"prompt": "What is this? <image>", "images": ["cat.png"]}
  {"messages": [{"role": "user", "content": "What is 1+1?"}]}

A conversation, or --prompt with --chat, is rendered with the model's chat template.

DIR is a run directory, one of its checkpoints, an imported checkpoint, or a Hugging Face checkpoint. Its tokenizer is used.
Special tokens in a prompt, as <start_of_turn>, become those tokens. An answer ends at the tokenizer's end-of-text token, at a
token that generation_config.json lists, or at --stop."""
EPILOG = """examples:
  maxtext-like generate --checkpoint runs/gemma4-tiny --prompt "def main():" --max-tokens 100
  maxtext-like generate --checkpoint gemma-3-4b-it --batch prompts.jsonl --temperature 0 dtype=bfloat16
  maxtext-like generate --checkpoint gemma-3-4b-it --image cat.jpg --prompt "<image>A photograph of" --stop end_of_turn

exit codes: 0 done; 2 wrong usage or input; 3 the logits are not finite"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  options, overrides = _parse(argv)
  from maxtext_like import Prompt, load
  from maxtext_like.cli.forward import clamped_line
  from maxtext_like.generation.prompts import read_prompts

  if options.batch is None:
    images = tuple(str(Path(name).expanduser()) for name in options.images)
    if options.chat or options.think:
      prompts = [_asked(options.prompt, images, options.think)]
    else:
      prompts = [Prompt(options.prompt, images)]
  else:
    prompts = read_prompts(Path(options.batch).expanduser())
  images = any(prompt.images for prompt in prompts)
  model = load(options.checkpoint, *overrides, images=images, adapters=options.adapters)
  for note in model.notes:
    print(f"note: {note}", file=sys.stderr)
  shown: list[str] = []  # for a single prompt: the prompt and its answer as it is generated

  def show(number: int, text: str) -> None:
    shown.extend([text] if shown else [prompts[number].text, text])
    print("".join(shown) if len(shown) == 2 else text, end="", flush=True)

  found = model.generate(
    prompts,
    max_tokens=options.max_tokens,
    temperature=options.temperature,
    top_k=options.top_k,
    top_p=options.top_p,
    min_p=options.min_p,
    seed=options.seed,
    stop=options.stop,
    stop_ids=options.stop_ids,
    on_text=show if len(prompts) == 1 else None,
  )
  if len(prompts) == 1:
    print("" if shown else prompts[0].text, flush=True)
  else:
    for number, answer in enumerate(found.answers, 1):
      print(f"--- {number}\n{answer.prompt}{answer.text}")
  made = sum(len(answer.tokens) for answer in found.answers)
  if made > found.first_tokens:
    rate = f"then {_rate(made - found.first_tokens, found.seconds)}"
  else:
    rate = f"{_rate(made, found.first_seconds + found.seconds)} in total"
  started = f"the first {found.first_tokens} after {found.first_seconds:.2f} s (including compilation)"
  print(f"{made} tokens, {started}, {rate}", file=sys.stderr)
  if found.clamped is not None:
    print(clamped_line(found.clamped), file=sys.stderr)
  return 0


def _asked(text: str, images: tuple[str, ...], think: bool) -> "Prompt":
  """Return a chat prompt with a user message. Images without <image> in the text come before it."""
  from maxtext_like import Prompt

  if "<image>" in text or not images:
    return Prompt.chat(text, images=images, think=think)
  parts = [*({"type": "image", "path": name} for name in images), {"type": "text", "text": text}]
  return Prompt.chat([{"role": "user", "content": parts}], think=think)


def _rate(tokens: int, seconds: float) -> str:
  return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"


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
  parser.add_argument("--checkpoint", type=checkpoint_path, metavar="DIR", help="checkpoint to generate with")
  parser.add_argument("--adapter", type=existing_path, metavar="DIR", action="append", default=[], dest="adapters",
                      help="LoRA adapter to add to the weights: of peft, or a run with lora_rank; may be repeated")  # fmt: skip
  parser.add_argument("--prompt", metavar="TEXT", help="text to continue")
  parser.add_argument(
    "--chat", action="store_true", help="the prompt is a user message, rendered with the model's chat template"
  )
  parser.add_argument("--think", action="store_true", help="as --chat, with thinking switched on in the template")
  parser.add_argument("--image", type=existing_path, metavar="FILE", action="append", default=[], dest="images",
                      help="PNG or JPEG, inserted at <image> in the prompt or before it; may be repeated")  # fmt: skip
  parser.add_argument(
    "--batch",
    type=existing_path,
    metavar="FILE",
    help='a .jsonl file with "prompt" and optionally "images", or "messages", in every line',
  )
  parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="maximum length of an answer in tokens (128)")
  parser.add_argument(
    "--temperature", type=float, default=1.0, metavar="X", help="sampling temperature; 0: the most likely token (1)"
  )
  parser.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N most likely tokens (all)")
  parser.add_argument(
    "--top-p", type=float, default=1.0, metavar="X", help="sample from the most likely tokens with total probability X (1)"
  )
  parser.add_argument(
    "--min-p",
    type=float,
    default=0.0,
    metavar="X",
    help="sample from tokens at least X times as likely as the most likely one (0)",
  )
  parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
  parser.add_argument("--stop", action="append", default=[], metavar="NAME", help="a token that ends an answer, as "
                      "spelled or by role: end_of_turn, user, ...; may be repeated")  # fmt: skip
  parser.add_argument(
    "--stop-id", type=int, action="append", default=[], dest="stop_ids", metavar="ID", help="a token id that ends an answer"
  )
  try:
    options, overrides = parser.parse_known_args(argv)
  except argparse.ArgumentError as error:
    raise UserError(f"generate: {error}\n  fix: see maxtext-like generate --help") from None
  if options.checkpoint is None or (options.prompt is None) == (options.batch is None):
    raise UserError("generate needs --checkpoint and either --prompt or --batch\n  fix: see maxtext-like generate --help")
  if (options.chat or options.think) and options.batch is not None:
    raise UserError('generate: --chat needs --prompt\n  fix: in a --batch file, write conversations as lines with "messages"')
  if options.images and options.batch is not None:
    raise UserError('generate: --image needs --prompt\n  fix: in a --batch file, name images in the field "images"')
  if unknown := [word for word in overrides if word.startswith("-") or "=" not in word]:
    raise UserError(f"generate: unknown word {unknown[0]!r}\n  fix: see maxtext-like generate --help")
  return options, overrides
