"""What `python -m bench.reuse` measures, a scenario a module."""
