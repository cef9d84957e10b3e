"""Models of LLaMA's family as transformers has them: read, written, and held to what it computes."""

HF_PREFIX = 'hf:'  # of what is named as one
