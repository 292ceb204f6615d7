"""What a model takes and how fast it can be at most, worked out before a server is started."""
