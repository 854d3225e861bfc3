"""Block efficiency, acceptance and MBSU in torch."""
