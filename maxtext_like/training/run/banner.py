"""The banner: lines that describe a run before its first step, and a few that summarize its data."""

import re
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp

from maxtext_like.capacity import memory, memory_limits
from maxtext_like.checkpoint.huggingface.peft_targets import find_targets
from maxtext_like.config.data_keys import DataConfig
from maxtext_like.config.load import base_values
from maxtext_like.config.schema import Config
from maxtext_like.data.loader import DataSource
from maxtext_like.layers.param import count
from maxtext_like.models import float8_products
from maxtext_like.models.adapter import Adapter
from maxtext_like.models.naming import ADAPTER
from maxtext_like.sharding.mesh import in_words
from maxtext_like.training.optimizers.schedule import make_schedule
from maxtext_like.training.step.idle_losses import idle_losses
from maxtext_like.training.step.program import TrainProgram


def banner(program: TrainProgram, run: str, need: memory.MemoryEstimate, limit: memory_limits.Limit | None) -> str:
  """Return the lines about model, devices, batch and directory, with notes about the schedule and kernels if needed.

  Args:
    program: program of the run.
    run: its directory, as it is printed.
    need: estimate of the memory per device.
    limit: available memory per device; None if unknown.
  """
  # Sizes, devices and dtypes.
  t, p = program.config.training, program.config.precision
  total, trained = program.size, count(program.selection.split(program.spec)[0])
  some = f", {trained:,} trained" if trained != total else ""
  mesh = program.model.mesh
  shape = f" ({in_words(mesh.shape)})" if mesh.size > 1 else ""
  devices = f"{mesh.size} x {program.model.devices[0].device_kind}{shape}"
  available = f" of {limit.bytes / memory.GB:.1f} GB" if limit else ""
  kind = f"{p.dtype}, weights {p.weight_dtype}, {t.module_api}"
  other = "" if t.objective == base_values()["objective"] else f", {t.objective}"
  lines = [
    f"model   {program.config.model.model_name}: {total:,} parameters{some}, {kind}",
    f"device  {devices}, about {need.total / memory.GB:.2f} GB{available} on each",
    f"batch   {program.global_batch} x {t.max_target_length} tokens of {program.config.data.dataset}, {t.opt_type}{other}",
    f"run     {run}",
  ]
  # Properties that a user may not expect.
  if t.lr_schedule_steps is not None and t.lr_schedule_steps < t.last_step:
    rate = float(make_schedule(t)(jnp.asarray(t.lr_schedule_steps)))
    lines.append(f"note    the schedule ends after step {t.lr_schedule_steps}; after it the learning rate stays {rate:.3g}")
  idle = idle_losses(program)
  lines += [f"note    {key} = {getattr(program.config.model, key):g} has no effect: {why}" for key, why in idle.items()]
  if balanced := load_balance(program, idle="load_balance_loss_weight" in idle):
    lines.append(f"note    {balanced}")
  if (copied := program.model.copied_heads) is not None:
    lines.append(f"note    {copied}")
  if program.adapter is not None:
    lines.append(f"adapter {described(program.adapter)}")
    # Printed before training, because the adapter may be meant for peft.
    if refusal := find_targets(program.adapter, program.model.decoder, program.config.model.decoder_block).refusal:
      lines.append(f"note    export --adapter will refuse this run: {refusal}; export --merge writes its weights")
  # Parts that are trained or stored differently.
  if "vision" in program.model.spec:
    lines.append(f"vision  {tower_described(program)}")
  if (base := program.model.base) is not None:
    names = sorted({".".join(path[2:] or path) for path in base.weights})  # without stack and layer
    lines.append(f"base    {base.form.name}: {', '.join(names)}; the rest {p.weight_dtype}")
  # Kernels that were chosen.
  if any(use.is_notable for use in program.model.kernels):
    lines += [f"kernel  {use}" for use in program.model.kernels]
  if (grouped := program.model.grouped_product) is not None:
    lines.append(f"kernel  {grouped}")
  if program.model.norms:
    lines.append(f"kernel  {program.model.norms}")
  if low := float8_products.describe(program.model.decoder):
    lines.append(f"kernel  {low}")
  return "\n".join(lines)


def load_balance(program: TrainProgram, *, idle: bool = False) -> str | None:
  """Describe the load-balancing loss of the routers and its cost; None if they have none.

  Args:
    program: program of the run.
    idle: the loss has no effect, so only its cost is described, if there is one.
  """
  losses, _ = program.model.decoder.router_losses
  if not losses.weight:
    return None
  parts = program.config.training.gradient_accumulation_steps
  # The definition may need the load of all microbatches, which is known only after a forward pass over each of them.
  passes = (
    f"; each step needs one more forward pass over its {parts} microbatches to compute the load of the complete batch "
    "(load_balance_loss=maxtext and deepseek_sequence need none)"
  )
  passes = passes if parts > 1 and losses.needs_batch_load else ""
  if idle:
    return f"load_balance_loss={losses.definition} has a cost without an effect{passes}" if passes else None
  return f"load_balance_loss={losses.definition} with load_balance_loss_weight={losses.weight:g}{passes}"


def passes(program: TrainProgram, data: DataSource, begun: int) -> str:
  """Describe the steps of a run configured by epochs. ``begun``: finished steps, which may have had other batch sizes."""
  t, documents = program.config.training, sum(data.documents.values())
  steps = f"{t.last_step:,} steps, {t.last_step - begun:,} more of" if begun else f"{t.last_step:,} steps of"
  return f"epochs  {t.epochs} of {documents:,} documents: {data.rows:,} rows, {steps} {program.global_batch:,}"


def described(adapter: Adapter) -> str:
  """Describe an adapter: kind, rank, scale, dropout, and the adapted arrays with their numbers of layers."""
  # Count the layers of each adapted weight.
  layers: dict[str, set[str]] = {}
  for name in adapter.names:
    number, weight = re.fullmatch(r"(?:layers\.(\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
    layers.setdefault(weight, set()).add(number or "")
  counts = ", ".join(f"{weight} {len(found)}" for weight, found in sorted(layers.items()))
  places = {number for found in layers.values() for number in found if number}
  # Ranks and scales may differ between weights and layers.
  sizes = [(rank, scale) for own in adapter.sizes.values() for rank, scale in zip(*own, strict=True)]
  rank, scale = (_range(values) for values in zip(*sizes, strict=True))
  kind = f"{'DoRA' if adapter.dora else 'LoRA'} of rank {rank} times {scale}"
  kind += f", dropout {adapter.dropout:g}," if adapter.dropout else ""
  # Arrays that are trained completely instead of by factors.
  tables = sorted(".".join(path) for path in adapter.whole if path[0] != "vision")
  beside = f"; {' and '.join(tables)} trained completely" if tables else ""
  return f"{kind} on {len(adapter.names)} arrays of {len(places)} layers: {counts}{beside}"


def _range(values: Iterable[float]) -> str:
  """Format one number, or the smallest and largest of several."""
  found = sorted(set(values))
  return f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"


def tower_described(program: TrainProgram) -> str:
  """Describe which parts of the vision tower are trained, with numbers of parameters."""
  # Count the trained and all parameters of the tower.
  declared = program.model.decoder.params()["vision"]
  trained = program.selection.split(program.spec)[0]
  beside = (
    {}
    if program.adapter is None
    else {path: p for path, p in program.adapter.whole.items() if p.trainable and path[0] == "vision"}
  )
  own, whole = (
    count(trained["vision"]) + count(list(beside.values())),
    count([p for p in jax.tree.leaves(declared) if p.trainable]),
  )
  # Completely trained, frozen, or some parts trained.
  if own in (0, whole):
    text = f"{'trained' if own else 'frozen'}: {whole:,} parameters"
  else:
    parts = [name for name, part in trained["vision"].items() if jax.tree.leaves(part)]
    parts += sorted({path[1] for path in beside})
    text = f"{own:,} of {whole:,} parameters trained: {', '.join(parts)}"
  # An adapter on the tower adds its own parameters.
  if program.adapter is not None and (names := sorted(n for n in program.adapter.names if n.startswith("vision."))):
    short = [name.removeprefix("vision.").removeprefix("layers.") for name in names]
    layers = program.config.vision.num_hidden_layers_for_vit
    text += f"; adapted with {count(trained[ADAPTER]['vision']):,} more in {layers} layers: {', '.join(short)}"
  return text


def shares(trained: Mapping[str, int], evaluated: Mapping[str, int], settings: DataConfig) -> str:
  """Describe how many documents of each source are for training and evaluation, and how sources are mixed."""
  whence = "from eval_path" if settings.eval_path else f"held out by eval_fraction={settings.eval_fraction:g}"
  lines = []
  # A mixture: one line per source.
  if weights := settings.dataset_weights:
    for name, count in trained.items():
      lines.append(f"data    {name}: {weights[name] / sum(weights.values()):.4g} of the tokens, {count:,} training documents")
      if name in evaluated:
        lines[-1] += f", {evaluated[name]:,} evaluation documents ({whence})"
    lines += [
      f"data    {name or 'eval_path'}: {count:,} evaluation documents"
      for name, count in evaluated.items()
      if name not in trained
    ]
    return "\n".join(lines)
  # A single source: one line.
  total = sum(trained.values())
  if not evaluated:
    share = settings.eval_fraction
    hint = f" (set eval_interval to hold out {100 * share:g} %)" if share else ""
    return f"data    {total:,} training documents, no evaluation set{hint}"
  return f"data    {total:,} training documents, {sum(evaluated.values()):,} evaluation documents ({whence})"


def cut_conversations(counts: Mapping[str, int], config: Config) -> str | None:
  """Return a line about conversations that were cut or left out of the rows read so far; None if there were none."""
  # Reasons, in the order in which they are printed.
  losses = {
    "truncated": f"cut at max_target_length={config.training.max_target_length}",
    "cut_at_image": f"cut because they have more images than max_images_per_row={config.vision.max_images_per_row}",
    "unlearned": "left out because they have no tokens to train on",
    "excluded": "left out because their records exclude them from training",
  }
  told = ", ".join(f"{counts[name]:,} {what}" for name, what in losses.items() if counts.get(name))
  return f"data    of {counts['documents']:,} conversations read: {told}" if told else None


def never_evaluated(config: Config) -> str | None:
  """Return a line if evaluations are configured but the run ends before the first one, otherwise None."""
  every, last = config.data.eval_interval, config.training.last_step
  if not every or last >= every:
    return None
  best = ", so no best checkpoint is kept" if config.checkpoint.keep_best else ""
  return f"note    the run ends at step {last}, before the first evaluation at step {every}{best} (eval_interval={every})"
