"""Train language models, watch attention sinks emerge, and find out why."""

__version__ = '0.2.0'


def open(given: str, **how: object) -> object:
    """A run, RUN@STEP or hf:PATH_OR_ID, to look into: `.attention(text)`, `.measure(name, text)`, `.curve(name)`."""
    from sinklab.observe import opening

    return opening.open(given, **how)
