"""A name that TRL imports."""


class StructuredOutputsParams:
    """Not used."""
