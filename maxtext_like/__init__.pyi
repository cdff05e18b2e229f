# Generated from maxtext_like/verbs.py by python -m maxtext_like.config.document; do not edit.
from maxtext_like import errors as errors
from maxtext_like.api.audit import audit as audit
from maxtext_like.api.bisect import bisect as bisect
from maxtext_like.api.compile import compile_step as compile_step
from maxtext_like.api.config import load_config as load_config
from maxtext_like.api.data import look_at_data as look_at_data
from maxtext_like.api.eval import evaluate as evaluate
from maxtext_like.api.export import export_adapter as export_adapter
from maxtext_like.api.export import export_checkpoint as export_checkpoint
from maxtext_like.api.forward import forward as forward
from maxtext_like.api.generate import generate as generate
from maxtext_like.api.generate_file import generate_file as generate_file
from maxtext_like.api.import_ import import_checkpoint as import_checkpoint
from maxtext_like.api.kernel_selfcheck import kernel_self_test as kernel_self_test
from maxtext_like.api.keys import list_keys as list_keys
from maxtext_like.api.models import list_models as list_models
from maxtext_like.api.perplexity import perplexity as perplexity
from maxtext_like.api.plan import plan as plan
from maxtext_like.api.pretrained import load as load
from maxtext_like.api.replay import replay as replay
from maxtext_like.api.risk import initial_risk as initial_risk
from maxtext_like.api.risk import risk as risk
from maxtext_like.api.sft import sft as sft
from maxtext_like.api.train import train as train
from maxtext_like.api.xray import xray as xray
from maxtext_like.api.xray import xray_step as xray_step
from maxtext_like.generation.prompts import Prompt as Prompt
from maxtext_like.numerics.finite_guard import FiniteGuard as FiniteGuard

__all__: list[str]
__version__: str
