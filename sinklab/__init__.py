"""Train language models, watch attention sinks emerge, and find out why."""

__version__ = '0.1.0'
