"""Make a model portable: ONNX, GGUF, verification, bundles. Reads and writes folders on disk."""
