"""What a server would do with some traffic, without a model: the real core under a virtual clock.

traffic.py says who asks for what and when, trace.py and recorded.py where that comes from, costs.py
how long a step takes, faults.py what goes wrong meanwhile. loop.py drives the core with them, and
outcome.py says what came of it. Everything is drawn from one seed, so the same run comes out again.
"""
