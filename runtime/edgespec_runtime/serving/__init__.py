"""An OpenAI-compatible server of a pair."""
