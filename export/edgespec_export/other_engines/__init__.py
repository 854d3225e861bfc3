"""The pair in llama.cpp, onnxruntime-genai, transformers and OpenVINO."""
