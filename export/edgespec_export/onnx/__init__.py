"""ONNX files: the builder, what it must be told, large models by layers."""
