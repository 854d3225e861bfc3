"""The config.json of the model in a GGUF file, from its checked header. Knows keys and tensor names, no weights and no tokenizer.

The families are those that edgespec's own GGUF writer and Hugging Face compute alike. Everything else a file says about its model
is refused by name: a key that is not known here may change what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from ctypes import c_float
from pathlib import Path
from typing import Any

from edgespec.core.errors import InputError
from edgespec.core.families import FAMILIES, having, with_architecture
from edgespec_runtime.untrusted.gguf_file import Header, read_header

AGAIN = "fetch the file again"
TOKENS = "tokenizer.ggml.tokens"
ROPE_FACTORS = "rope_freqs.weight"
_LOW, _HIGH = 1.0, 4.0  # turns within the original context between which Llama 3.1 blends
READABLE = {FAMILIES[name].gguf: with_architecture(FAMILIES[name].gguf) for name in having("read_as_target")}
"""The family that a file of an architecture is read as; of two with one architecture, the first."""
_READ = frozenset(
    """
    block_count context_length embedding_length feed_forward_length vocab_size attention.head_count attention.head_count_kv
    attention.key_length attention.value_length attention.layer_norm_rms_epsilon rope.freq_base rope.dimension_count
    rope.scaling.type rope.scaling.factor rope.scaling.original_context_length rope.scaling.attn_factor
    rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow
    """.split()  # noqa: SIM905
)
_SAYS_NOTHING = frozenset({"rope.scaling.finetuned", "tensor_data_layout"})  # to llama.cpp all values are one
_USUAL: Mapping[str, Any] = {"attention.causal": True}  # values that change nothing; of every other key 0


def read_model(file: Path) -> tuple[Header, dict[str, Any]]:
    """The header of a GGUF file, and the config.json of its model without RoPE factors of its own (`rope_of_factors`).

    RoPE is in both spellings, of transformers 4 and of 5. Raises BundleError where it is no whole GGUF file, InputError for a
    model that is not read; each names what was seen.
    """
    header = read_header(file, AGAIN)
    architecture = str(header.values.get("general.architecture"))
    family = READABLE.get(architecture)
    if family is None:
        raise InputError(
            f"{file} is a {architecture[:40]!r} model; of GGUF files {', '.join(READABLE)} are read as a target: give the "
            "model's folder or hub id instead"
        )
    own = f"{architecture}."
    keys = {name.removeprefix(own): value for name, value in header.values.items() if name.startswith(own)}
    for name, value in keys.items():
        if name not in _READ | _SAYS_NOTHING and value != _USUAL.get(name, 0):
            raise InputError(
                f"{file} has {own}{name[:80]} {value!r:.40}, which this edgespec does not know for a target; give the model's "
                "folder or hub id instead"
            )

    def number(name: str, default: Any = None, kind: type[Any] = int) -> Any:
        seen = keys.get(name, default)
        if type(seen) not in (int, kind) or not 0 < seen < math.inf:
            told = "one for every layer" if isinstance(seen, range) else f"{seen!r:.40}"
            wanted = "a whole number" if kind is int else "a number"
            raise InputError(f"{file} has {architecture}.{name} {told}; {wanted} above 0 is wanted: {AGAIN}")
        return kind(seen)

    hidden, heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", hidden // heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if number(name, head_dim) != head_dim:
            raise InputError(
                f"{file} has {architecture}.{name} {keys[name]}; {head_dim}, the size of its heads, is wanted"
            )
    tokens = header.values.get(TOKENS)
    if not isinstance(tokens, range) or not tokens:
        raise InputError(f"{file} has no {TOKENS}; a target's file has its tokenizer in it: {AGAIN}")
    context, theta = number("context_length"), number("rope.freq_base", 10000.0, float)
    layers = number("block_count")
    rope = _rope(keys, number, context, file)
    config: dict[str, Any] = {
        "architectures": [family.read_as_target],
        "model_type": family.model_type,
        "vocab_size": len(tokens),
        "hidden_size": hidden,
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": context,
        "rms_norm_eps": shortest(number("attention.layer_norm_rms_epsilon", kind=float)),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in header.tensors),
        "rope_theta": theta,
        "rope_parameters": {**rope, "rope_theta": theta},
    }
    if rope["rope_type"] != "default":
        config["rope_scaling"] = rope
    if "ffn_gate" in family.gguf_biases:
        config["mlp_bias"] = any(name.endswith("ffn_gate.bias") for name in header.tensors)
    if family.nope_period:
        config["no_rope_layers"] = [int(bool((layer + 1) % family.nope_period)) for layer in range(layers)]
    for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        seen = header.values.get(f"tokenizer.ggml.{name}_token_id")
        if isinstance(seen, int) and seen < len(tokens):
            config[f"{role}_token_id"] = seen
    return header, config


def shortest(value: float) -> float:
    """The shortest decimal that is this float32: files hold 1e-5 as 9.999999747378752e-06."""
    decimals = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next((short for short in decimals if c_float(short).value == c_float(value).value), value)


def _rope(keys: Mapping[str, Any], number: Any, context: int, file: Path) -> dict[str, Any]:
    """RoPE scaling as transformers names it. YaRN's factor on cos and sin is 1 + 0.1 ln(factor) times what the file says."""
    # as llama.cpp, for which a factor without a type is a linear one
    kind = keys.get("rope.scaling.type", "linear" if keys.get("rope.scaling.factor") else "none")
    times = keys.get("rope.scaling.attn_factor", 1.0)
    if kind != "yarn" and times != 1.0:
        raise InputError(
            f"{file} has a rope.scaling.attn_factor of {times!r:.40} and RoPE scaling {kind!r:.40}; edgespec reads that factor "
            "with 'yarn' alone: give the model's folder or hub id instead"
        )
    if kind == "none":
        return {"rope_type": "default"}
    factor = number("rope.scaling.factor", 1.0, float)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scale = 1.0 + 0.1 * math.log(factor) if factor > 1 else 1.0
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": number("rope.scaling.original_context_length", context),
            "beta_fast": number("rope.scaling.yarn_beta_fast", 32.0, float),
            "beta_slow": number("rope.scaling.yarn_beta_slow", 1.0, float),
            "attention_factor": scale * number("rope.scaling.attn_factor", 1.0, float),
        }
    raise InputError(f"{file} has RoPE scaling {kind!r:.40}; none, linear and yarn are read from GGUF files")


def rope_of_factors(config: Mapping[str, Any], factors: Sequence[float], file: Path | str) -> dict[str, Any]:
    """The Llama 3.1 scaling whose frequency divisors a file holds as `rope_freqs.weight`: config.json's RoPE entries.

    A file has the divisors only. The borders of the blend are taken to be Meta's, 1 and 4 turns; a blended divisor then says what
    the original context was. Raises InputError where the divisors are not what such a scaling gives, or another one is there too.
    """
    if "rope_scaling" in config:  # llama.cpp does both
        raise InputError(
            f"{file} has RoPE factors of its own ({ROPE_FACTORS}) and RoPE scaling {config['rope_scaling']['rope_type']!r}; "
            "edgespec reads only one of the two: give the model's folder or hub id instead"
        )
    theta, size, factor = config["rope_theta"], config["head_dim"], shortest(max(factors))
    for even, divisor in zip(range(0, size, 2), factors, strict=False):
        if not 1.0 < divisor < factor:
            continue
        share = (1.0 / divisor - 1.0 / factor) / (1.0 - 1.0 / factor)
        turns = _LOW + share * (_HIGH - _LOW)
        rope = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LOW,
            "high_freq_factor": _HIGH,
            "original_max_position_embeddings": round(turns * 2 * math.pi * theta ** (even / size)),
        }
        wanted = list(llama3_divisors(rope, theta, size))
        if len(wanted) == len(factors) and all(
            math.isclose(a, b, rel_tol=1e-4) for a, b in zip(wanted, factors, strict=True)
        ):
            return {"rope_scaling": rope, "rope_parameters": {**rope, "rope_theta": theta}}
    raise InputError(
        f"{file} has RoPE factors of its own ({ROPE_FACTORS}) that are not Llama 3.1's; give the model's folder or hub id instead"
    )


def llama3_divisors(rope: Mapping[str, Any], theta: float, size: int) -> Iterator[float]:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, blended between (Llama 3.1).

    The blend of the frequencies is linear in (original context / wavelength), so the divisor is its inverse. `size`: values of a
    head that are rotated; there is one divisor for two of them.
    """
    factor, low, high = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    for even in range(0, size, 2):
        turns = float(rope["original_max_position_embeddings"]) * theta ** -(even / size) / (2 * math.pi)
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        yield 1.0 / (share + (1.0 - share) / factor)
