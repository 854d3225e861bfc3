"""Names to target folders; tiny-chat, which trains itself."""
