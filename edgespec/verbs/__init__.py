"""The verbs that need several rooms; ready pairs; old names. Where every verb lies: VERBS in cli.py."""
