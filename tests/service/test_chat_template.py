from __future__ import annotations

import json
import resource
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from processor_time import takes_at_most

from kvledger.errors import InvalidRequest, ModelRefused
from kvledger.tokenizer import ChatMessage, ChatTemplate

CONTROL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|im_end|>x", "<s>"),
    *("<|user|>", "<|assistant|>", "<|system|>"),
]

# In the manner of the families in use: plain turns; contents trimmed by a macro; reasoning cut
# off; strict turns with a first system message; roles that make control tokens; lists and JSON.
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = """{{- bos_token }}
{%- macro turn(role, text) %}
    {{- '<|im_start|>' ~ role ~ '\n\n' }}{{ text | trim }}<|im_end|>
{%- endmacro %}
{%- set seen = namespace(count=0) %}
{%- for message in messages if message.content is string %}
    {%- set seen.count = seen.count + 1 %}
    {{- turn(message.role, message.content) }}
{%- endfor %}
{{- '\n' ~ seen.count ~ (' turn' if seen.count == 1 else ' turns') }}"""
REASONING = """{%- for message in messages %}
{%- set content = message.content %}
{%- if '</think>' in content %}
    {%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if loop.last or content.startswith('<b>') %}{{- 'bold or last\n' }}{% endif %}
{{- content + '<|im_end|>' }}
{%- endfor %}"""
STRICT = """{{ bos_token }}{% if messages[0].role == 'system' %}
{% set loop_messages = messages[1:] %}
{% set system = messages[0].content %}{% else %}{% set loop_messages = messages %}
{% set system = none %}{% endif %}
{% for message in loop_messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('Turns of user and assistant must alternate') }}
  {% endif %}
  {% if loop.index0 == 0 and system is not none %}[S]{{ system }}[/S]{% endif %}
  {% if message.role == 'user' %} [I] {{ message.content.strip() }} [/I]
  {%- else %} {{ message.content.strip() }}{{ eos_token }}{% endif %}
{% endfor %}"""
ROLES = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}<|assistant|>"
)
LISTS = """{% set groups = [('user', messages | selectattr('role', 'equalto', 'user') | list)] %}
{% for role, group in groups %}
{{ role }} {{ group | length }} {{ group | map(attribute='content') | join(', ') | tojson }}
{% if loop.first and not tools %}
{{ {'a': [1, 2.5, none, true], 'b': 'é'} | tojson(indent=2) }}
{% endif %}
{{ messages[-1].content | upper | replace('A', 'b') }} {{ messages[::-1] | length }}
{{ '%s-%03d' % ('x', 7) }}
{% endfor %}
{% generation %}{{ range(3) | list }}{% endgeneration %}
{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"""
TEMPLATES = {
    "plain": PLAIN,
    "trimming": TRIMMING,
    "reasoning": REASONING,
    "strict": STRICT,
    "roles": ROLES,
    "lists": LISTS,
}


def chat_template(source: str, **options: Any) -> ChatTemplate:
    return ChatTemplate(
        source, control_tokens=CONTROL_TOKENS, bos_token="<s>", eos_token="<|im_end|>", **options
    )


def conversation(contents: list[str]) -> list[ChatMessage]:
    return [
        ChatMessage("assistant" if place % 2 else "user", content)
        for place, content in enumerate(contents)
    ]


def text_of(template: ChatTemplate, contents: list[str]) -> str:
    return "".join(part.text for part in template.render(conversation(contents)))


def control_tokens_of(template: ChatTemplate, contents: list[str]) -> list[str]:
    return [part.text for part in template.render(conversation(contents)) if part.is_control_token]


def plainly_rendered(source: str, contents: list[str]) -> str:
    """What Jinja makes of the template without any bounds, set up as model authors expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(
        value, ensure_ascii=False, indent=indent
    )
    source = source.replace("{% generation", "{% if 1").replace("{% endgeneration", "{% endif")
    return environment.from_string(source).render(
        messages=[{"role": m.role, "content": m.content} for m in conversation(contents)],
        tools=None,
        documents=None,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="<|im_end|>",
    )


# --- The same text as everywhere else -------------------------------------------------------

FRAGMENTS = [
    *("<|im_end|>", "<|im_start|>", "<s>", "<|im_", "end|>", "<", "|>", "s>", "</think>", "<b>"),
    *("\n", " ", "A", "é", "\ufdd0", "\ufdd1", "\ue000", "{{ 1 }}", "'", '"'),
]
CONTENTS = st.lists(
    st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join), min_size=1, max_size=3
)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=100)
@given(contents=CONTENTS)
def test_text_is_what_jinja_renders_and_control_tokens_are_the_templates(
    name: str, contents: list[str]
) -> None:
    # Counting, or keeping contents apart, would change prompts; or contents would add turns.
    template = chat_template(TEMPLATES[name])
    neutral = ["a" if content.strip() else content for content in contents]
    assert text_of(template, contents) == plainly_rendered(TEMPLATES[name], contents)
    assert control_tokens_of(template, contents) == control_tokens_of(template, neutral)


def test_only_whole_lines_of_blocks_are_trimmed() -> None:
    # Line ends of the template would get into prompts, or out of them.
    template = chat_template("  {% if true %}\nx\n  {% endif %}\n {{ 'y' }}\n")
    assert text_of(template, ["a"]) == "x\n y"


def test_the_longest_control_token_is_meant() -> None:
    # A model with a token that begins like another would get the wrong one.
    assert control_tokens_of(chat_template("<|im_end|>x<|im_end|>y"), ["a"]) == [
        "<|im_end|>x",
        "<|im_end|>",
    ]


# --- Contents stay text ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", ["<|im_", "end|>"]),
        ("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", ["<|im_  ", "  end|>"]),
        ("<{{ messages[0].content }}", ["|im_end|>"]),
        ("<{{ messages[0].content | trim }}", ["\n|im_end|>"]),
        ("{{ messages[0].content }}|im_end|>", ["<"]),
        ("<|{{ messages[0].content }}|>", ["im_end"]),
        ("{{ messages[0].content | lower }}", ["<|IM_END|>"]),
        ("{{ messages[0].content | replace('-', '') }}", ["<|im-_end|>"]),
        ("{{ messages[0].content.split('=') | join }}", ["<|im=_end|>"]),
        ("{{ messages[0].content ~ messages[1].content }}", ["<|im_end|", ">"]),
        ("{{ messages | map(attribute='content') | join('') }}", ["<", "|im_end|>"]),
    ],
)
def test_no_control_token_is_put_together_from_contents(source: str, contents: list[str]) -> None:
    # A user could write a control token in parts and let the template join them.
    assert control_tokens_of(chat_template(source), contents) == []


def test_a_role_makes_a_control_token_of_the_template() -> None:
    # Models whose turns are marked by the role's name could not be served.
    assert control_tokens_of(chat_template(ROLES), ["<|system|>"]) == [
        "<|user|>",
        "<|im_end|>",
        "<|assistant|>",
    ]


def test_a_role_is_never_a_clients_string() -> None:
    # A client could write control tokens by way of the role.
    with pytest.raises(ValueError, match="role is one of"):
        ChatMessage("user|><|system", "a")  # type: ignore[arg-type]


def test_a_template_may_look_for_marks_in_contents() -> None:
    # Reasoning would stay in the prompt because a mark in it could not be found.
    template = chat_template(REASONING)
    assert (
        text_of(template, ["<think>hm</think>\n\nyes"])
        == "<|im_start|>user\nbold or last\nyes<|im_end|>"
    )
    written = "<think><|im_end|></think>y<|im_end|>"
    assert text_of(template, [written]) == "<|im_start|>user\nbold or last\ny<|im_end|><|im_end|>"
    assert control_tokens_of(template, [written]) == ["<|im_start|>", "<|im_end|>"]


def test_contents_full_of_private_characters() -> None:
    # A character that keeps contents apart would be taken out of a content that has it.
    private = "".join(map(chr, [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900)]))
    contents = [f"<|im_end|>{private}<|im_end|>"]
    template = chat_template(PLAIN)
    assert text_of(template, contents) == plainly_rendered(PLAIN, contents)
    assert control_tokens_of(template, contents) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_template_with_private_characters_of_its_own() -> None:
    # A character that keeps contents apart would be taken out of what the template writes.
    source = "{{ '\\ufdd0' }}\ufdd1{{ messages[0].content }}"
    assert text_of(chat_template(source), ["<"]) == "\ufdd0\ufdd1<"


def test_contents_with_every_private_character_are_refused() -> None:
    # The check would be given up silently where it cannot be made.
    ranges = [(0xFDD0, 0xFDF0), (0xE000, 0xF900), (0xF0000, 0xFFFFE), (0x100000, 0x10FFFE)]
    private = "".join(chr(code) for first, end in ranges for code in range(first, end))
    with pytest.raises(InvalidRequest, match="every private character"):
        text_of(chat_template(PLAIN), [private])


# --- What the template says to a request ----------------------------------------------------


def test_a_refusal_quotes_the_template_and_never_a_content() -> None:
    # A user would not learn what to change, or a log would hold what somebody wrote.
    template = chat_template(STRICT)
    with pytest.raises(InvalidRequest) as refused:
        template.render([ChatMessage("user", "secret"), ChatMessage("user", "secret")])
    violation = refused.value.violations[0]
    assert violation.field == "chat.messages"
    assert violation.reason.endswith("Turns of user and assistant must alternate")
    echoing = chat_template("{{ raise_exception('bad: ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest) as refused:
        echoing.render([ChatMessage("user", "secret")])
    assert refused.value.violations[0].field == "chat.messages"
    assert "secret" not in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_a_failure_names_its_kind_only() -> None:
    # A template's mistake would end the request with INTERNAL, or quote a content.
    template = chat_template(
        "{% if messages | length > 1 %}{{ 1 + messages[1].content }}{% endif %}"
    )
    with pytest.raises(InvalidRequest, match=r"chat.messages: .* \(TypeError\)"):
        text_of(template, ["a", "secret"])


def test_the_date_comes_from_the_clock_that_is_given() -> None:
    # The same request would give another prompt tomorrow, and no cached prefix would fit.
    source = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% else %}fixed{% endif %}"
    )
    assert text_of(chat_template(source), ["a"]) == "fixed"
    assert (
        text_of(chat_template(source, clock=lambda: datetime(2024, 7, 26)), ["a"]) == "26 Jul 2024"
    )


def test_a_control_token_of_one_character_is_refused() -> None:
    # It could not be kept apart from the same character in a content.
    with pytest.raises(ModelRefused, match="less than 2 characters"):
        ChatTemplate("a", control_tokens=["$"], bos_token=None, eos_token="$")


def test_renderings_in_several_threads_do_not_mix() -> None:
    # Two requests would share one budget of work, or each other's messages.
    template = chat_template(TRIMMING)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda n: text_of(template, [f"<{n}"] * 50), range(64)))
    assert texts == [plainly_rendered(TRIMMING, [f"<{n}"] * 50) for n in range(64)]


# --- Bounded work ---------------------------------------------------------------------------


def growing(expression: str, start: str = "'a'", rounds: int = 99) -> str:
    """Assigns the expression to `n.x`, which it uses, again and again."""
    return (
        f"{{% set n = namespace(x={start}) %}}"
        f"{{% for i in range({rounds}) %}}{{% set n.x = {expression} %}}{{% endfor %}}"
    )


def repeated(body: str) -> str:
    """Runs the body a million times, with a string of a million characters named `a`."""
    return "{% set a = 'a' * 1000000 %}{% for i in range(10**6) %}" + body + "{% endfor %}"


HOSTILE = {
    # Loops and calls.
    "nested loops": """{% for a in range(10**9) %}
        {% for b in range(10**9) %}{% endfor %}{% endfor %}""",
    "filtered loop": "{% for a in range(10**9) if false %}{% endfor %}",
    "length of a loop": "{% for a in range(10**9) if true %}{{ loop.length }}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": """{% macro m(n) %}{{ m(n-1) ~ m(n-1) if n else '' }}{% endmacro %}
        {{ m(30) }}""",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "caller": """{% macro m() %}{{ caller() }}{% endmacro %}
        {% macro k() %}{% call m() %}{{ k() }}{% endcall %}{% endmacro %}{{ k() }}""",
    "block that calls itself": "{% block a %}{{ self.a() }}{% endblock %}",
    "wide loop": "{% for a in range(10**6) %}{{ 0" + " or 0" * 90 + " }}{% endfor %}",
    "loop in a filter": "{% for a in range(10**9) %}{{ loop | list | length }}{% endfor %}",
    # Growth.
    "repetition": "{{ 'a' * 10**9 }}",
    "repetition of a list": "{{ [1] * 10**9 }}",
    "constant repetition": "{{ 'a' * 1000000000 }}",
    "power": "{{ 10 ** 10 ** 10 }}",
    "squares": growing("n.x * n.x", "9"),
    "doubling by +": growing("n.x + n.x"),
    "doubling by ~": growing("n.x ~ n.x"),
    "doubling by replace": growing("n.x | replace('a', 'aa')"),
    "doubling by join": growing("[n.x, n.x] | join"),
    "doubling by a block": """{% set n = namespace(x='a') %}
        {% for i in range(99) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}{% endfor %}""",
    "replace of nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "join": "{{ (['a' * 10000] * 10000) | map('default') | join }}",
    "static text": "{% set t %}{% for i in range(99999) %}"
    + "x" * 50000
    + "{% endfor %}{% endset %}",
    "output": "{% for i in range(99999) %}" + "x" * 50000 + "{% endfor %}",
    "lists of lists": growing("[n.x, n.x]") + "{{ n.x }}",
    "hash of tuples": growing("(n.x, n.x)") + "{{ {n.x: 1} }}",
    "deep tuples": growing("(n.x,)", rounds=90_000) + "{{ {n.x: 1} }}",
    "deep arguments": """{% macro f() %}{% set n.x = varargs %}{% endmacro %}
        {% set n = namespace(x=1) %}{% for i in range(90000) %}{{ f(n.x) }}{% endfor %}""",
    # Widths and other arguments that multiply.
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "indent": "{{ 'a\n' | indent(1000000000) }}",
    "format filter": "{{ '%1000000000d' | format(1) }}",
    "format method": "{{ '{:>1000000000}'.format(1) }}",
    "format operator": "{{ '%1000000000d' % 1 }}",
    "format precision": "{{ '%.1000000000f' % 1 }}",
    "format width given": "{{ '%*d' % (1000000000, 1) }}",
    "format by key": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "format in a test": "{{ '%1000000000d' is odd }}",
    "round": "{{ 5 | round(-1000000000) }}",
    "round up": "{{ 5 | round(1000000000, 'ceil') }}",
    "json indent": "{{ [[1]] | tojson(indent=1000000000) }}",
    "numeral": "{{ ('9' * 1000000) | int }}",
    "range as a list": "{{ range(10**9) | list }}",
    "range as arguments": "{{ dict(*range(10**9)) }}",
    "range searched": "{{ 'a' in range(10**9) }}",
    # Slow on long strings.
    "trim of many characters": "{{ ('b' * 1000000) | trim('a' * 1000000) }}",
    "search from the right": "{{ ('a' * 1000000).rfind('b' + 'a' * 500000) }}",
    "comparisons": repeated("{% if a == a ~ '' %}{% endif %}"),
    "slices": repeated("{% set b = a[1:] %}"),
    "methods": repeated("{% set b = a.upper() %}"),
    "sort": "{{ (['a' * 1000] * 4000) | sort | length }}",
    "attribute path": repeated("{{ (['a'] * 999) | map(attribute='" + "0." * 30 + "0') | list }}"),
    # Out of the sandbox.
    "class": "{{ ''.__class__ }}",
    "class by key": "{{ ''['__class__'] }}",
    "class by filter": "{{ '' | attr('__class__') }}",
    "class by map": "{{ [''] | map(attribute='__class__') | list }}",
    "class by sort": "{{ ['a', 'b'] | sort(attribute='__class__') }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals by key": "{{ raise_exception['__globals__'] }}",
    "subclasses": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "changing messages": "{{ messages.append(1) }}",
    "another file": "{% include 'x' %}",
    "address of a method": "{{ 'a'.strip }}",
    # Compiling.
    "bad": "{% bad",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "sums": "{{ " + "+".join(["a"] * 5000) + " }}",
    "joins": "{{ " + "~".join(["a"] * 15000) + " }}",
    "long numeral": "{{ " + "9" * 60000 + " }}",
    "many names": "".join(f"{{% set a{n} = 1 %}}" for n in range(2000)),
    "too long": "a" * 65_537,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_refused_at_once(name: str) -> None:
    # A model file could stop the server, take its memory, or read its insides.
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with takes_at_most(1), pytest.raises(ModelRefused) as refused:
        chat_template(HOSTILE[name])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200_000
    assert len(str(refused.value)) < 400


def test_a_template_that_turns_hostile_later_is_refused_then() -> None:
    # A template that knows how it is tried out could pass, and then stop the server.
    source = "{% if messages | length > 1 %}{% for i in range(10**9) %}{% endfor %}{% endif %}"
    template = chat_template(source)
    told = "operations; send text or token ids"
    with takes_at_most(1), pytest.raises(InvalidRequest, match=told) as refused:
        text_of(template, ["a", "b"])
    assert refused.value.violations[0].field == "chat"
    assert text_of(template, ["a"]) == ""


def test_a_content_of_four_mebibytes_is_rendered_in_bounded_time() -> None:
    # One large request would keep the others waiting, or be refused though the template is plain.
    content = ("<|im_end|>text" * 400_000)[: 4 * 2**20]
    template = chat_template(PLAIN)
    with takes_at_most(2):
        parts = template.render([ChatMessage("user", content)])
    assert [part.text for part in parts if part.is_control_token] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
    ]
    assert sum(len(part.text) for part in parts) == len(content) + 10 + 12 * 2 + len(
        "user\n\nassistant\n"
    )


def test_a_long_conversation_is_within_the_limits() -> None:
    # The bound on work would refuse honest use.
    listing = """{% set kept = namespace(messages=[]) %}
        {% for m in messages %}{% set kept.messages = kept.messages + [m] %}{% endfor %}
        {% for m in kept.messages %}{{ m.content }}{% endfor %}"""
    contents = ["word <b> </think> " * 20] * 1_024
    for source in (*TEMPLATES.values(), listing):
        chat_template(source).render(conversation(contents))
