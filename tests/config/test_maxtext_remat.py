"""MaxText's settings for what is kept and where, translated to our keys. Settings without a counterpart are refused."""

import pytest

from maxtext_like.config.load import load_config
from maxtext_like.config.maxtext_remat import TENSORS
from maxtext_like.errors import UserError

CUSTOM = "remat_policy=custom"


@pytest.mark.parametrize(
  ("words", "policy", "offload"),
  [
    (["remat_policy=minimal_offloaded"], "minimal", "kept"),
    ([CUSTOM], "full", "none"),
    ([CUSTOM, "decoder_layer_input=offload"], "full", "layer_inputs"),
    ([CUSTOM, "decoder_layer_input=device", "context=device", "mlpwo=remat"], "save_attention", "none"),
    ([CUSTOM, "out_proj=offload", "mlpwo=offload"], "save_outputs", "kept"),
    ([CUSTOM, "decoder_layer_input=offload", "out_proj=device", "mlpwo=device", "mlpwi=device"], "save_mlp", "layer_inputs"),
    ([CUSTOM, "decoder_layer_input=offload", *(f"{t}=offload" for t in ("out_proj", "mlpwo", "mlpwi_0", "mlpwi_1"))],
     "save_mlp", "all"),
    (["remat_policy=minimal"], "minimal", "none"),
  ],
)  # fmt: skip
def test_what_comes_to_the_same_is_translated(words, policy, offload):
  loaded = load_config("gemma3-tiny", words)
  assert (loaded.config.training.remat_policy, loaded.config.training.remat_offload) == (policy, offload)
  if words != ["remat_policy=minimal"]:
    assert any(f"remat_policy={policy} remat_offload={offload}" in note for note in loaded.notes)


def test_a_file_of_maxtexts_may_have_them_too(tmp_path):
  path = tmp_path / "mine.yml"
  path.write_text("remat_policy: 'custom'\ndecoder_layer_input: 'offload'\nquery_proj: 'remat'\n")
  training = load_config("gemma3-tiny", [str(path)]).config.training
  assert (training.remat_policy, training.remat_offload) == ("full", "layer_inputs")


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["decoder_layer_input=offload"], "remat_offload=layer_inputs"),
    (["remat_policy=full", "mlpwo=device"], "only with remat_policy: custom"),
    ([CUSTOM, "decoder_layer_input=remat"], "write device or offload"),
    ([CUSTOM, "query_proj=offload"], "custom with query_proj: offload"),
    ([CUSTOM, "out_proj=offload", "mlpwo=device"], "remat_policy: custom with mlpwo: device, out_proj: offload"),
    ([CUSTOM, "context=host"], "'host' is not one of device, offload, remat"),
    (["remat_policy=qkv_proj_offloaded"], "remat_policy=minimal"),
  ],
)
def test_the_rest_is_refused(words, said):
  with pytest.raises(UserError) as refused:
    load_config("gemma3-tiny", words)
  assert said in str(refused.value)


def test_without_custom_defaults_are_noted():
  words = [f"{name}={'device' if name == 'decoder_layer_input' else 'remat'}" for name in TENSORS]
  notes = [note for note in load_config("gemma3-tiny", words).notes if "has no effect without remat_policy=custom" in note]
  assert len(notes) == len(TENSORS)


@pytest.mark.parametrize(
  ("words", "said"),
  [
    (["remat_policy=none", "remat_offload=layer_inputs"], "remat_offload = layer_inputs with remat_policy: none"),
    (["remat_policy=full", "remat_offload=all"], "remat_offload = all with remat_policy: full"),
  ],
)
def test_offload_of_what_no_policy_keeps_is_refused(words, said):
  with pytest.raises(UserError, match=said):
    load_config("gemma3-tiny", words)
