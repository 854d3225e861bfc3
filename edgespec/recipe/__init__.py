"""What a person chooses: target, drafter, device, data, knobs."""
