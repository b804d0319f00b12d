"""firsttoken: an LLM serving stack for the earliest first token the hardware allows."""

__version__ = "0.1.0"
