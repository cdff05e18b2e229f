"""``maxtext-like eval``: evaluates a run or a Hugging Face checkpoint on tasks of lm-evaluation-harness."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from maxtext_like.cli.arguments import add_adapters, add_model, parse_words, print_notes, require_keys, verb_parser
from maxtext_like.cli.counted import Counted
from maxtext_like.config.paths import existing_path, new_file
from maxtext_like.errors import UserError
from maxtext_like.extras import install

DESCRIPTION = f"""Evaluates a model on tasks of lm-evaluation-harness ({install("eval")}) and prints its table.

TASKS are names of tasks, groups or tags, patterns as 'mmlu_*', or .yaml files of tasks, separated by commas. Texts are encoded
and shortened as in the harness' Hugging Face backend, and options with the harness' names have the same meaning. Data that
are not on this machine are downloaded by the harness.

Rows are padded to 32, 48, 64, 96, 128, ... positions, so few programs are compiled. A result does not depend on the other rows
of its batch. Default values are in parentheses."""
EPILOG = """examples:
  maxtext-like eval runs/my-run --tasks arc_easy,hellaswag --limit 200
  maxtext-like eval gemma-3-4b-it --tasks gsm8k --apply-chat-template --output gsm8k.json --log-samples dtype=bfloat16
  maxtext-like eval gemma-4-31B-it --tasks gsm8k --apply-chat-template dtype=bfloat16 weight_dtype=bfloat16 base_weights=int8

exit codes: 0 done; 2 wrong usage or input; 3 the logits are not finite; 4 the weights or the KV caches do not fit"""


def run(argv: list[str]) -> int:
  """Run the verb; see ``DESCRIPTION``."""
  parser = _parser()
  options, rest = parse_words(parser, argv, {"model": "RUN_OR_HF_DIR", "tasks": "--tasks"})
  overrides = require_keys(parser, rest)
  if options.log_samples and options.output is None:
    raise UserError("eval: --log-samples needs --output\n  fix: --output FILE.json; the samples are written next to it")
  from maxtext_like import evaluate
  from maxtext_like.cli.forward import print_clamped

  with Counted() as count:
    found = evaluate(
      options.model,
      options.tasks,
      *overrides,
      include_path=options.include_path,
      num_fewshot=options.num_fewshot,
      limit=options.limit,
      batch_size=options.batch_size,
      max_length=options.max_length,
      max_gen_toks=options.max_gen_toks,
      gen_kwargs=options.gen_kwargs,
      apply_chat_template=options.apply_chat_template,
      fewshot_as_multiturn=options.fewshot_as_multiturn,
      system_instruction=options.system_instruction,
      bootstrap_iters=options.bootstrap_iters,
      seed=options.seed,
      log_samples=options.log_samples,
      confirm_run_unsafe_code=options.confirm_run_unsafe_code,
      adapters=options.adapters,
      on_batch=count,
      on_note=lambda note: print_notes([note], file=sys.stderr),
    )
  print(found)
  print_clamped(found.clamped)
  if options.output is not None:
    for path in found.write(Path(options.output)):
      print(path, file=sys.stderr)
  return 0


def _parser() -> argparse.ArgumentParser:
  usage = "RUN_OR_HF_DIR --tasks TASKS [options] [key=value ...]"
  parser = verb_parser("eval", usage, DESCRIPTION, EPILOG)
  add_model(parser)
  add = parser.add_argument
  add("--tasks", metavar="TASKS", help="tasks, separated by commas")
  add("--include-path", type=existing_path, metavar="DIR", action="append", default=[],
      help="folder with more task files; may be repeated")  # fmt: skip
  add("--num-fewshot", type=int, metavar="N", help="examples in a prompt (the number that each task sets)")
  add("--limit", type=float, metavar="N", help="documents of each task, or a fraction below 1 (all)")
  add("--batch-size", type=int, metavar="N", help="rows of a batch (as many as fit into 8192 tokens)")
  add("--max-length", type=int, metavar="N", help="longest input in tokens; longer ones lose their first tokens "
      "(the model's longest sequence)")  # fmt: skip
  add("--max-gen-toks", type=int, default=256, metavar="N", help="length of an answer, for tasks that do not set it (256)")
  add("--gen-kwargs", type=gen_kwargs, metavar="KEY=VALUE,...",
      help="replaces generation_kwargs of tasks, such as temperature=0.7,do_sample=true")  # fmt: skip
  add("--apply-chat-template", action="store_true",
      help="render prompts as conversations with the model's chat template; chat_template=FILE names another one")  # fmt: skip
  add("--fewshot-as-multiturn", action=argparse.BooleanOptionalAction,
      help="examples are turns of the conversation (with --apply-chat-template)")  # fmt: skip
  add("--system-instruction", metavar="TEXT", help="text before the prompt; with a chat template the system message")
  add("--bootstrap-iters", type=int, default=100_000, metavar="N",
      help="samples for standard errors without a formula; 0: no standard errors (100000)")  # fmt: skip
  add("--seed", type=int, metavar="N", help="seed of few-shot examples and of sampling (the harness' own)")
  add_adapters(parser)
  add("--output", type=new_file, metavar="FILE.json", help="write the results as the harness does")
  add("--log-samples", action="store_true", help="write FILE.samples.TASK.jsonl: each document with prompt and answer")
  add("--confirm-run-unsafe-code", action="store_true", help="allow tasks that run code that the model writes")
  return parser


def gen_kwargs(text: str) -> dict[str, Any]:
  """argparse type of ``key=value,...``. A value is JSON, or else a text."""
  found = {}
  for part in text.split(","):
    key, equals, value = part.partition("=")
    if not equals or not key.strip():
      raise argparse.ArgumentTypeError(f"{part!r} is not key=value")
    try:
      found[key.strip()] = json.loads(value)
    except ValueError:
      found[key.strip()] = value
  return found
