"""Draws docs/explanation/structure.svg from the imports: ``python docs/explanation/structure.py``."""

import ast
import html
import sys
import textwrap
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.test_imports import ORDER, PACKAGE, imports, part_of, sources  # noqa: E402 (the order stands there)

PICTURE = Path(__file__).with_name("structure.svg")
WIDTH, BOX, MARGIN, GAP, LINE, PAD = 960, 660, 12, 14, 15, 8
TITLES = {"__init__": "maxtext_like", "registry": "registry.py", "layers": "layers (src/layers)"}


def read() -> tuple[dict[str, list[str]], dict[str, str], Counter[tuple[str, str]]]:
  """Of every part its modules and folders, and what it says of itself; how many imports lead from one part to another."""
  modules: dict[str, list[str]] = {}
  sayings = {"registry": "The members that there are, a line each, of:"}
  edges: Counter[tuple[str, str]] = Counter()
  for path in sources():
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    module = ".".join(("maxtext_like", *inside))
    part, tree = part_of(module), ast.parse(path.read_text(encoding="utf-8"))
    own = modules.setdefault(part, [])
    if part == "registry":
      own.append("/".join(inside[:-1]))
    elif inside in ((part, "__init__"), ("models", part), ("__init__",)):
      sayings[part] = (ast.get_docstring(tree) or "").split("\n")[0]
    elif len(inside) == 2:
      own.append(inside[1])
    elif len(inside) > 2 and (folder := f"{inside[1]}/") not in own:
      own.append(folder)
    for _, name in imports(tree, module):
      if (other := part_of(name)) != part and part != "registry":  # which names others in types alone
        edges[part, other] += 1
  return modules, sayings, edges


def draw() -> str:
  """The picture: a box for each part, above what it imports; a thicker arc is more imports. Returns SVG."""
  modules, sayings, edges = read()
  rows = [name for names in reversed(ORDER[1:-1]) for name in names]
  boxes, shapes, y = {}, [], MARGIN
  for name in [*rows, ""]:
    lines = _beneath() if not name else _text(name, modules.get(name, []), sayings.get(name, ""))
    height = 2 * PAD + LINE * len(lines) + 2
    boxes[name] = (y, height)
    shapes.append(f'<rect x="{MARGIN}" y="{y}" width="{BOX}" height="{height}" rx="6"/>')
    for n, (kind, line) in enumerate(lines):
      at = y + PAD + LINE * (n + 1) - 3
      shapes.append(f'<text class="{kind}" x="{MARGIN + PAD}" y="{at}">{html.escape(line)}</text>')
    y += height + GAP
  drawn = {edge: count for edge, count in edges.items() if edge[0] in boxes and edge[1] in boxes}
  style = (
    "svg{background:#fff}rect{fill:#f6f8fa;stroke:#57606a}path{fill:none;stroke:#0969da;stroke-opacity:.5}"
    "text{font:12px sans-serif;fill:#57606a}.title{font:bold 14px sans-serif;fill:#1f2328}.names{font:11px monospace}"
    "circle{fill:#0969da}"
  )
  head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}">'
  return "\n".join([head, f"<style>{style}</style>", *shapes, *_arcs(drawn, boxes, rows), "</svg>\n"])


def _text(name: str, modules: list[str], said: str) -> list[tuple[str, str]]:
  """(style, line) of one box."""
  lines = [("title", TITLES.get(name, name))]
  lines += [("said", line) for line in textwrap.wrap(said.replace("``", ""), int(BOX / 6.7))]
  return lines + [("names", line) for line in textwrap.wrap("  ".join(sorted(modules)), BOX // 7)]


def _beneath() -> list[tuple[str, str]]:
  return _text("beneath all", [name for name in ORDER[0] if name != "__version__"], "what every part may import")


def _arcs(edges: dict[tuple[str, str], int], boxes: dict[str, tuple[int, int]], rows: list[str]) -> list[str]:
  """One for each part that imports another: out of the lower half of a box's right side, into the upper half of one below."""
  leave = {name: sorted((e for e in edges if e[0] == name), key=lambda e: -rows.index(e[1])) for name in rows}
  reach = {name: sorted((e for e in edges if e[1] == name), key=lambda e: -rows.index(e[0])) for name in rows}

  def height(name: str, edge: tuple[str, str], order: list[tuple[str, str]], half: int) -> float:
    top, size = boxes[name]
    return top + size * (half + (order.index(edge) + 1) / (len(order) + 1)) / 2

  lines = []
  for edge, count in sorted(edges.items()):
    above, below = edge
    y1, y2 = height(above, edge, leave[above], 1), height(below, edge, reach[below], 0)
    x = MARGIN + BOX
    out = x + 24 + 1.25 * (WIDTH - x - 40) * (rows.index(below) - rows.index(above)) / len(rows)
    title = html.escape(f"{above} imports {below}")
    path = f"M{x} {y1:.1f} C{out:.1f} {y1:.1f} {out:.1f} {y2:.1f} {x} {y2:.1f}"
    lines.append(f'<path stroke-width="{1.2 if count < 10 else 2.6}" d="{path}"><title>{title}</title></path>')
    lines.append(f'<circle cx="{x}" cy="{y2:.1f}" r="2.5"/>')
  return lines


if __name__ == "__main__":
  PICTURE.write_text(draw(), encoding="utf-8")
  print(PICTURE)
