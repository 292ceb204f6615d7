"""What limits the service now, in words, with the figures that say so.

counts        what is counted while the server runs, and what came to it between two moments
traffic       who asks for what: lengths, what could be reused, what was refused, who waited
observation   an interval in rates: by phase, against what the machine can do at most
findings      what limits it, by rules, the gravest first
predictions   what a change would do
"""
