"""What files are written in: names by format."""

from __future__ import annotations

from collections.abc import Sequence

PRECISIONS = {
    "onnx": ("fp32", "fp16", "int8", "int4", "mixed"),
    "gguf": (
        *("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"),
        *("q4_k_s", "q4_k_m", "q5_k_m", "q6_k", "q_mixed"),
    ),
    "npu": ("fp32", "qdq8", "qdq16"),
}
"""What files are written in, by format."""
MIXED = {"onnx": "mixed", "gguf": "q_mixed"}
"""The precisions whose tensors have bits of their own, chosen on text the target wrote."""
WHOLE_PRECISIONS = tuple(
    name for kind in ("onnx", "gguf") for name in PRECISIONS[kind] if name != MIXED[kind]
)
"""Those of ONNX and GGUF that round every matrix alike."""
READ_BY = {"onnx": "onnxruntime", "gguf": "llama.cpp", "npu": "static, openvino"}
"""The engines that run a format's files."""


def beside_own(gguf: Sequence[str]) -> str:
    """The drafter's precision beside a target's own file, of those asked for: Q8_0 changes least at half the size of floats."""
    return "q8_0" if "q8_0" in gguf else gguf[0]


def precision_names() -> list[str]:
    """The precisions, those of one engine after those of another: fp32, fp16, int8, int4 (onnxruntime); f32, ..."""
    return ["; ".join(f"{', '.join(names)} ({READ_BY[kind]})" for kind, names in PRECISIONS.items())]
