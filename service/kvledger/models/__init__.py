"""Models: what a model file says, the classes that compute one, and the default model."""
