"""``maxtext-like generate``: generates text with a trained run or a Hugging Face checkpoint."""

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from maxtext_like.cli.arguments import add_adapters, parse_words, print_notes, require_keys, verb_parser
from maxtext_like.config.hub import checkpoint_path
from maxtext_like.config.paths import existing_path
from maxtext_like.errors import UserError
from maxtext_like.generation.transformers_options import NAMES

if TYPE_CHECKING:
  from maxtext_like.api.generate_file import JobProgress
  from maxtext_like.api.pretrained import Pretrained
  from maxtext_like.generation.prompts import Prompt

_OPTIONS = (
  "max_tokens min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty seed n stop "
  "stop_ids stop_strings logprobs slots int8_cache draft_tokens"
).split()
_PROGRESS_SECONDS = 10.0  # interval of the lines about a job

DESCRIPTION = """Continues prompts: one from the command line, or one per line of a .jsonl file:

  {"prompt": "What is this? <image>", "images": ["cat.png"]}
  {"messages": [{"role": "user", "content": "What is 1+1?"}]}

A conversation, or --prompt with --chat, is rendered with the model's chat template. With --output the answers are written into
a .jsonl file as soon as they end. If the job is killed, the same command continues it.

DIR is a run directory, one of its checkpoints, an imported checkpoint, or a Hugging Face checkpoint. Its tokenizer is used.
Special tokens in a prompt, such as <start_of_turn>, become those tokens. An answer ends at the tokenizer's end-of-text token,
at a token that generation_config.json lists, or at --stop. Default values are in parentheses.

base_weights=int8 or nf4 quantizes the weights while they are read, so that a larger model fits. An adapter that was trained on
quantized weights is added to them, as in training; base_weights=null merges it."""
EPILOG = """examples:
  maxtext-like generate --checkpoint runs/gemma4-tiny --prompt "def main():" --max-tokens 100
  maxtext-like generate --checkpoint gemma-3-4b-it --batch prompts.jsonl --temperature 0 dtype=bfloat16
  maxtext-like generate --checkpoint gemma-3-4b-it --batch prompts.jsonl --output answers.jsonl --n 4
  maxtext-like generate --checkpoint gemma-4-31B-it --prompt "The fox" dtype=bfloat16 weight_dtype=bfloat16 base_weights=nf4
  maxtext-like generate --checkpoint gemma-3-4b-it --image cat.jpg --prompt "<image>A photograph of" --stop end_of_turn

exit codes: 0 done; 2 wrong usage or input; 3 the logits are not finite; 4 the weights or the KV caches do not fit; 42 the disk
of --output is full"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  options, overrides, defaults = _parse(argv)
  from maxtext_like import Prompt, load
  from maxtext_like.cli.forward import print_clamped
  from maxtext_like.generation.prompts import read_prompts
  from maxtext_like.generation.transformers_options import typed

  if options.batch is None:
    images = tuple(str(Path(name).expanduser()) for name in options.images)
    if options.chat or options.think:
      prompts = [_asked(options.prompt, images, options.think)]
    else:
      prompts = [Prompt(options.prompt, images)]
  else:
    prompts = read_prompts(Path(options.batch).expanduser())
  images = any(prompt.images for prompt in prompts)
  named, overrides = typed(overrides)
  model = load(options.checkpoint, *overrides, images=images, adapters=options.adapters)
  print_notes(model.notes, file=sys.stderr)
  draft = None if options.draft is None else load(options.draft, *overrides, images=images)
  if suggested := _suggested(model, argv):
    print(
      f"note: generation_config.json suggests {suggested}, which is ignored unless you add it to the command", file=sys.stderr
    )
  # Options that were not typed can be set by their names in transformers.
  wanted = {name: value for name in _OPTIONS if (value := getattr(options, name)) != defaults[name]} | named
  wanted |= {"logit_bias": dict(options.logit_bias)} if options.logit_bias else {}
  wanted |= {} if draft is None else {"draft": draft}
  if options.output is not None:
    return _to_file(model, prompts, options.output, wanted)
  shown: list[str] = []  # for a single answer: the prompt and its answer as it is generated

  def show(number: int, text: str) -> None:
    shown.extend([text] if shown else [prompts[number].text, text])
    print("".join(shown) if len(shown) == 2 else text, end="", flush=True)

  answers = wanted.get("n") or wanted.get("num_return_sequences") or 1
  single = len(prompts) == answers == 1
  found = model.generate(prompts, on_text=show if single else None, **wanted)
  if single:
    print("" if shown else prompts[0].text, flush=True)
  else:
    for place, answer in enumerate(found.answers):
      number = f"{place // answers + 1}" + (f".{answer.sample + 1}" if answers > 1 else "")
      print(f"--- {number}\n{answer.prompt}{answer.text}")
  made = sum(len(answer.tokens) for answer in found.answers)
  if made > found.first_tokens:
    rate = f"then {_rate(made - found.first_tokens, found.seconds)}"
  else:
    rate = f"{_rate(made, found.first_seconds + found.seconds)} in total"
  started = f"the first {found.first_tokens} after {found.first_seconds:.2f} s (including compilation)"
  print(f"{made} tokens, {started}, {rate}{found.note}", file=sys.stderr)
  print_clamped(found.clamped)
  return 0


def _suggested(model: "Pretrained", argv: list[str]) -> str:
  """Return the suggested options that were not typed, as they are typed."""
  flags = {f"--{name.replace('_', '-')}": value for name, value in model.suggested_sampling.items()}
  return " ".join(f"{flag} {value}" for flag, value in flags.items() if not any(word.split("=")[0] == flag for word in argv))


def _to_file(model: "Pretrained", prompts: "list[Prompt]", output: Path, wanted: dict[str, Any]) -> int:
  """Answer prompts into a file, and print the progress."""
  from maxtext_like import generate_file
  from maxtext_like.cli.forward import print_clamped

  printed = time.monotonic()

  def show(p: "JobProgress") -> None:
    nonlocal printed
    if time.monotonic() - printed >= _PROGRESS_SECONDS:
      printed = time.monotonic()
      print(p, file=sys.stderr, flush=True)

  found = generate_file(model, prompts, output, on_progress=show, **wanted)
  print(found, file=sys.stderr)
  print_clamped(found.clamped)
  return 0


def _asked(text: str, images: tuple[str, ...], think: bool) -> "Prompt":
  """Return a chat prompt with a user message. Images without <image> in the text come before it."""
  from maxtext_like import Prompt

  if "<image>" in text or not images:
    return Prompt.chat(text, images=images, think=think)
  parts = [*({"type": "image", "path": name} for name in images), {"type": "text", "text": text}]
  return Prompt.chat([{"role": "user", "content": parts}], think=think)


def _bias(text: str) -> tuple[int, float]:
  """Parse ID=X."""
  token, _, number = text.partition("=")
  try:
    return int(token), float(number)
  except ValueError:
    raise argparse.ArgumentTypeError(f"{text!r} is not ID=X, such as 106=-2.5") from None


def _rate(tokens: int, seconds: float) -> str:
  return f"{tokens / max(seconds, 1e-9):,.1f} tokens/s"


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str], dict[str, Any]]:
  """Return the options, the words key=value, and the defaults of ``_OPTIONS``."""
  usage = "--checkpoint DIR (--prompt TEXT | --batch FILE.jsonl) [options] [key=value ...]"
  parser = verb_parser("generate", usage, DESCRIPTION, EPILOG)
  add = parser.add_argument
  add("--checkpoint", type=checkpoint_path, metavar="DIR", help="checkpoint to generate with")
  add_adapters(parser)
  add("--prompt", metavar="TEXT", help="text to continue")
  add("--chat", action="store_true", help="the prompt is a user message, rendered with the model's chat template")
  add("--think", action="store_true", help="as --chat, with thinking switched on in the template")
  add("--image", type=existing_path, metavar="FILE", action="append", default=[], dest="images",
      help="PNG or JPEG, inserted at <image> in the prompt or before it; may be repeated")  # fmt: skip
  add(
    "--batch",
    type=existing_path,
    metavar="FILE",
    help='a .jsonl file with "prompt" and optionally "images", or "messages", in every line',
  )
  add("--output", type=Path, metavar="FILE", help="with --batch: write the answers into this .jsonl file; "
      "repeating the command continues a job that was interrupted")  # fmt: skip
  add("--n", type=int, default=1, metavar="N", help="number of answers to each prompt (1)")
  add("--max-tokens", type=int, default=128, metavar="N", help="maximum length of an answer in tokens (128)")
  add("--min-tokens", type=int, default=0, metavar="N", help="minimum length of an answer in tokens (0)")
  add("--temperature", type=float, default=1.0, metavar="X", help="sampling temperature; 0: the most likely token (1)")
  add("--top-k", type=int, default=0, metavar="N", help="sample from the N most likely tokens (all)")
  add("--top-p", type=float, default=1.0, metavar="X", help="sample from the most likely tokens with total probability X (1)")
  add(
    "--min-p",
    type=float,
    default=0.0,
    metavar="X",
    help="sample from tokens at least X times as likely as the most likely one (0)",
  )
  add("--repetition-penalty", type=float, default=1.0, metavar="X", help="divide positive logits of tokens of "
      "the prompt and the answer by X, and multiply negative ones (1)")  # fmt: skip
  add("--presence-penalty", type=float, default=0.0, metavar="X",
      help="subtract X from the logits of tokens of the answer (0)")  # fmt: skip
  add("--frequency-penalty", type=float, default=0.0, metavar="X",
      help="subtract X for every occurrence of a token in the answer (0)")  # fmt: skip
  add("--logit-bias", type=_bias, action="append", default=[], metavar="ID=X",
      help="add X to the logit of a token; may be repeated")  # fmt: skip
  add("--seed", type=int, default=0, metavar="N", help="seed of the sampling (0)")
  add("--stop", action="append", default=[], metavar="NAME", help="a token that ends an answer, by its "
      "spelling or its role: end_of_turn, user, ...; may be repeated")  # fmt: skip
  add("--stop-id", type=int, action="append", default=[], dest="stop_ids", metavar="ID", help="a token id that ends an answer")
  add("--stop-string", action="append", default=[], dest="stop_strings", metavar="TEXT",
      help="a text that ends an answer and is not part of it; may be repeated")  # fmt: skip
  add("--logprobs", action="store_true", help="with --output: write log-probabilities of the tokens")
  add("--slots", type=int, default=64, metavar="N",
      help="largest number of answers that are generated at the same time, a power of two (64)")  # fmt: skip
  add("--int8-cache", action="store_true", help="store keys and values in 8 bits")
  add("--draft", type=checkpoint_path, metavar="DIR", help="a smaller model with the same tokenizer, which proposes tokens; "
      "key=value settings apply to both models")  # fmt: skip
  add("--draft-tokens", type=int, default=4, metavar="N", help="number of tokens that --draft proposes before each pass of the "
      "model (4)")  # fmt: skip
  options, rest = parse_words(parser, argv)
  if options.checkpoint is None or (options.prompt is None) == (options.batch is None):
    raise UserError("generate needs --checkpoint and either --prompt or --batch\n  fix: see maxtext-like generate --help")
  if (options.chat or options.think) and options.batch is not None:
    raise UserError('generate: --chat needs --prompt\n  fix: in a --batch file, write conversations as lines with "messages"')
  if options.images and options.batch is not None:
    raise UserError('generate: --image needs --prompt\n  fix: in a --batch file, name images in the field "images"')
  if options.output is not None and options.batch is None:
    raise UserError("generate: --output needs --batch\n  fix: add --batch FILE.jsonl with one prompt on each line")
  if options.logprobs and options.output is None:
    raise UserError("generate: --logprobs needs --output\n  fix: add --output FILE.jsonl")
  return options, require_keys(parser, rest, NAMES), {name: parser.get_default(name) for name in _OPTIONS}
