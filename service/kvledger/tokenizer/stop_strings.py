"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Passes text on until a stop string occurs.

    The first occurrence by its end wins; of several with the same end, the longest. The text
    before it is let out, nothing else. Meanwhile exactly the longest suffix that may still begin
    a stop string is held back, so no part of one ever gets out.

    An Aho-Corasick automaton: one transition for each character, and a fallback only for depth
    that earlier characters gained, so the cost grows with neither the number nor the length of
    the stop strings. Not for use from two threads at once.
    """

    def __init__(self, sequences: Sequence[str]) -> None:
        """Raises ValueError for an empty stop string, which would stop before the first token."""
        # The four lists describe the automaton's nodes; node 0 is "no stop string has begun".
        self._next_nodes: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        # Length of the longest stop string that ends at the node; 0 where none does.
        self._match_length = [0]
        for sequence in sequences:
            self._add(sequence)
        self._link_fallbacks()
        self._node = 0
        self._held = ""
        self._stopped = False

    def _add(self, sequence: str) -> None:
        if not sequence:
            raise ValueError("a stop string has at least 1 character")
        node = 0
        for character in sequence:
            following = self._next_nodes[node].get(character)
            if following is None:
                following = len(self._next_nodes)
                self._next_nodes[node][character] = following
                self._next_nodes.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[node] + 1)
                self._match_length.append(0)
            node = following
        self._match_length[node] = self._depth[node]

    def _link_fallbacks(self) -> None:
        # Breadth first: a fallback is always a shorter string, so it is linked already.
        waiting = deque(self._next_nodes[0].values())
        while waiting:
            node = waiting.popleft()
            if not self._match_length[node]:
                self._match_length[node] = self._match_length[self._fallback[node]]
            for character, child in self._next_nodes[node].items():
                self._fallback[child] = self._following(self._fallback[node], character)
                waiting.append(child)

    def _following(self, node: int, character: str) -> int:
        following = self._next_nodes[node].get(character)
        while following is None and node:
            node = self._fallback[node]
            following = self._next_nodes[node].get(character)
        return following or 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has occurred."""
        return self._stopped

    def feed(self, text: str) -> str:
        """Takes the next text; returns what may be let out now."""
        if self._stopped:
            return ""
        next_nodes = self._next_nodes
        if not next_nodes[0]:
            return text
        node = self._node
        for position, character in enumerate(text):
            following = next_nodes[node].get(character)
            # Most characters neither begin nor go on with a stop string.
            if following is not None:
                node = following
            elif node:
                node = self._following(self._fallback[node], character)
            match_length = self._match_length[node]
            if match_length:
                self._stopped = True
                seen = self._held + text[: position + 1]
                self._held = ""
                return seen[: len(seen) - match_length]
        self._node = node
        seen = self._held + text
        border = len(seen) - self._depth[node]
        self._held = seen[border:]
        return seen[:border]

    def finish(self) -> str:
        """Ends the text; returns what was held back, which now begins no stop string."""
        released, self._held, self._node = self._held, "", 0
        return released
