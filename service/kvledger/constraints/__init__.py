"""Output that must match a JSON schema, a regular expression or a grammar.

From outside in: `compiler` takes in what a client wrote and gives it to `worker`, a process that
may break; what came out of there whole becomes a `matcher` of this process, which rules out tokens
of its sequence. `source`, `schema` and `vocabulary` are what both processes share.
"""
