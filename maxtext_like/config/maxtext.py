"""Translates keys and values of MaxText, in model files and as single words. Open this file to add a translation.

``maxtext_file.py`` reads complete model files of MaxText. Keys of MaxText without an equivalent are in ``foreign_names.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from maxtext_like.config import foreign_names, former_names, maxtext_remat
from maxtext_like.config.choices import OF_FILES, OPTIMIZERS
from maxtext_like.config.coerce import CoercionError, coerce
from maxtext_like.config.families import FAMILIES
from maxtext_like.config.maxtext_family import Meaning, entry_of, same_number
from maxtext_like.config.problems import Problem, alternatives
from maxtext_like.config.schema import LEAVES
from maxtext_like.config.yaml_file import Entry, Node, Scalar, Sequence, to_text

RENAMED = {
  "base_emb_dim": "emb_dim",
  "base_mlp_dim": "mlp_dim",
  "base_moe_mlp_dim": "moe_mlp_dim",
  "base_num_decoder_layers": "num_decoder_layers",
  "base_num_query_heads": "num_query_heads",
  "base_num_kv_heads": "num_kv_heads",
  "ple_pad_token_id": "pad_token_id",
  "base_output_directory": "output_dir",
  "checkpoint_period": "checkpoint_interval",
  "max_num_checkpoints_to_keep": "max_to_keep",
  "load_parameters_path": "init_from",
  "tokenizer_path": "tokenizer",
  "dataset_type": "dataset",
  "enable_data_shuffling": "shuffle",
  "init_weights_seed": "seed",
  "cosine_learning_rate_final_fraction": "learning_rate_final_fraction",
  "learning_rate_schedule_steps": "lr_schedule_steps",
  "jax_cache_dir": "compilation_cache_dir",
  "image_placeholder_token_id": "image_token_id",
}
"""Keys of MaxText that have another name and the same meaning here."""

_AXES = "data fsdp fsdp_transpose sequence context context_autoregressive tensor tensor_sequence pipeline expert autoregressive"
_AXES_OF_ONE = {f"{network}_{axis}_parallelism" for network in ("ici", "dcn") for axis in _AXES.split()} - set(LEAVES)

_FIXED: dict[str, tuple[object, ...]] = {
  "enable_dropout": (False,),
  "dropout_rate": (0.0,),
  "rope_attention_scaling": (False,),
  "mlp_activations_limit": (-1.0,),
  "global_parameter_scale": (1,),
  "capacity_factor": (-1.0,),
  "use_random_routing": (False,),
  "mtp_num_layers": (0,),
  "quantization": ("",),
  "wsd_decay_style": ("linear",),
  "adam_eps_root": (0.0,),
  "add_bos": (True,),
  "add_eos": (True,),
  **dict.fromkeys(sorted(_AXES_OF_ONE), (1,)),
}


def _fixed() -> dict[str, dict[tuple[str, ...], tuple[object, ...]]]:
  """Return the fixed values of every key; families with equal values are grouped."""
  found: dict[str, dict[tuple[str, ...], tuple[object, ...]]] = {}
  for name, family in FAMILIES.items():
    for key, values in {**family.maxtext.fixed, **_FIXED}.items():
      by_families = found.setdefault(key, {})
      same = next((families for families, others in by_families.items() if others == values), ())
      by_families.pop(same, None)
      by_families[(*same, name)] = values
  return found


FIXED = _fixed()
"""Keys whose value these families fix, or mesh axes that do not exist here: accepted only with that value."""

_LAYOUT = "the mesh and the table sharding_rules determine how arrays are sharded; results do not depend on it"
WITHOUT_EFFECT = {
  "conv_stride_for_vit": "the stride between patches is the patch size",
  "ple_pad_substitute_image_rows": "the per-layer embedding always uses the padding token for tokens of an image",
  "ple_pad_mode": "the per-layer embedding always uses the padding token for tokens of an image",
  "mesh_axes": "the mesh has the axes data, fsdp, expert, context and tensor, each with a size: ici_tensor_parallelism, ...",
  "logical_axis_rules": _LAYOUT,
  "override_logical_axis_rules": _LAYOUT,
  "data_sharding": _LAYOUT,
  "shard_mode": _LAYOUT,
  "remove_size_one_mesh_axis_from_type": _LAYOUT,
  "use_batch_split_schedule": "it overlaps communication of expert parallelism with computation; results do not depend on it",
  "override_model_config": "a value on the command line always overrides the model file's",
  "log_period": "metrics.jsonl and TensorBoard have every step; log_interval is for printed lines",
}
"""Keys without effect here, each with the reason. They are accepted, and the run prints a note."""

PROFILER = ("profiler", "profiler_steps", "skip_first_n_steps_for_profiler")
"""Keys that ``profile_steps`` replaces."""

CONVERTED = ("mlp_activations", "global_rope_max_timescale", *PROFILER, *maxtext_remat.TENSORS)
"""Keys whose value has another form here."""

KNOWN = frozenset((*RENAMED, *FIXED, *WITHOUT_EFFECT, *CONVERTED, *former_names.RENAMED))


_FILES = Meaning(refused=f"write dataset=jsonl ({', '.join(OF_FILES)}) dataset_path=FILES, because texts come from local files")
_KEPT = Meaning(
  refused="write remat_policy=minimal (products are kept), save_mlp (o, gate, up and down), save_outputs (o and down), "
  "save_attention, full (nothing is kept) or none; remat_offload=layer_inputs, kept or all keeps activations in host memory"
)
_MANY = "minimal_with_context save_dot_with_context_except_mlp save_dot_except_mlpwi save_dot_except_mlp"

VALUES: dict[str, Mapping[str, Meaning]] = {
  "decoder_block": {block: Meaning(name) for name, family in FAMILIES.items() for block in family.maxtext.decoder_blocks},
  "attention": {
    "autoselected": Meaning("auto"),
    "flash": Meaning("auto", note="the fastest fused kernel for the device, mask and precision; splash on TPU"),
    "cudnn_flash_te": Meaning("cudnn_flash"),
    "cudnn_flash_jax": Meaning("cudnn_flash"),
  },
  "opt_type": {
    "adam_pax": Meaning("adamw", note="the same equation, but norms, scalars and biases have no weight decay"),
    "muon": Meaning(refused=f"write opt_type={alternatives(OPTIMIZERS)}"),
  },
  "remat_policy": dict.fromkeys([*_MANY.split(), "save_qkv_proj", "qkv_proj_offloaded", "save_out_proj"], _KEPT),
  "matmul_precision": {"bfloat16": Meaning("default"), "float32": Meaning("highest")},
  "dataset": dict.fromkeys(("hf", "grain", "tfds", "c4_mlperf", "olmo_grain"), _FILES),
  "eval_interval": {"-1": Meaning(0)},
  "eval_steps": {"-1": Meaning(refused="write the number of batches of an evaluation, as in eval_steps=10")},
  "max_to_keep": {"None": Meaning(refused="write the number of newest checkpoints to keep, as in max_to_keep=3")},
  "lr_schedule_steps": {"-1": Meaning(None)},
  "attn_logits_soft_cap": {"0": Meaning(None)},
  "final_logits_soft_cap": {"0": Meaning(None)},
  **{key: meanings for family in FAMILIES.values() for key, meanings in family.maxtext.values.items()},
}
"""Values of MaxText that are not values here, by our key name. They are translated wherever they occur."""


def present(key: str) -> str:
  """Return the present name here of a key that may have MaxText's name or a former one."""
  return former_names.RENAMED.get(key) or RENAMED.get(key, key)


def translate_keys(entries: list[Entry], family: str) -> tuple[list[Entry], list[str], list[Problem]]:
  """Translate keys and values of MaxText. Keys of this project are returned unchanged.

  Args:
    entries: keys of a file or of the command line.
    family: ``decoder_block`` of the model.

  Returns:
    The translated entries, notes on keys without effect or with another meaning, and problems.
  """
  done: list[Entry] = []
  notes: list[str] = []
  problems: list[Problem] = []
  ignored = FAMILIES[family].maxtext.ignored if family in FAMILIES else {}
  together: list[Entry] = []
  for keys, meant in ((PROFILER, _profiler), (maxtext_remat.KEYS, maxtext_remat.translated)):
    try:
      together += meant({entry.key: entry for entry in entries if entry.key in keys}, notes)
    except CoercionError as error:
      problems.append(Problem(str(error), fix=error.fix))
  for entry in (*together, *(e for e in entries if e.key not in (*PROFILER, *maxtext_remat.KEYS))):
    if entry.key in WITHOUT_EFFECT:
      notes.append(f"{entry.origin}: {entry.key} has no effect: {WITHOUT_EFFECT[entry.key]}")
    elif entry.key in ignored:
      notes.append(f"{entry.origin}: {entry.key} has no effect: {ignored[entry.key]}")
    elif entry.key in FIXED:
      problems += _check_fixed(entry, family)
    else:
      if entry.key in former_names.RENAMED:
        notes.append(f"{entry.origin}: {former_names.note(entry.key)}")
      ours = Entry(present(entry.key), entry.node, entry.origin)
      if ours.key == "layer_precision":
        ours = _present_in_layers(ours, notes)
      if isinstance(ours.node, Scalar) and (now := former_names.RENAMED_VALUES.get(ours.key, {}).get(ours.node.text)):
        notes.append(f"{ours.origin}: {former_names.note_of_value(ours.key, ours.node.text)}")
        ours = Entry(ours.key, replace(ours.node, text=now), ours.origin)
      try:
        converted = convert(ours) if (convert := _CONVERTERS.get(ours.key)) else _by_value(ours, notes)
        done.append(converted)
      except CoercionError as error:
        problems.append(Problem(f"{entry.origin}: {entry.key}: {error}", fix=error.fix))
  return done, notes, problems


def _profiler(found: dict[str, Entry], notes: list[str]) -> list[Entry]:
  """Return ``profile_steps`` for MaxText's keys, which trace a number of steps after a number of skipped ones."""
  numbers = {"skip_first_n_steps_for_profiler": 1, "profiler_steps": 5}  # MaxText's own defaults
  for key in numbers.keys() & found.keys():
    try:
      numbers[key] = int(str(coerce(found[key].node, int)))
    except CoercionError as error:
      raise CoercionError(f"{found[key].origin}: {key}: {error}", fix=error.fix) from error
  kind = coerce(found["profiler"].node, str) if "profiler" in found else ""
  if kind == "xplane":
    skipped, count = numbers.values()
    steps = f"{skipped + 1}-{skipped + max(count, 1)}"
    notes.append(f"{found['profiler'].origin}: profiler is translated to profile_steps={steps}")
    source = found["profiler"]
    return [Entry("profile_steps", Scalar(steps, plain=True, line=source.node.line), source.origin)]
  if kind != "":
    where = found["profiler"].origin
    raise CoercionError(
      f"{where}: profiler: {kind!r} is not supported",
      fix="write profile_steps=10-12 (JAX's profiler), or run the command under nsys",
    )
  notes += [
    f"{entry.origin}: {key} has no effect without profiler=xplane; the key here is profile_steps"
    for key, entry in found.items()
  ]
  return []


def _present_in_layers(entry: Entry, notes: list[str]) -> Entry:
  """Return ``layer_precision`` with the present names of keys, and add a note for each former name in it."""

  def renamed(node: Node) -> Node:
    return replace(node, text=former_names.in_words(node.text)) if isinstance(node, Scalar) else node

  node = entry.node
  node = replace(node, items=tuple(map(renamed, node.items))) if isinstance(node, Sequence) else renamed(node)
  if node != entry.node:
    words = {word.partition("=")[0] for word in to_text(entry.node).replace(",", " ").split()}
    notes += [f"{entry.origin}: {former_names.note(former)}" for former in former_names.RENAMED if former in words]
  return Entry(entry.key, node, entry.origin)


def _by_value(entry: Entry, notes: list[str]) -> Entry:
  """Return the entry with its value translated by ``VALUES``; numbers are compared by value."""
  if not isinstance(entry.node, Scalar):
    return entry
  text, meanings = entry.node.text, VALUES.get(entry.key, {})
  for theirs, meaning in meanings.items():
    if text != theirs and not (entry.node.plain and same_number(text, theirs)):
      continue
    if meaning.refused:
      raise CoercionError(f"{text!r} is a value that only MaxText has", fix=meaning.refused)
    made = entry_of(entry.key, meaning.value, entry)
    if meaning.note:
      notes.append(f"{entry.origin}: {entry.key} is translated to {meaning.value}: {meaning.note}")
    return made
  return entry


def _check_fixed(entry: Entry, family: str) -> list[Problem]:
  for families, values in FIXED[entry.key].items():
    if family not in families:
      continue
    for value in values:
      kind = type(value)
      try:
        if coerce(entry.node, kind) == value:
          return []
      except CoercionError:
        continue
    if (foreign := foreign_names.find(entry.key)) is not None:
      what = f"{entry.origin}: {entry.key} = {_shown(entry)} is not supported: {foreign.says}"
      return [Problem(what, fix=foreign.fix("VALUE"))]
    return [
      Problem(
        f"{entry.origin}: {entry.key} = {_shown(entry)} is not supported in decoder_block {family}",
        fix=f"write {entry.key}: {' or '.join(to_text(v) for v in values)}, which this family always uses, or leave it out",
      )
    ]
  what = f"{entry.origin}: {entry.key} is not supported in decoder_block {family or '(not set)'}"
  return [Problem(what, fix="leave the key out, or set decoder_block to a family that has it")]


def _shown(entry: Entry) -> str:
  return repr(entry.node.text) if isinstance(entry.node, Scalar) else "(a list or mapping)"


def _activation(entry: Entry) -> Entry:
  names = coerce(entry.node, tuple[str, ...]) if isinstance(entry.node, Sequence) else ()
  if not (isinstance(names, tuple) and len(names) == 2 and names[1] == "linear" and names[0] in ("gelu", "silu")):
    raise CoercionError("only a gated MLP is supported", fix="write [gelu, linear] or [silu, linear]")
  return entry_of("mlp_activation", names[0], entry)


def _whole_rows(entry: Entry) -> Entry:
  """Convert ``per_device_batch_size``, a float in MaxText, to an int if it is a whole number."""
  text = entry.node.text.replace("_", "") if isinstance(entry.node, Scalar) and entry.node.plain else ""
  if not same_number(text, text) or "." not in text or not float(text).is_integer():
    return entry
  return entry_of(entry.key, int(float(text)), entry)


_CONVERTERS: dict[str, Callable[[Entry], Entry]] = {
  "mlp_activations": _activation,
  "global_rope_max_timescale": lambda e: Entry("rope_max_timescale", e.node, e.origin),
  "per_device_batch_size": _whole_rows,
}


assert not KNOWN & set(LEAVES), "a key of MaxText has the same name as a key of this project"
