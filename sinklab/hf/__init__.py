"""Import, export, and parity checks of models of the LLaMA family in Hugging Face format."""
