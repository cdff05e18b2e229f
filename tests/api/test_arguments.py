"""Wrong arguments from Python are errors with a remedy. ``risk`` reads exported and imported checkpoints."""

from typing import Any

import jax.numpy as jnp
import pytest

import maxtext_like
from maxtext_like.errors import UserError

TINY: Any = {"num_decoder_layers": 1, "emb_dim": 32, "mlp_dim": 48, "max_target_length": 32, "per_device_batch_size": 1}
HEADS: Any = {"head_dim": 8, "query_heads": 2, "kv_heads": 1, "length": 32}


@pytest.fixture(scope="module")
def run_and_lines(tmp_path_factory):
  lines: list[str] = []
  keys = {"output_dir": tmp_path_factory.mktemp("runs"), "run_name": "a", "progress": lines.append}
  return maxtext_like.train("qwen3-tiny", steps=1, dataset="synthetic", **keys, **TINY), lines


@pytest.fixture
def run(run_and_lines):
  return run_and_lines[0]


@pytest.mark.slow
def test_progress_is_told_line_by_line(run_and_lines):
  lines = run_and_lines[1]
  assert lines
  assert not any("\n" in line for line in lines)


def test_what_is_no_prompt_is_told(run):
  model = run.load(tokenizer="bytes")
  wrong: Any
  for wrong in ([], [5, 6], 5):
    with pytest.raises(UserError, match=r"neither texts nor Prompts\n  fix: "):
      model.generate(wrong)
  with pytest.raises(UserError, match="stop token 'hen'"):
    model.generate("The", stop="hen")
  answers = model.generate(["a", "b"], max_tokens=1)
  with pytest.raises(ValueError, match="there are 2"):
    _ = answers.text


def test_a_run_on_fewer_ids_than_its_tokenizer_has_is_a_model_of_ids(tmp_path):
  few = maxtext_like.train("qwen3-tiny", steps=1, dataset="synthetic", vocab_size=128, output_dir=tmp_path, **TINY)
  model = few.load()
  assert model.logits([[5, 6, 7]]).shape == (1, 3, 128)
  with pytest.raises(UserError, match="has 259 token ids, more than model"):
    model.generate("The")
  with pytest.raises(UserError, match="tokenizer 'bytes' has 259 token ids"):
    few.load(tokenizer="bytes")


@pytest.mark.parametrize("tokens", [[5, 6], [[1.0]], [[]], [[512]], [[-1]]])
def test_what_are_no_tokens_is_told(run, tokens):
  with pytest.raises(UserError, match="tokens: "):
    run.load().logits(tokens)


def test_a_checkpoint_that_is_not_there_is_told_before_its_tokenizer_is_missed(tmp_path, caplog):
  with pytest.raises(UserError, match=r"checkpoint: .* does not exist\n  fix: "):
    maxtext_like.xray_step("qwen3-tiny", checkpoint=tmp_path / "none")
  assert not caplog.records


def test_a_model_shows_in_a_line_what_it_is(run):
  assert repr(maxtext_like.load_config("qwen3-tiny")).startswith("Loaded(qwen3-tiny, float32, of ")
  assert repr(run.load()) == f"Pretrained(qwen3-tiny, float32, of {run.directory})"


def test_a_checkpoint_goes_out_and_in_again_and_risk_reads_it(run, tmp_path):
  with pytest.raises(UserError, match=r"dtype 'fp16'\n  fix: pass one of bfloat16, float16, float32"):
    maxtext_like.export_checkpoint(run.directory, tmp_path / "out", dtype="fp16")  # pyright: ignore[reportArgumentType]
  maxtext_like.export_checkpoint(run.directory, tmp_path / "out", dtype="float32")
  maxtext_like.import_checkpoint(tmp_path / "out", tmp_path / "in")
  known = maxtext_like.risk(run.directory, dtype="float16")
  found = maxtext_like.risk(tmp_path / "in", dtype="float16")
  assert found.table(0) == known.table(0)
  wrong: Any
  for wrong in ([[1, 2]], {"input_ids": [[1, 2], [3]]}):
    with pytest.raises(UserError, match=r"not a dict of arrays: .*\n  fix: "):
      maxtext_like.forward(tmp_path / "out", wrong)


def test_a_model_of_the_hub_that_is_not_here_is_told_how_to_get():
  for call in (maxtext_like.risk, maxtext_like.load, lambda name: maxtext_like.import_checkpoint(name, "there")):
    with pytest.raises(UserError, match="hf download some/model"):
      call("some/model")


def test_a_configuration_is_no_checkpoint():
  for call in (maxtext_like.load, maxtext_like.risk, lambda name: maxtext_like.bisect(checkpoint=name)):
    with pytest.raises(UserError, match=r"qwen3-tiny: this is the name of a configuration, which has no weights\n  fix: "):
      call("qwen3-tiny")


@pytest.mark.slow
def test_a_run_goes_on_with_more_tokens(run, tmp_path, caplog):
  more = maxtext_like.load_config(run.directory).config.model.vocab_size + 3
  keys = {"vocab_size": more, "dataset": "synthetic", "output_dir": tmp_path, **TINY}
  for steps in (1, 2):  # the second call resumes the run
    grown = maxtext_like.train("qwen3-tiny", init_from=run.directory, steps=steps, **keys)
  assert "rows are added to embedding.table" in caplog.text
  assert grown.load().logits([[more - 1]]).shape == (1, 1, more)


def test_a_run_alone_is_the_model_and_the_first_weights_of_another_run(run):
  for directory in (run.directory, run.directory / "checkpoints", run.checkpoint):
    loaded = maxtext_like.load_config(directory, steps=7)
    assert loaded.config.model == maxtext_like.load_config(run.directory / "config.yml").config.model
    assert (loaded.config.checkpoint.init_from, loaded.config.training.steps) == (str(directory), 7)
    assert loaded.config.logging.run_name == "a-tuned"
    (note,) = [note for note in loaded.notes if "To resume" in note]
    assert "the run a-tuned begins with the weights of step" in note
    assert note.endswith(f"maxtext-like train {run.directory}/config.yml")
  assert maxtext_like.load_config(run.directory, run_name="b").config.logging.run_name == "b"
  assert maxtext_like.load_config(run.directory / "config.yml").config.model.model_name == "qwen3-tiny"


def test_what_is_no_number_or_function_is_told():
  call: Any
  for call, said in (
    (lambda: maxtext_like.risk("there", tokens="500"), "risk: tokens='500': not a whole number"),  # pyright: ignore[reportArgumentType]
    (lambda: maxtext_like.bisect("qwen3-tiny", tolerance="1"), "bisect: tolerance='1': not a number"),  # pyright: ignore[reportArgumentType]
    (lambda: maxtext_like.kernel_self_test(None, dtype="float32", **HEADS), "attention=None: not a function"),  # pyright: ignore[reportArgumentType]
    (
      lambda: maxtext_like.kernel_self_test(print, dtype="float32", **HEADS | {"length": "8"}),
      "length='8': not a whole number",
    ),
  ):
    with pytest.raises(UserError, match=said):
      call()


@pytest.mark.parametrize("tolerance", [0.0, -1.0, float("nan")])
def test_a_tolerance_is_above_zero(tolerance):
  with pytest.raises(UserError, match="not a relative error above 0"):
    maxtext_like.bisect("qwen3-tiny", tolerance=tolerance)


@pytest.mark.parametrize("wrong", [{"dtype": "fp16"}, {"dtype": jnp.int32}, {"query_heads": 3, "kv_heads": 2}, {"length": 0}])
def test_a_kernel_test_of_what_cannot_be(wrong):
  with pytest.raises(UserError, match=r"kernel_self_test: .*\n  fix: "):
    maxtext_like.kernel_self_test(lambda q, k, v, tokens, *, window, scale: q, **{"dtype": jnp.float32, **HEADS, **wrong})


def test_a_run_stands_for_its_directory(run, tmp_path):
  assert maxtext_like.load(run).directory == run.directory
  assert maxtext_like.risk(run, dtype="float16").risks
  exported = maxtext_like.export_checkpoint(run, tmp_path / "qwen-of-mine", dtype=jnp.bfloat16, shard_size=10**9)  # pyright: ignore[reportArgumentType]
  assert maxtext_like.load_config("qwen3-tiny", init_from=exported).config.checkpoint.init_from == str(exported.directory)
  imported = maxtext_like.import_checkpoint(exported, tmp_path / "in")
  # model_type names only the family, so the directory's name is the model's name.
  assert maxtext_like.load(imported).config.model.model_name == "qwen-of-mine"
  assert maxtext_like.load_config(imported.directory / "model.yml").config.model.model_name == "qwen-of-mine"
  with pytest.raises(UserError, match=r"has neither tokenizer.json .*\n  fix: tokenizer="):
    maxtext_like.generate(exported, "a")
  told = maxtext_like.generate(exported, "a", max_tokens=2, temperature=0, tokenizer="bytes", dtype="float32")
  assert len(told.answers[0].tokens) == 2
  wrong: Any
  for wrong in (None, 5, maxtext_like.load(imported)):
    for call in (maxtext_like.load, maxtext_like.risk, maxtext_like.replay):
      with pytest.raises(UserError, match=r"names no directory\n  fix: pass a path"):
        call(wrong)


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"stop_ids": [99999]}, "stop_ids: 99999: the vocabulary has ids 0 to 511"),
    ({"stop_ids": ["</s>"]}, "stop_ids: '</s>': the vocabulary"),
    ({"stop_ids": 512}, "stop_ids: 512: the vocabulary"),
    ({"max_tokens": "5"}, "max_tokens='5': not a whole number"),
    ({"max_tokens": 2.5}, "max_tokens=2.5: not a whole number"),
    ({"temperature": "hot"}, "temperature='hot': not a number"),
    ({"on_text": True}, "on_text=True: not a function"),
    ({"temprature": 0}, "generate: unknown argument 'temprature', did you mean 'temperature'"),
    ({"max_token": 5}, "unknown argument 'max_token', did you mean 'max_tokens'"),
    ({"dtype": "bfloat16"}, "dtype=bfloat16: dtype cannot be changed after the model is loaded\n  fix: pass it when"),
  ],
)
def test_options_of_generate(run, options, said):
  with pytest.raises(UserError, match=said):
    run.load(tokenizer="bytes").generate("a", **options)


def test_the_keywords_of_a_function_are_near_too():
  call: Any
  for call, keys, said in (
    (maxtext_like.audit, {"platfrom": "tpu"}, "audit: unknown argument 'platfrom', did you mean 'platform'"),
    (maxtext_like.xray_step, {"checkpoints": "a"}, "xray_step: unknown argument 'checkpoints', did you mean 'checkpoint'"),
    (maxtext_like.bisect, {"tolerence": 1}, "bisect: unknown argument 'tolerence', did you mean 'tolerance'"),
    (maxtext_like.train, {"progess": print}, "train: unknown argument 'progess', did you mean 'progress'"),
    (maxtext_like.train, {"stpes": 2}, "argument \"stpes=2\": unknown key 'stpes', did you mean 'steps'"),
  ):
    with pytest.raises(UserError, match=said):
      call("qwen3-tiny", **keys)


def test_what_takes_no_lines_is_told():
  call: Any
  for call in (maxtext_like.train, maxtext_like.bisect):
    with pytest.raises(UserError, match=r"progress=True cannot receive lines\n  fix: pass a function that takes a line"):
      call("qwen3-tiny", progress=True)


@pytest.mark.parametrize("wrong", [{"steps": 2}, ["steps=2"], 5])
def test_what_is_no_override_is_told(wrong: Any):
  with pytest.raises(UserError, match=r"neither a text nor a path\n  fix: pass steps=20"):
    maxtext_like.load_config("qwen3-tiny", wrong)


def test_a_name_that_is_not_there_is_told_with_what_was_meant():
  loaded: Any = maxtext_like.load_config("qwen3-tiny")
  for name, said in (
    ("training", r"\.config\.training$"),
    ("steps", r"\.config\.training\.steps$"),
    ("orgins", "did you mean 'origins'"),
  ):
    with pytest.raises(AttributeError, match=said):
      getattr(loaded, name)
  with pytest.raises(AttributeError, match="'lod', did you mean 'load'"):
    _ = maxtext_like.lod  # pyright: ignore[reportAttributeAccessIssue]
  assert set(dir(maxtext_like)) == {*maxtext_like.__all__, "__version__", "errors"}
  assert maxtext_like.errors.UserError is UserError  # pyright: ignore[reportAttributeAccessIssue]
