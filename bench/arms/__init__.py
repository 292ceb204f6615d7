"""The servers that bench.serve and bench.peers send their load to: one module each."""
