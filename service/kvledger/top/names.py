"""Text of others on the operator's terminal: it takes the room it seems to take, and does nothing.

Whatever could move the cursor, reorder a line, or be drawn in another width than is counted here is
written as an escape: control and format characters, combining marks, right-to-left letters.
"""

from __future__ import annotations

import unicodedata

from rich.cells import cell_len, set_cell_size

# Longer texts are nobody's name or sentence.
_LONGEST = 1000
_SHOWN = ("L", "N", "P", "S")  # first letters of categories
_REORDERS = {"R", "AL", "AN"}


def shown(text: str, *, ascii_only: bool = False) -> str:
    """The text with escapes for what a terminal would not just draw."""
    return "".join(_shown(c, ascii_only) for c in text[:_LONGEST])


def _shown(c: str, ascii_only: bool) -> str:
    if c == "\\":
        return "\\\\"
    if " " <= c <= "~" or (not ascii_only and _is_drawn(c)):
        return c
    code = ord(c)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _is_drawn(c: str) -> bool:
    """Whether it is drawn by itself, in a width that everybody agrees on."""
    category = unicodedata.category(c)
    if category[0] not in _SHOWN or category in ("Lm", "Sk"):
        return False  # modifiers change what stands before them
    if "\U0001f1e6" <= c <= "\U0001f1ff" or "\u1160" <= c <= "\u11ff":
        return False  # two letters make a flag, several a syllable
    if unicodedata.bidirectional(c) in _REORDERS:
        return False
    wide = unicodedata.east_asian_width(c) in ("W", "F")
    return cell_len(c) == (2 if wide else 1)


def fit(text: str, width: int, mark: str) -> str:
    """Exactly so many columns: padded, or cut with a mark of one column at its end."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(set_cell_size(text, width - 1).rstrip() + mark, width)


def fit_end(text: str, width: int, mark: str) -> str:
    """At most so many columns: its end, where it is longer."""
    if cell_len(text) <= width:
        return text
    while text and cell_len(text) > width - 1:
        text = text[1:]
    return mark + text


def _beginning(text: str, width: int) -> str:
    """As many characters as fit."""
    taken = 0
    for place, c in enumerate(text):
        taken += cell_len(c)
        if taken > width:
            return text[:place]
    return text


def wrapped(text: str, width: int, lines: int, mark: str) -> list[str]:
    """In at most so many lines, the last one with a mark where something is missing."""
    out: list[str] = []
    line = ""
    for word in text.split():
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= width:
            line = longer
            continue
        if line:
            out.append(line)
        line = word
        while cell_len(line) > width:
            part = _beginning(line, width)
            out.append(part)
            line = line[max(1, len(part)) :]  # a wide character that does not fit is left out
    out.append(line)
    if len(out) > lines:
        rest = " ".join(out[lines - 1 :])
        out[lines - 1 :] = [fit(rest, width, mark).rstrip()]
    return out
