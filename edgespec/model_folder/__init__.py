"""A model's folder in Hugging Face layout: its config, chat template and weights' headers. Loads no weights."""
