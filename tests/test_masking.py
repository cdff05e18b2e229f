"""What looks like a secret is masked; what the project itself writes is not."""

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.schema import LEAVES
from maxtext_like.masking import masked, masked_values, masked_words


@pytest.mark.parametrize(
  ("text", "expected"),
  [
    ("dataset_path=https://bob:p@ss@host/x?token=abc&y=1", "dataset_path=https://***@host/x?token=***&y=1"),
    ("postgres://u:p@h:5432/db", "postgres://***@h:5432/db"),
    ("https://h/x?X-Amz-Signature=ab12&X-Amz-Date=1", "https://h/x?X-Amz-Signature=***&X-Amz-Date=1"),
    ("https://h/x?sv=2&sig=ab%2F12&se=3", "https://h/x?sv=2&sig=***&se=3"),
    ("WANDB_API_KEY=0123 python", "WANDB_API_KEY=*** python"),
    ("password: 'hunter 2' # x", "password: *** # x"),
    ('{"secret_key": "abc", "b": 1}', '{"secret_key": ***, "b": 1}'),
    ("--xla_dump_to=/a --my_auth=b", "--xla_dump_to=/a --my_auth=***"),
    ("Authorization: Bearer abcdefghijk", "Authorization: *** ***"),
    ("x hf_abcdefghijklmnopqrst y", "x *** y"),
    ("/data/nvapi-abcdefghijklmnopqrstuv/x", "/data/***/x"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc_def", "***"),
    ("AKIAIOSFODNN7EXAMPLE", "***"),
    ("a Zm9vYmFyQmF6MTIzNDU2Nzg5MGFiY2RlZmc= b", "a *** b"),
    ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----!", "***!"),
  ],
)
def test_secrets_are_masked(text, expected):
  assert masked(text) == expected
  assert masked(expected) == expected
  assert masked_values({"a": [text, 1, None]}) == {"a": [expected, 1, None]}


@pytest.mark.parametrize(
  "text",
  [
    "gs://bucket/path@2", "git@github.com:x/y", "https://[::1]:80/x", "10.0.0.1:1234", "key: value",
    "/home/me/.cache/huggingface/hub/models--google--gemma-3-4b-it/snapshots/0123456789abcdef0123456789abcdef01234567",
    "--xla_gpu_enable_latency_hiding_scheduler=true", "sample_prompts=['def main():']", "author=me",
  ],
)  # fmt: skip
def test_what_is_none_stays(text):
  assert masked(text) == text


def test_no_key_of_the_configuration_looks_like_a_secret():
  assert [name for name in LEAVES if masked(f"{name}=1 {name}: 1") != f"{name}=1 {name}: 1"] == []
  text = load_config("gemma4-31b", []).to_yaml()
  assert masked(text) == text


def test_the_word_after_an_option_for_a_secret():
  words = ["train.py", "--token", "abc", "--hf-token", "--api-key=1", "a=b", "-p", "c"]
  assert masked_words(words) == ["train.py", "--token", "***", "--hf-token", "--api-key=***", "a=b", "-p", "c"]
