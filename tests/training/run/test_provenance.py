"""env.json records everything that may change a run, without secrets."""

import json
import sys

from maxtext_like.training.run import provenance
from maxtext_like.training.run.provenance import describe

SECRETS = """
  NVIDIA_API_KEY NGC_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN HUGGINGFACE_API_KEY WANDB_API_KEY AWS_SECRET_ACCESS_KEY
  AWS_ACCESS_KEY_ID AWS_SESSION_TOKEN GOOGLE_API_KEY GOOGLE_APPLICATION_CREDENTIALS_JSON GEMINI_API_KEY OPENAI_API_KEY
  ANTHROPIC_API_KEY AZURE_CLIENT_SECRET AZURE_STORAGE_KEY GITHUB_TOKEN GH_TOKEN GITLAB_TOKEN CI_JOB_TOKEN NEPTUNE_API_TOKEN
  COMET_API_KEY CLEARML_API_SECRET_KEY MLFLOW_TRACKING_PASSWORD KAGGLE_KEY REPLICATE_API_TOKEN SLACK_BOT_TOKEN DATABASE_URL
  PGPASSWORD NPM_TOKEN TWINE_PASSWORD JUPYTER_TOKEN
  JAX_SECRET_TOKEN JAX_API_KEY XLA_AUTH XLA_CLIENT_SECRET MAXTEXT_LIKE_TOKEN MAXTEXT_LIKE_PASSWORD CUDA_VISIBLE_DEVICES_KEY
  LIBTPU_TOKEN TF_CPP_SECRET NVIDIA_TOKEN OMP_NUM_THREADS_PASSWORD
""".split()


def test_no_secret_is_kept(monkeypatch):
  for i, name in enumerate(SECRETS):
    monkeypatch.setenv(name, f"hunter{i}")
  # Variables that are recorded, with secrets inside their values.
  monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "https://me:hunter@host/cache?token=hunter")
  monkeypatch.setenv("LIBTPU_INIT_ARGS", "--a=b --auth_token=hunter --c=hf_hunterhunterhunter")
  monkeypatch.setenv("JAX_ENABLE_X64", "0")
  monkeypatch.setattr(sys, "argv", ["train.py", "a", "--api-key", "hunter", "dataset_path=s3://id:hunter@bucket/x"])
  found = describe()
  assert "hunter" not in json.dumps(found)
  assert found["variables"]["JAX_COMPILATION_CACHE_DIR"] == "https://***@host/cache?token=***"
  assert found["variables"]["LIBTPU_INIT_ARGS"] == "--a=b --auth_token=*** --c=***"
  assert found["variables"]["JAX_ENABLE_X64"] == "0"
  assert found["command"] == ["train.py", "a", "--api-key", "***", "dataset_path=s3://***@bucket/x"]


def test_a_link_that_leads_nowhere_is_no_code(tmp_path, monkeypatch):
  """A dangling link does not change the fingerprint of the code. Editors such as Emacs lock a file with such a link."""
  (tmp_path / "training").mkdir()
  (tmp_path / "a.py").write_text("a = 1\n")
  monkeypatch.setattr(provenance, "__file__", str(tmp_path / "training" / "run" / "provenance.py"))
  code = provenance.same_everywhere()
  (tmp_path / ".#a.py").symlink_to("me@here.123")
  assert provenance.same_everywhere() == code
