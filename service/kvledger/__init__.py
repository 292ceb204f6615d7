"""kvledger: streams tokens of a language model and keeps the books of their KV memory."""

__version__ = "0.1.0"
