"""edgespec: a tiny, well-aligned drafter for a chat LLM, and a light runtime for the pair.

This room holds the command line and the nouns everyone shares. It needs the standard library and PyYAML only.
"""

__version__ = "0.1.0"
