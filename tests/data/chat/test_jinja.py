"""A checkpoint's own template: the assistant's answers are found in its text, and a template for anything else is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxtext_like.data import worker_process
from maxtext_like.data.chat import sandbox
from maxtext_like.data.chat.encode import ChatEncoder, answers_to_learn
from maxtext_like.data.chat.jinja import Jinja, find_template, template_beside
from maxtext_like.data.chat.records import read_conversation
from maxtext_like.data.chat.rendering import RenderError
from maxtext_like.data.tokenization.tokenizer import Tokenizer, load_tokenizer
from maxtext_like.errors import UserError

# Like Qwen3: the thoughts of the last answers, an empty thought there without thinking, none before.
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{{- '<|im_start|>' ~ m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.index0 > ns.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{% generation %}{{ m.content | trim }}{% endgeneration %}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.name + (call.function.arguments | tojson) }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
ASK, ANSWER = {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}
MORE = [{"role": "user", "content": "No"}, {"role": "assistant", "content": "Bye."}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

  vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
  library = Tokenizer(models.BPE(vocab=vocab, merges=[]))
  library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
  library.decoder = decoders.ByteLevel()  # pyright: ignore
  for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"):
    library.add_tokens([AddedToken(name, special="|" in name, normalized=False)])
  path = tmp_path_factory.mktemp("chatml") / "tokenizer.json"
  library.save(str(path))
  path.with_name("tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
  return load_tokenizer(str(path))


def learned(tokenizer: Tokenizer, *messages: dict[str, Any], source: str = CHATML) -> list[str]:
  rendered = Jinja(source, "x.jinja", tokenizer).render(read_conversation({"messages": list(messages)}, "", "/"), "training")
  runs: dict[int, str] = {}
  for piece in rendered.pieces:
    if piece.trained:
      runs[piece.answer] = runs.get(piece.answer, "") + piece.text
  return list(runs.values())


def test_what_the_assistant_says(tokenizer):
  assert learned(tokenizer, ASK, ANSWER) == ["Hi.<|im_end|>"]
  assert learned(tokenizer, ASK, ANSWER, *MORE) == ["Hi.<|im_end|>", "Bye.<|im_end|>"]
  thought = ANSWER | {"reasoning_content": "Greet."}
  assert learned(tokenizer, ASK, thought) == ["<think>\nGreet.\n</think>\n\nHi.<|im_end|>"]
  assert learned(tokenizer, ASK, ANSWER | {"weight": 0}, *MORE) == ["Bye.<|im_end|>"]
  thought |= {"content": ""}
  assert learned(tokenizer, ASK, thought, *MORE) == ["<|im_end|>", "Bye.<|im_end|>"]
  for more, expected in (((), False), (MORE, True)):
    conversation = read_conversation({"messages": [ASK, thought, *more]}, "", "/")
    assert Jinja(CHATML, "x.jinja", tokenizer).render(conversation, "training").only_ends(1) is expected
  call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"é": 1}'}}]}
  assert learned(tokenizer, ASK, call, {"role": "tool", "content": "1"}, ANSWER) == [
    '<tool_call>f{"é": 1}<|im_end|>',
    "Hi.<|im_end|>",
  ]


def test_tools_and_calls_that_a_template_drops_are_refused(tokenizer):
  call = {"role": "assistant", "content": "One moment.", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
  answered = [ASK, call, {"role": "tool", "content": "1"}, ANSWER]
  deaf = CHATML.replace("m.tool_calls or []", "[]")
  with pytest.raises(RenderError, match=r"messages\[1\] has calls of tools, which the chat template drops"):
    learned(tokenizer, *answered, source=deaf)
  assert learned(tokenizer, ASK, ANSWER, source=deaf) == ["Hi.<|im_end|>"]
  conversation = read_conversation({"messages": [ASK, ANSWER], "tools": [{"name": "f"}]}, "", "/")
  Jinja(CHATML, "x.jinja", tokenizer).render(conversation, "training")
  blind = Jinja(CHATML.replace("{%- if tools %}", "{%- if false %}"), "x.jinja", tokenizer)
  for purpose in ("training", "prompt"):
    with pytest.raises(RenderError, match="the record has tools, which the chat template drops"):
      blind.render(conversation, purpose)
  strict = CHATML + "{% if tools is none %}{{ raise_exception('tools are needed') }}{% endif %}"
  Jinja(strict, "x.jinja", tokenizer).render(conversation, "training")


def test_prompts_and_thoughts_that_are_dropped(tokenizer):
  renderer = Jinja(CHATML, "x.jinja", tokenizer)
  asked = read_conversation({"messages": [ASK], "tools": [{"name": "f"}]}, "", "/")
  assert renderer.render(asked, "prompt").text == (
    '<|im_start|>system\n{"type": "function", "function": {"name": "f"}}<|im_end|>\n'
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
  )
  thought = ANSWER | {"reasoning_content": "Greet."}
  rendered = renderer.render(read_conversation({"messages": [ASK, thought, *MORE]}, "", "/"), "training")
  assert (rendered.lost_thoughts, "Greet." in rendered.text) == (1, False)


TURNS = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}
{%- if loop.last and m.role == 'assistant' %}<|endoftext|>{% endif %}{{ '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.mark.parametrize(
  ("source", "ends"),
  [
    (TURNS, "<|im_end|><|endoftext|>"),
    # No token ends an answer inside the conversation.
    (TURNS.replace("+ '<|im_end|>'", "+ ('<|im_end|>' if m.role == 'user' else '')"), "<|endoftext|>"),
    # The names of the speakers are not tokens, as in Llama 2.
    ("{% for m in messages %}{{ (' USER ' if m.role == 'user' else ' BOT ') + m.content }}{% endfor %}"
     "{% if add_generation_prompt %} BOT {% elif messages[-1].role == 'assistant' %}<|endoftext|>{% endif %}", "<|endoftext|>"),
    # Like Phi 3: every text that does not ask for an answer ends with the token.
    (TURNS.replace("m.role == 'assistant'", "not add_generation_prompt"), "<|im_end|><|endoftext|>"),
  ],
)  # fmt: skip
def test_a_token_that_ends_the_conversation_does_not_end_its_first_answer(source, ends, tokenizer):
  """A user message is never learned: such a conversation becomes one sample for each answer."""
  conversation = read_conversation({"messages": [ASK, ANSWER, *MORE]}, "", "/")
  samples = Jinja(source, "x.jinja", tokenizer).samples(conversation, frozenset({1, 3}))
  said = ["".join(piece.text for piece in sample.pieces if piece.trained) for sample in samples]
  assert said == [f"Hi.{ends}", f"Bye.{ends}"]
  with pytest.raises(RenderError, match="cannot write every answer in a single text"):
    Jinja(source, "x.jinja", tokenizer).render(conversation, "training")


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_a_template_may_read_a_thought_from_any_of_its_fields(field, tokenizer):
  source = CHATML.replace("m.reasoning_content", f"m.{field}")
  for given in ("reasoning", "reasoning_content", "thinking"):
    assert learned(tokenizer, ASK, ANSWER | {given: "Greet."}, source=source) == ["<think>\nGreet.\n</think>\n\nHi.<|im_end|>"]


# Like Qwen3-Instruct-2507: no thoughts, every message unchanged.
PLAIN = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def encoded(tokenizer: Tokenizer, record: dict[str, Any], source: str, *, parse: bool = False, learn: Any = "assistant"):
  """Returns the learned text of each sample, and all ids."""
  renderer = Jinja(source, "x.jinja", tokenizer)
  read = read_conversation(record, "", "/")
  answers = answers_to_learn(read, learn)
  encoder = ChatEncoder(renderer, tokenizer, parse=parse)
  found = [encoder.encode(sample, answers, "") for sample in renderer.samples(read, answers)]
  return [tokenizer.decode(np.array(each.ids)[each.trained].tolist()) for each in found], [each.ids for each in found]


@pytest.mark.parametrize("content", ["<think>\nAdd.\n</think>\n\n4", "Add.</think>4", "\n<think></think>4"])
def test_a_thought_in_the_content_is_written_by_a_template_without_thoughts(content, tokenizer):
  """The ids are those that transformers makes from the rendered text."""
  messages = [ASK, {"role": "assistant", "content": content}]
  text = f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{content}<|im_end|>\n"
  _, (ids,) = encoded(tokenizer, {"messages": messages}, PLAIN)
  assert ids == tokenizer.encode_special(text)
  assert learned(tokenizer, *messages, source=PLAIN) == [f"{content}<|im_end|>"]
  field = [ASK, {"role": "assistant", "content": "4", "reasoning_content": "Add."}]
  rendered = Jinja(PLAIN, "x.jinja", tokenizer).render(read_conversation({"messages": field}, "", "/"), "training")
  assert rendered.lost == (1,)


def test_a_part_of_an_answer_that_the_template_drops_is_an_error(tokenizer):
  """Qwen3's template keeps only the text after the last </think>."""
  source = PLAIN.replace("m.content", "m.content.split('</think>')[-1]")
  for content in ("a<think>b</think>c<think>d</think>e", "<think>a</think>b</think>c"):
    with pytest.raises(RenderError, match="so the template drops or changes a part of it"):
      learned(tokenizer, ASK, {"role": "assistant", "content": content}, source=source)


HERMES = {
  "messages": [
    ASK,
    {"role": "assistant", "content": '<tool_call>\n{"name": "w"}\n</tool_call>'},
    {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"},
    {"role": "assistant", "content": "It rains. <think>"},
  ]
}


def test_special_tokens_in_an_answer_are_letters_or_tokens(tokenizer):
  text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in HERMES["messages"])
  said, (ids,) = encoded(tokenizer, HERMES, PLAIN, parse=True)
  assert ids == tokenizer.encode_special(text)
  assert ids.count(tokenizer.find("<tool_call>")) == ids.count(tokenizer.find("<think>")) == 1
  letters, (ids,) = encoded(tokenizer, HERMES, PLAIN + "{# <tool_call> #}")
  assert said == letters == ['<tool_call>\n{"name": "w"}\n</tool_call>It rains. <think>']
  assert not {tokenizer.find("<tool_call>"), tokenizer.find("<think>")} & set(ids)


def test_a_template_sees_the_spellings_of_the_record(tokenizer):
  """Qwen3's template does not treat a user message that holds a tool's answer as a question."""
  source = CHATML.replace("m.role == 'user'", "m.role == 'user' and not m.content.endswith('<tool_call>')")
  asked = [ASK, ANSWER, {"role": "user", "content": "It is <tool_call>"}, ANSWER]
  assert "<think>\n\n</think>\n\nHi.<|im_end|>\n<|im_start|>user\nIt is <tool_call>" in (
    Jinja(source, "x.jinja", tokenizer).render(read_conversation({"messages": asked}, "", "/")).text
  )


def test_variables_of_a_record_reach_the_template(tokenizer):
  source = "{% if shout %}LOUD {% endif %}" + PLAIN
  record = {"messages": [ASK, ANSWER], "chat_template_kwargs": {"shout": True}}
  renderer = Jinja(source, "x.jinja", tokenizer)
  assert renderer.render(read_conversation(record, "", "/")).text.startswith("LOUD <|im_start|>")
  for name, reason in (
    ("whisper", "whisper, which the chat template does not read"),
    ("messages", "which the trainer sets itself"),
  ):
    with pytest.raises(RenderError, match=reason):
      renderer.render(read_conversation(record | {"chat_template_kwargs": {name: True}}, "", "/"))


CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
AGENT = [
  ASK, CALL | {"reasoning_content": "Look."}, {"role": "tool", "content": "1"}, ANSWER | {"reasoning_content": "Tell."},
  MORE[0], MORE[1] | {"reasoning_content": "Part."},
]  # fmt: skip


def test_an_agent_whose_earlier_thoughts_are_dropped_is_learned_as_several_samples(tokenizer):
  """The text before "Hi." changes once the user speaks again, so each turn is learned after its prompt at inference."""
  renderer = Jinja(CHATML, "x.jinja", tokenizer)
  read = read_conversation({"messages": AGENT}, "", "/")
  first, second = renderer.samples(read, answers_to_learn(read, "assistant"))
  assert first.text == renderer.render(read_conversation({"messages": AGENT[:4]}, "", "/")).text
  assert second.text == renderer.render(read).text
  last = "<think>\nPart.\n</think>\n\nBye."
  said, _ = encoded(tokenizer, {"messages": AGENT}, CHATML)
  assert said == ["<think>@Look.@</think>@@<tool_call>f{}<think>@Tell.@</think>@@Hi.".replace("@", "\n"), last]
  said, _ = encoded(tokenizer, {"messages": AGENT}, CHATML, learn="last")
  assert said == [last]
  (whole,), (ids,) = encoded(tokenizer, {"messages": AGENT}, CHATML, learn="all")
  assert whole == tokenizer.decode(ids)
  excluded = [*AGENT[:3], AGENT[3] | {"weight": 0}, *AGENT[4:]]
  said, _ = encoded(tokenizer, {"messages": excluded}, CHATML)
  assert said == [f"<tool_call>f{{}}{last}"]


@pytest.mark.parametrize("packing", [False, True])
def test_samples_of_a_conversation_are_learned_once_and_a_run_resumes_between_them(packing, make, tokenizer, tmp_path):
  path = tmp_path / "chats.jsonl"
  excluded = {"messages": [ASK, ANSWER], "label": False}
  records = [{"messages": AGENT}, {"messages": [ASK, ANSWER]}, excluded, {"messages": AGENT}]
  path.write_text("".join(json.dumps(record) + "\n" for record in records))
  settings: dict[str, Any] = {
    "dataset_path": str(path), "data_format": "chat", "tokenizer": str(tokenizer.files[0].parent), "vocab_size": 300,
    "length": 250, "global_batch": 1, "eval_interval": 0, "packing": packing, "epochs": 2, "shuffle": False,
  }  # fmt: skip
  data = make(**settings)
  states, rows = [], []
  for _ in range(data.rows):
    states.append(json.loads(json.dumps(data.get_state())))
    rows.append(next(data))
  assert (next(data)["targets"] == -100).all(), "rows are counted before the first one"
  assert data.counts()["excluded"] == 2
  first, second = encoded(tokenizer, records[0], CHATML)[0]
  plain = encoded(tokenizer, records[1], CHATML)[0][0]
  targets = np.concatenate([row["targets"][row["targets"] != -100] for row in rows])
  assert tokenizer.decode(targets) == (first + second + plain + first + second) * 2
  whole = [ids for record in (0, 1, 3) for ids in encoded(tokenizer, records[record], CHATML)[1]]
  segments = [row["tokens"][row["segments"] == n] for row in rows for n in range(1, row["segments"].max() + 1)]
  for ids, segment in zip(whole * 2, segments, strict=True):
    np.testing.assert_array_equal(segment, ids)
  for at, state in enumerate(states):
    again = make(**settings)
    assert again.rows_left(state) == len(rows) - at
    again.set_state(state)
    for row in rows[at:]:
      np.testing.assert_array_equal(next(again)["tokens"], row["tokens"])
    assert again.counts() == data.counts()


def test_spelled_tokens_are_text(tokenizer):
  spelled = "<|im_end|>\n<|im_start|>assistant\n<think> <tool_call>"
  renderer = Jinja(CHATML, "x.jinja", tokenizer)
  read = read_conversation({"messages": [{"role": "user", "content": spelled}, ANSWER]}, "", "/")
  rendered = renderer.render(read, "training")
  assert f"user\n{spelled}<|im_end|>" in rendered.text
  found = ChatEncoder(renderer, tokenizer).encode(rendered, answers_to_learn(read, "assistant"), "")
  assert found.ids.count(tokenizer.special["<|im_start|>"]) == 2
  assert found.ids.count(tokenizer.find("<think>")) == 1
  with pytest.raises(RenderError, match=r"U\+FDD0"):
    renderer.render(read_conversation({"messages": [{"role": "user", "content": "\ufdd0"}]}, "", "/"))


@pytest.mark.parametrize(
  ("source", "reason"),
  [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "in message 2 cannot.*does not match the text before the answer"),
    ("{{ messages | length }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}", "on later messages"),
    ("{% for m in messages %}<|im_start|>{{ m.content }} end{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
     "no special token ends the answer"),
    ("{% for m in messages %}<|im_start|>you<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}",
     "its turn does not have the complete text"),
    ("{{ raise_exception('no ' + messages[0].role) }}", "refuses: no user"),
    ("{{ strftime_now('%Y') }}", "asks for the date"),
    ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses"),
    ("{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16777216 characters"),
    ("{{ messages[0].content.missing.more }}", "refuses"),
    ("{{ messages[9].role }}", "refuses"),
  ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(source, reason, tokenizer):
  with pytest.raises(RenderError, match=reason):
    learned(tokenizer, ASK, ANSWER, source=source)


@pytest.mark.parametrize(
  ("source", "limit"),
  [
    ("{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "time"),
    ("{{ (9 + messages | length) ** (9 ** 9) }}", "time"),
    ("{{ ('a' * 30 * messages | length) | urlize | wordwrap(1) | replace('', 'a' * 99999) * 99 }}", "memory"),
    ("{% set ns = namespace(s='ab') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
    ("{% set ns = namespace(s=[1]) %}{% for a in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}", "memory"),
    ("{{ ('x' * 16000 * messages | length) | join('y' * 16000) }}", "memory"),
    ("{{ '{:>3000000000}'.format(messages | length) }}", "memory"),
    ("{{ messages[0].content.center(3000000000) }}", "memory"),
    ("{{ '%03000000000d' % messages | length }}", "memory"),
    ("{{ ('a' * 9999 * messages | length).translate({97: 'b' * 99999}) }}", "memory"),
  ],
)
@pytest.mark.slow
def test_a_template_beyond_a_limit_is_refused_as_a_template(source, limit, tokenizer, monkeypatch):
  low = {"spare_seconds": 0.3, "call_bytes": 64 * worker_process.MIB}
  monkeypatch.setattr(sandbox, "LIMITS", dataclasses.replace(sandbox.LIMITS, **low))
  reason = (
    r"more processor time than 0.05 s for a text of \d+ characters and 0.3 s in reserve for all texts together"
    if limit == "time"
    else "more than 64 MiB of memory"
  )
  with pytest.raises(
    worker_process.LimitError, match=f"^x.jinja: the chat template takes {reason}, so it is refused"
  ) as raised:
    learned(tokenizer, ASK, ANSWER, source=source)
  assert "fix: chat_template=FILE" in str(raised.value)
  assert learned(tokenizer, ASK, ANSWER) == ["Hi.<|im_end|>"], "the next one has a worker of its own"


def test_a_template_whose_constants_do_not_end_is_refused_as_it_is_opened(tokenizer, monkeypatch):
  monkeypatch.setattr(sandbox, "LIMITS", dataclasses.replace(sandbox.LIMITS, open_seconds=0.3))
  with pytest.raises(UserError, match=r"y.jinja: the chat template takes more than 0.3 s of processor time"):
    Jinja("{{ 9 ** (9 ** 9) }}", "y.jinja", tokenizer)


def test_what_templates_may_do_with_texts(tokenizer):
  """Operators and filters of published templates that a narrower sandbox refused."""
  source = "{{ '%s|%03d' % ('a', 7) }}{{ 'b'.center(5) }}{{ '{}'.format(2 ** 10) }}{{ 'c\nd' | indent(2) }}{{ 'e' ~ 1 }}"
  text = Jinja(source, "x.jinja", tokenizer).render(read_conversation({"messages": [ASK]}, "", "/"), "prompt").text
  assert text == "a|007  b  1024c\n  de1"


def test_where_a_template_lies(tokenizer, tmp_path: Path):
  folder = tokenizer.files[0].parent
  assert find_template(folder) == (CHATML, str(folder / "tokenizer_config.json"))
  assert find_template(tmp_path) is None
  named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
  assert find_template(tmp_path) == ("b", str(tmp_path / "tokenizer_config.json"))
  (tmp_path / "chat_template.jinja").write_text("c")
  assert find_template(tmp_path) == ("c", str(tmp_path / "chat_template.jinja"))
  with pytest.raises(UserError, match=r"y.jinja: not a jinja template that can be run: Encountered unknown tag"):
    Jinja("{% nonsense %}", "y.jinja", tokenizer)


def test_the_template_for_tools_renders_conversations_with_tools(tokenizer, tmp_path: Path):
  (tmp_path / "tokenizer.json").write_bytes(tokenizer.files[0].read_bytes())
  blind = CHATML.replace("{%- if tools %}", "{%- if false %}")  # the default template refuses tools
  plain = read_conversation({"messages": [ASK, ANSWER]}, "", "/")
  tools = read_conversation({"messages": [ASK, ANSWER], "tools": [{"function": {"name": "add"}}]}, "", "/")
  entries = {"rag": "r", "tool_use": CHATML, "default": blind}

  def check() -> None:
    renderer = template_beside(load_tokenizer(str(tmp_path / "tokenizer.json")))
    assert renderer is not None
    assert renderer.name.count("xxh3") == 2
    for conversation, source in ((plain, blind), (tools, CHATML)):
      assert renderer.render(conversation, "training") == Jinja(source, "x", tokenizer).render(conversation, "training")

  listed = [{"name": name, "template": source} for name, source in entries.items()]
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
  check()
  (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed[:2]}))
  with pytest.raises(
    UserError, match=r"tokenizer_config.json: the chat templates there are rag, tool_use, .*none is named default"
  ):
    template_beside(load_tokenizer(str(tmp_path / "tokenizer.json")))
  (tmp_path / "chat_template.jinja").write_text(blind)
  (tmp_path / "additional_chat_templates").mkdir()
  (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
  check()
