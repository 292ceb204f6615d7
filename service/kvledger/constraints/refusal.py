"""What both processes say where a client's constraint cannot be used."""


class ConstraintRefused(Exception):
    """A constraint cannot be used. The message completes "the constraint ..." and quotes nothing
    of it but numbers and keywords of the standard."""
