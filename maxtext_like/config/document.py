"""What each key means, read from ``configs/base.yml``: for ``--help-keys`` and for docs/reference/configuration.md.

``python -m maxtext_like.config.document`` writes the page anew, and before it the precision keys of ``configs/base.yml`` from
``precision_keys.py``; a test compares both.
"""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from maxtext_like.config import maxtext, maxtext_remat
from maxtext_like.config.coerce import describe
from maxtext_like.config.files import configs_folder
from maxtext_like.config.key_class import KeyClass, marks
from maxtext_like.config.load import base_values
from maxtext_like.config.precision_keys import KEYS, section_text
from maxtext_like.config.schema import FAMILIES_OF_KEY, LEAVES, SECTIONS
from maxtext_like.config.yaml_file import to_text
from maxtext_like.errors import UserError
from maxtext_like.models.registry import FAMILIES

_LINE = re.compile(r"  (\w+): .*?\S  # (.+)")


@dataclass(frozen=True)
class Key:
  """One key as a person meets it: its section, type and default in words, and its meaning."""

  section: str
  name: str
  kind: str
  default: str
  meaning: str


@functools.cache
def keys() -> tuple[Key, ...]:
  """Every key, in the order of ``configs/base.yml``.

  Raises:
    UserError: a key has no comment there, and so no meaning.
  """
  path = configs_folder() / "base.yml"
  lines = path.read_text("utf-8").splitlines()
  meanings = {m[1]: m[2] for line in lines if (m := _LINE.fullmatch(line))}
  if missing := [leaf for leaf in LEAVES if leaf not in meanings]:
    raise UserError(f"{path}: no comment at {', '.join(missing)}")
  defaults = base_values()
  made = []
  for leaf in (name for name in meanings if name in LEAVES):
    section, kind = LEAVES[leaf]
    unset = defaults[leaf] is None and "null" not in describe(kind).split(" or ")
    default = "set by the model" if unset else to_text(defaults[leaf])
    made.append(Key(section, leaf, describe(kind), default, meanings[leaf]))
  return tuple(made)


def page() -> str:
  """docs/reference/configuration.md."""
  lines = [
    "# Configuration keys",
    "",
    "Made by `python -m maxtext_like.config.document` from the schema and `configs/base.yml`; do not edit.",
    "",
    "A run is described by `configs/base.yml`, over it a model file, over that overlays, over that `key=value` on the command",
    "line. An overlay is a further YAML file with some keys: your own settings, or those of a machine (gpu/h200x8.yml). Where",
    "two set the same key, the later wins.",
    "",
    "    maxtext-like train gemma3-4b gpu/h200x8.yml mine.yml run_name=first",
    "",
    "`maxtext-like config MODEL [overlay.yml ...] [key=value ...]` prints the result with the place of every value.",
    "",
    "- On the command line a key may carry its section: `steps=20` and `training.steps=20` are the same.",
    "- A whole number is written without a point (`5`, not `5.0` or `5e0`), underscores are fine: `262_144`.",
    "- A bool is `true` or `false`. `null` stands where the type says so. Lists are `[a, b]`.",
    "- A file is plain YAML: no tags, anchors, merge keys, second document or duplicate key.",
    "- An unknown key, a key of another family and a precision flag that would do nothing are errors.",
    "- A key that another value leaves without an effect is accepted. The start of the run prints a note with the reason:",
    '  `argument "adam_b2=0.9": adam_b2 has no effect: opt_type is sgd`.',
  ]
  for section in SECTIONS:
    lines += ["", f"## {section}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [
      f"| `{k.name}` | {_cell(k.kind)} | {_cell(f'`{k.default}`' if k.default != 'set by the model' else k.default)} "
      f"| {_cell(k.meaning)} |"
      for k in keys()
      if k.section == section
    ]
  return "\n".join([*lines, *_class_page(), *_precision_page(), *_family_page(), *_maxtext_page()]) + "\n"


def _class_page() -> list[str]:
  """The classes that keys declare (``key_class``): the changes between a checkpoint and a run that are accepted."""
  lines = [
    "",
    "## What may change after a checkpoint",
    "",
    "Each key belongs to one class. It decides whether a run that resumes, or that starts with `init_from`, may have another",
    "value than the checkpoint. The same holds for keys that generate and forward take. A key that has no effect on the model,",
    "as `rope_factor` without yarn, is not compared. [guides/resume.md](../guides/resume.md) has examples.",
    "",
    "| class | what it decides | keys |",
    "|---|---|---|",
  ]
  found: dict[KeyClass, dict[str, None]] = {kind: {} for kind in KeyClass}
  for section, cls in SECTIONS.items():
    own = {"model": [f.config for f in FAMILIES.values()], "vision": [f.vision for f in FAMILIES.values() if f.vision]}
    declared = {key: m.kind for each in own.get(section, [cls]) for key, m in marks(each).items() if m.declared}
    for key in keys():
      if key.section == section and key.name in declared:
        found[declared[key.name]][f"`{key.name}`"] = None
  for kind, names in found.items():
    more = ", and every key that is not in this table" if kind is KeyClass.TRAINING else ""
    lines.append(f"| {kind.value} | {kind.rule} | {', '.join(names)}{more} |")
  return lines


def _precision_page() -> list[str]:
  lines = [
    "",
    "## What precision keys act on",
    "",
    "Safer is the value that is tried against numbers that are not finite, or not exact enough. Places are the named scopes of",
    "the layers, as x-ray and audit show them; without any it acts on the whole step.",
    "",
    "| key | safer | places | in some models only | layer by layer |",
    "|---|---|---|---|---|",
  ]
  for key in KEYS.values():
    places = ", ".join(f"`{scope}`" for scope in dict.fromkeys((*key.scopes, *key.widens)))
    part = "" if key.part is None else key.part.name
    lines.append(f"| `{key.name}` | `{to_text(key.safer)}` | {places} | {part} | {'yes' if key.per_layer else ''} |")
  return lines


def _family_page() -> list[str]:
  lines = ["", "## Keys of some families only", "", "In another family they must keep their default.", ""]
  lines += ["| families | keys |", "|---|---|"]
  by_families: dict[tuple[str, ...], list[str]] = {}
  for key, families in FAMILIES_OF_KEY.items():
    by_families.setdefault(families, []).append(f"`{key}`")
  return lines + [f"| {', '.join(families)} | {', '.join(names)} |" for families, names in by_families.items()]


def _maxtext_page() -> list[str]:
  lines = [
    "",
    "## MaxText's names",
    "",
    "A model file of MaxText for these families loads as it is and means what MaxText does with it: its vocabulary of",
    "262144 for Gemma 3 (the released models have 262208), no routing groups for DeepSeek unless it sets them, rotary",
    "magnitudes equal. What MaxText decides by the model's name (the layer pattern of E2B, the score scale of Gemma 3",
    "27B) or by the family (tokens of an image see each other both ways) holds here too. How a model is trained is not",
    "the file's: there the defaults above hold, and what differs from MaxText's is listed when the file is used.",
    "",
    "MaxText's commands work: `train model_name=gemma3-4b steps=20` and `train configs/base.yml model_name=gemma3-4b`",
    "take this project's file of that name. MaxText's own base.yml is not read.",
    "",
    "| MaxText | here |",
    "|---|---|",
    *(f"| `{theirs}` | `{ours}` |" for theirs, ours in maxtext.RENAMED.items()),
    "| `mlp_activations: [gelu, linear]` | `mlp_activation: gelu` |",
    "| `profiler: xplane`, `profiler_steps: 5`, `skip_first_n_steps_for_profiler: 1` | `profile_steps: 2-6` |",
    "| `global_rope_max_timescale` | `rope_max_timescale` |",
    *_remat_rows(),
    *_value_rows(),
    "| `per_device_batch_size: 1.0` | `1` |",
    "| `lr_schedule_steps` | beyond its end MaxText's rate is 0, here the last one |",
    "| `num_experts: 1` in a model file | `0` |",
    "| `mscale` in a model file | `mscale` and `mscale_all_dim` |",
    "| `shared_experts: 1` of Gemma 4 | the dense MLP beside the experts, always there |",
    "",
    "Accepted with the one value that these families (or this version's machines) have:",
    "",
    "| key | value |",
    "|---|---|",
  ]
  lines += _grouped(
    (key, ", ".join(f"{' or '.join(f'`{to_text(v)}`' for v in values)} ({', '.join(of)})" for of, values in by_family.items()))
    for key, by_family in maxtext.FIXED.items()
  )
  lines += ["", "Accepted and noted, without effect:", "", "| key | why |", "|---|---|"]
  lines += _grouped(maxtext.WITHOUT_EFFECT.items())
  return lines + [f"| `{key}` ({name}) | {why} |" for name, f in FAMILIES.items() for key, why in f.maxtext.ignored.items()]


def _remat_rows() -> list[str]:
  others = ", ".join(f"`{name}`" for name in maxtext_remat.TENSORS if name != maxtext_remat.INPUT)
  kept = [f"{' and '.join(f'`{t}`' for t in sorted(ts))} are `{policy}`" for ts, policy in maxtext_remat.POLICIES.items() if ts]
  return [
    f"| `remat_policy: {maxtext_remat.OFFLOADED}` | `remat_policy: minimal`, `remat_offload: kept` |",
    f"| `remat_policy: custom`, `{maxtext_remat.INPUT}: offload` | `remat_policy: full`, `remat_offload: layer_inputs` |",
    f"| {others} | with `remat_policy: custom`: {'; '.join(kept)}; `offload` is "
    "`remat_offload: kept`, with the input's `all`; others are refused |",
  ]


def _value_rows() -> list[str]:
  rows = []
  for key, meanings in maxtext.VALUES.items():
    for theirs, meaning in meanings.items():
      here = f"refused: {meaning.refused}" if meaning.refused else f"`{to_text(meaning.value)}`"
      rows.append((f"{key}: {theirs}", f"{here}; {meaning.note}" if meaning.note else here))
  return _grouped(rows)


def _grouped(pairs: Iterable[tuple[str, str]]) -> list[str]:
  """Rows of a table, those with the same right side as one."""
  rows: dict[str, list[str]] = {}
  for left, right in pairs:
    rows.setdefault(right, []).append(f"`{left}`")
  return [f"| {', '.join(lefts)} | {right} |" for right, lefts in rows.items()]


def _cell(text: str) -> str:
  return text.replace("|", "\\|")


def base_text() -> str:
  """``configs/base.yml`` with the lines of the precision keys as the registry has them."""
  before, header, rest = (configs_folder() / "base.yml").read_text("utf-8").partition("\nprecision:\n")
  kept = [line for line in rest.split("\n\n")[0].splitlines() if line.strip().partition(":")[0] not in KEYS]
  _, gap, after = rest.partition("\n\n")
  return before + header + "\n".join([*section_text(), *kept]) + gap + after


def page_path() -> Path:
  """docs/reference/configuration.md of the checkout that this package runs from."""
  return configs_folder().parent / "docs" / "reference" / "configuration.md"


if __name__ == "__main__":
  (configs_folder() / "base.yml").write_text(base_text(), encoding="utf-8")
  page_path().write_text(page(), encoding="utf-8")
