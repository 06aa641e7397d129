"""A name that TRL imports."""

StructuredOutputsParams = object
