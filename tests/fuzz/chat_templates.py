"""Fuzz program of chat templates: a text, or a refusal, in bounded work; never a control token that
a message wrote.

    python tests/fuzz/chat_templates.py --runs 100000 --seed 1
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent)]

from driver import check_sentence, drive, mutate_bytes

from kvledger.errors import InvalidRequest, ModelRefused
from kvledger.tokenizer import ChatMessage, ChatTemplate, Role

CONTROL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<s>", "</s>")
_VALID = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
    "{{ bos_token }}{% for m in messages %}{% if loop.first and m['role'] == 'system' %}<|system|>"
    "{{ m['content'] | trim }}{% else %}{{ raise_exception('no') if m.role not in ['user',"
    "'assistant'] }}<|{{ m['role'] }}|>{{ m['content'] }}{% endif %}{{ eos_token }}{% endfor %}",
    "{% set ns = namespace(x=0, text='') %}{% for m in messages %}{% set ns.x = ns.x + 1 %}"
    "{% set ns.text = ns.text + m.content[:3] %}{% endfor %}{{ ns.text * ns.x }}<|end|>",
    "{% macro say(m) %}<|{{ m.role }}|>{{ m.content.split('a') | join('b') }}{% endmacro %}"
    "{% for m in messages %}{{ say(m) }}{% endfor %}",
)
# Put together at random: some make sense, many do not, a few are hostile.
_PIECES = (
    *(
        "{% for m in messages %}",
        "{% endfor %}",
        "{% if m %}",
        "{% else %}",
        "{% endif %}",
        "{{ m }}",
    ),
    *(
        "{% for i in range(10**9) %}",
        "{{ 'a' * 10**9 }}",
        "{{ [1] * 99999 }}",
        "{% set x = x + x %}",
    ),
    *("{{ m.content }}", "{{ m.role }}", "{{ messages | length }}", "<|end|>", "<|user|>", "text "),
    *("{{ ''.__class__.__mro__ }}", "{{ self._TemplateReference__context }}", "{% set x = 'ab' %}"),
    *("{{ x | upper | replace('A', 'AA') }}", "{{ '%999999999d' % 1 }}", "{{ 'x'.format(1) }}"),
    *(
        "{% macro f() %}{{ f() }}{% endmacro %}",
        "{{ f() }}",
        "{{ cycler }}",
        "{{ messages * 1000 }}",
    ),
    *(
        "{% include 'x' %}",
        "{{ x ** x }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% filter upper %}",
        "{% endfilter %}",
    ),
    *("{{ messages | tojson }}", "{{ x | list | sort | join }}", "{{ lipsum(9999) }}", "{#", "#}"),
    *(
        "{% raw %}",
        "{% endraw %}",
        "{%- ",
        "-%}",
        "{{ loop.index }}",
        "{% break %}",
        "{% continue %}",
    ),
)
_CONTENTS = (
    *(
        "",
        "a",
        " hello\n",
        "<|end|>",
        "<|en",
        "d|>",
        "<|user|>\n<|assistant|>",
        "</s><s>",
        "é\U0001f642",
    ),
    *("\ufdd0\ue000", "\0", "{{ 7 * 7 }}", "{% raw %}", "a" * 5000, "<|" * 2000, "\u2028|>"),
)
_ROLES: tuple[Role, ...] = ("system", "user", "assistant")


def _source(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(_VALID)
    if kind < 0.6:
        changed = mutate_bytes(chance, chance.choice(_VALID).encode())
        return changed.decode("utf-8", "replace")
    pieces = chance.choices(_PIECES, k=chance.randint(1, 12))
    return "".join(pieces)


def _messages(chance: random.Random) -> list[ChatMessage]:
    count = chance.choice((0, 1, 2, 3, 5, 200))
    return [
        ChatMessage(
            chance.choice(_ROLES), "".join(chance.choices(_CONTENTS, k=chance.randint(0, 3)))
        )
        for _ in range(count)
    ]


def target(chance: random.Random) -> str:
    """One template with one conversation."""
    source = _source(chance)
    try:
        template = ChatTemplate(source, control_tokens=CONTROL, bos_token="<s>", eos_token="</s>")
    except ModelRefused as refused:
        check_sentence(str(refused))
        return "template refused"
    messages = _messages(chance)
    try:
        parts = template.render(messages)
        harmless = [
            ChatMessage(message.role, "a" if message.content else "") for message in messages
        ]
        # What a template writes may depend on what is said, so only where it is known not to.
        written = template.render(harmless) if source == _VALID[0] else None
    except InvalidRequest as refused:
        check_sentence(str(refused))
        return "messages refused"
    assert all(part.text in CONTROL for part in parts if part.is_control_token)
    if written is not None:
        control = [[part.text for part in p if part.is_control_token] for p in (parts, written)]
        assert control[0] == control[1], "a message made a control token"
    return "rendered"


if __name__ == "__main__":
    drive("chat_templates", target)
