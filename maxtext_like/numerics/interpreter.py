r"""X-ray's interpreter: evaluates a jaxpr like the original program and returns statistics as extra outputs.

Everything happens during tracing; the program contains no callback. The data of a frame is:
  {"rows": int32 [sites, COLUMNS], "children": [data of each loop in the frame, in plan order]}
A scan adds its iteration as a leading axis (in the order of its xs), and a shard_map its shards. A cond is {"branch": int32,
"branches": [data]}. A while loop is {"steps": int32, "first_bad": int32 [sites...], "history": data} with its first
`while_history` iterations as a leading axis; the last entry merges all later iterations.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import core, lax

from maxtext_like.layers.partition import vary
from maxtext_like.numerics import jaxprs, tensor_statistics
from maxtext_like.numerics.plan import Body, Frame, Node, XrayPlan

_NEVER = np.iinfo(np.int32).max
_HISTORY_BYTES = 4 << 20


class Interpreter:
  """Runs a plan. `while_history` is the number of iterations of a while loop whose statistics are kept separately."""

  def __init__(self, plan: XrayPlan, while_history: int):
    self.plan, self.while_history = plan, while_history

  def program(self, args: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return the outputs of the planned program, and its data (see the module)."""
    frame = self.plan.frame
    assert frame.body is not None
    rows: list[Any] = [None] * len(frame.sites)
    inputs = [*zip(self.plan.inputs, args, strict=True), *zip(self.plan.consts, frame.body.consts, strict=True)]
    for site, value in inputs:
      if site is not None:
        rows[site.row] = tensor_statistics.row(jnp.asarray(value), full=site.full, flag=site.flag)
    return self.frame(frame, args, (), rows)

  def frame(self, frame: Frame, args: Sequence[Any], axes: tuple[str, ...], rows: list[Any] | None = None):
    """Return the outputs and data of one frame. `axes` are the manual mesh axes of the surrounding shard_maps."""
    rows = [None] * len(frame.sites) if rows is None else rows
    children: list[Any] = [None] * len(frame.children)
    assert frame.body is not None
    outs = self.run_body(frame.body, args, axes, rows, children)
    return outs, {"rows": vary(tensor_statistics.stack(rows), axes), "children": children}

  def run_body(self, body: Body, args, axes, rows, children) -> list[Any]:
    env: dict[Any, Any] = {}
    last: dict[Any, int] = {}
    for i, node in enumerate(body.nodes):
      last |= {v: i for v in node.eqn.invars if not jaxprs.is_literal(v)}
    env.update(zip(body.jaxpr.constvars, body.consts, strict=True))
    env.update(zip(body.jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if jaxprs.is_literal(atom) else env[atom]
    keep = {v for v in body.jaxpr.outvars if not jaxprs.is_literal(v)}
    for i, node in enumerate(body.nodes):
      operands = [read(v) for v in node.eqn.invars]
      outs = getattr(self, "run_" + node.kind)(node, operands, axes, rows, children)
      env.update(zip(node.eqn.outvars, outs, strict=True))
      for v in {v for v in node.eqn.invars if not jaxprs.is_literal(v)}:
        if last[v] == i and v not in keep:
          del env[v]  # frees the tracer, so that large programs can be traced in less memory
    return [read(v) for v in body.jaxpr.outvars]

  def run_leaf(self, node: Node, operands, axes, rows, children):
    outs = jaxprs.bind(node.eqn, operands)
    for site, out in zip(node.sites, outs, strict=False):
      if site is not None and site.measured:
        wide = _widened(node, operands) if site.wide else None
        rows[site.row] = tensor_statistics.row(out, full=site.full, wide=wide, flag=site.flag)
    if node.tag is not None:
      by_row = node.tag.rows > 0
      rows[node.tag.row] = tensor_statistics.rows_of(outs[0]) if by_row else tensor_statistics.row(outs[0])
    return outs

  def run_call(self, node: Node, operands, axes, rows, children):
    assert node.body is not None
    eqn = node.eqn
    if jaxprs.is_remat(eqn):
      hidden = jaxprs.remat_barrier(eqn)
      behind = iter(lax.optimization_barrier([x for x, h in zip(operands, hidden, strict=True) if h]))
      operands = [next(behind) if h else x for x, h in zip(operands, hidden, strict=True)]
    operands = _constrain(operands, eqn.params.get("in_shardings"))
    outs = self.run_body(node.body, operands, axes, rows, children)
    return _constrain(outs, eqn.params.get("out_shardings"))

  def run_scan(self, node: Node, operands, axes, rows, children):
    params = node.eqn.params
    n_consts, n_carry = jaxprs.scan_counts(node.eqn)
    consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]

    def body(carry, x):
      outs, data = self.frame(node.frames[0], [*consts, *carry, *x], axes)
      return outs[:n_carry], (outs[n_carry:], data)

    options = {k: params[k] for k in ("length", "reverse", "unroll")}
    carry, (ys, children[node.child]) = lax.scan(body, list(carry), list(xs), **options)
    return [*carry, *ys]

  def run_cond(self, node: Node, operands, axes, rows, children):
    index, *args = operands
    shapes = [jax.eval_shape(lambda *a, f=f: self.frame(f, a, axes)[1], *args) for f in node.frames]

    def branch(i):
      def run(*args):
        outs, data = self.frame(node.frames[i], args, axes)
        return outs, [data if i == j else _blank(shape, axes) for j, shape in enumerate(shapes)]

      return run

    outs, data = lax.switch(index, [branch(i) for i in range(len(node.frames))], *args)
    branch_taken = jnp.clip(jnp.asarray(index, jnp.int32), 0, len(node.frames) - 1)
    children[node.child] = {"branch": vary(branch_taken, axes), "branches": data}
    return outs

  def run_while(self, node: Node, operands, axes, rows, children):
    params = node.eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts = operands[:n_cond], operands[n_cond : n_cond + n_body]
    start = operands[n_cond + n_body :]
    condition, condition_consts = jaxprs.open_jaxpr(params["cond_jaxpr"])
    body = lambda carry: self.frame(node.frames[0], [*body_consts, *carry], axes)
    shape = jax.eval_shape(lambda *c: body(list(c))[1], *start)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shape))
    slots = max(2, min(self.while_history, _HISTORY_BYTES // max(size, 1)))
    history = jax.tree.map(lambda leaf: vary(jnp.broadcast_to(leaf, (slots, *leaf.shape)), axes), _blank(shape, axes))
    first_bad = jax.tree.map(lambda leaf: vary(jnp.full(leaf.shape[:-1], _NEVER, jnp.int32), axes), _rows_of(shape))
    step = vary(jnp.int32(0), axes)

    def go_on(state):
      return core.eval_jaxpr(condition, condition_consts, *cond_consts, *state[0])[0]

    def turn(state):
      carry, step, first, history = state
      carry, data = body(list(carry))
      first = jax.tree.map(lambda f, r: jnp.where(_bad(r), jnp.minimum(f, step), f), first, _rows_of(data))
      slot = jnp.minimum(step, slots - 1)
      seen = jax.tree.map(lambda h: lax.dynamic_index_in_dim(h, slot, keepdims=False), history)
      merged = _merge(seen, data)
      history = jax.tree.map(lambda h, m: lax.dynamic_update_index_in_dim(h, m, slot, 0), history, merged)
      return carry, step + 1, first, history

    carry, steps, first, history = lax.while_loop(go_on, turn, (list(start), step, first_bad, history))
    children[node.child] = {"steps": steps, "first_bad": first, "history": history}
    return carry

  def run_shard_map(self, node: Node, operands, axes, rows, children):
    params = node.eqn.params
    mesh = params["mesh"]
    manual = tuple(a for a in mesh.axis_names if a in params["newly_manual_axes"])
    inner = (*axes, *manual)

    def body(*args):
      outs, data = self.frame(node.frames[0], args, inner if params["check_vma"] else ())
      return outs, jax.tree.map(lambda leaf: leaf[None], data)

    mapped = jax.shard_map(
      body,
      mesh=mesh,
      in_specs=tuple(params["in_specs"]),
      out_specs=(list(params["out_specs"]), jax.P(manual)),
      axis_names=set(manual),
      check_vma=params["check_vma"],
    )
    outs, children[node.child] = mapped(*operands)
    return outs


def _widened(node: Node, operands):
  """Evaluate an equation in float32 on its rounded operands, which gives the result without the narrow range."""
  wide = [x.astype(jnp.float32) if jaxprs.is_float(jax.typeof(x)) else x for x in map(jnp.asarray, operands)]
  if node.eqn.primitive.name == "convert_element_type":
    return wide[0].astype(jnp.float32)
  return node.eqn.primitive.bind(*wide, **node.eqn.params)


def _constrain(values, shardings):
  """Apply the shardings that an inner jit requested for its operands and results, although it is inlined."""
  if shardings is None:
    return values
  fixed = lambda x, s: lax.with_sharding_constraint(x, s) if isinstance(s, jax.sharding.NamedSharding) else x
  return [fixed(x, s) for x, s in zip(values, shardings, strict=True)]


def _map(on_rows, on_other, *trees):
  """Map over data, with separate functions for rows and for counters and branches."""

  def leaf(path, *leaves):
    is_rows = isinstance(path[-1], jax.tree_util.DictKey) and path[-1].key == "rows"
    return on_rows(*leaves) if is_rows else on_other(*leaves)

  return jax.tree_util.tree_map_with_path(leaf, *trees)


def _blank(shape, axes):
  """Return the data of a frame that has not run."""
  blank = _map(lambda s: jnp.broadcast_to(tensor_statistics.neutral(), s.shape), lambda s: jnp.zeros(s.shape, s.dtype), shape)
  return jax.tree.map(lambda x: vary(x, axes), blank)


def _rows_of(data) -> list[Any]:
  """Return the arrays of rows in data, in a fixed order; the first is that of the frame itself."""
  found: list[Any] = [data["rows"]]
  _map(lambda r: found.append(r), lambda _: None, data["children"])
  return found


def _bad(rows):
  return (rows[..., tensor_statistics.NAN] != 0) | (rows[..., tensor_statistics.INF] != 0)


def _merge(old, new):
  """Merge the data of an earlier and a later run of the same frame: rows are merged, counters and branches are those of the
  later run."""
  return _map(tensor_statistics.merge, lambda _, b: b, old, new)
