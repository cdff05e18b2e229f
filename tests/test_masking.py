"""Text that looks like a secret is masked. Ordinary text and the project's own configuration are not."""

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import to_text
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
    ("Authorization: Bearer abcdefghijk", "Authorization: ***"),
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


SECRET = "Tr0ub4dor"


@pytest.mark.parametrize(
  "text",
  [
    # Names
    *("AccountName=me;AccountKey=Tr0ub4dor==;EndpointSuffix=core.windows.net", "Server=h;Uid=me;Pwd=Tr0ub4dor;"),
    *("pwd=Tr0ub4dor", "pass=Tr0ub4dor", "db_pass: Tr0ub4dor", "MYSQL_PWD=Tr0ub4dor x", '{"pass": "Tr0ub4dor"}'),
    *("aws_secret_access_key = Tr0ub4dor", "accessToken=Tr0ub4dor", "{'authToken': 'Tr0ub4dor'}", "GITHUB_PAT=Tr0ub4dor"),
    *("password:Tr0ub4dor", '"password": "a\\"Tr0ub4dor"', "password: 'it''s Tr0ub4dor'", "password=a,Tr0ub4dor"),
    *("x-api-key: Tr0ub4dor", "Cookie: Tr0ub4dor", "export HF_TOKEN=Tr0ub4dor", "webhook_url=https://h/Tr0ub4dor"),
    *("run it with --hf-token Tr0ub4dor please", "a '--password' x --password 'b Tr0ub4dor'", "curl -u me:Tr0ub4dor https://h"),
    *("machine h login me password Tr0ub4dor", "sshpass -p Tr0ub4dor ssh h", "mysql -u me -pTr0ub4dor db"),
    *("KAGGLE_KEY=Tr0ub4dor", "openai_key: Tr0ub4dor", "secret_key_base: Tr0ub4dor"),
    *("https://outlook.office.com/webhook/Tr0ub4dor", "https://x.webhook.office.com/webhookb2/Tr0ub4dor"),
    # URLs
    *("https://u:a/Tr0ub4dor@host/x", "postgres://u:Tr0ub4dor/b#c@h:5432/d", "s3://k:Tr0ub4dor/+x@bucket/p"),
    *("https://u:p@ss/Tr0ub4dor@h.org/x", "https://u:12/Tr0ub4dor@h.org/x", "redis://:Tr0ub4dor@h:1"),
    *("https://hooks.slack.com/services/T0/B0/Tr0ub4dor", "https://discord.com/api/webhooks/1/Tr0ub4dor"),
    *("https://a.blob.core.windows.net/c?sv=1&sig=Tr0ub4dor%3D&se=2", "https://f.azurewebsites.net/api?code=Tr0ub4dor"),
    *("SharedAccessSignature=sv=1&sig=Tr0ub4dor&x=1", "https://x/y#access_token=Tr0ub4dor"),
    # Headers and formats
    *("Authorization: token Tr0ub4dor", "curl -H 'Authorization: Bearer Tr0ub4dor12'", "bearer Tr0ub4dor12"),
    *(
      "sk-ant-api03-Tr0ub4dor_Tr0ub4dor",
      "sk-proj-Tr0ub4dorTr0ub4dor",
      "xoxe.xoxp-1-Tr0ub4dorTr0ub4dor",
      "xapp-1-A0-Tr0ub4dorx",
    ),
    *("wJalrXUtnFEMI/K7MDENG/bPxRfiCTr0ub4dorKE", "-----BEGIN PGP PRIVATE KEY BLOCK-----\nTr0ub4dor"),
  ],
)
def test_a_secret_is_masked_alone_and_among_the_values_of_a_configuration(text):
  assert SECRET not in masked(text)
  assert masked(masked(text)) == masked(text)
  newline = "\n"
  loaded = load_config("gemma4-tiny", ["sample_every=1", f"sample_prompts={to_text([text.replace(newline, ' ')])}"])
  assert SECRET not in loaded.to_yaml(mask=True)
  assert SECRET in loaded.to_yaml()


def test_basic_auth_is_masked_without_its_header():
  assert masked("basic dXNlcjpUcjB1YjRkb3I=") == "basic ***"


@pytest.mark.parametrize(
  "text",
  [
    "gs://bucket/path@2", "git@github.com:x/y", "https://[::1]:80/x", "10.0.0.1:1234", "key: value",
    "/home/me/.cache/huggingface/hub/models--google--gemma-3-4b-it/snapshots/0123456789abcdef0123456789abcdef01234567",
    "--xla_gpu_enable_latency_hiding_scheduler=true", "sample_prompts=['def main():']", "author=me",
    "Explain basic arithmetic to me", "Basic Training", "bearer certificates", "https://host:8080/models@v2",
    "http://h:80/a:b@c", "PWD=/home/me", "passes=3", "compass: north", "bypass=1", "first pass: 12 s",
    "max_tokens=5", "eos_token: <eos>",
    "What is a password?", "secretary: Ann", "monkey: 3", "--tokenizer x", "-u none", "try: pass\nexcept: pass",
    "gemma3-4b-it-LoRA-r16-Seed3-Adam-1e4-Batch256-Steps10000", "ThisIsALongCamelCaseIdentifierName2", "token==1",
    "data/Models/Run1/Checkpoint/Step100/arrays0123", f"sha256:{'0123456789abcdef' * 4}",
    "f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
  ],
)  # fmt: skip
def test_what_is_none_stays(text):
  assert masked(text) == text


def test_no_key_of_the_configuration_looks_like_a_secret():
  assert [name for name in LEAVES if masked(f"{name}=1 {name}: 1") != f"{name}=1 {name}: 1"] == []
  text = load_config("gemma4-31b", []).to_yaml()
  assert load_config("gemma4-31b", []).to_yaml(mask=True) == text


def test_values_under_a_secret_name_are_masked():
  assert masked_values({"api_key": "x", "a": {"token": 1, "pad_token": "<pad>"}}) == {
    "api_key": "***",
    "a": {"token": "***", "pad_token": "<pad>"},
  }


def test_the_word_after_an_option_for_a_secret():
  words = ["train.py", "--token", "abc", "--hf-token", "--api-key=1", "a=b", "-p", "c"]
  assert masked_words(words) == ["train.py", "--token", "***", "--hf-token", "--api-key=***", "a=b", "-p", "c"]
