"""How many weights a decoder has and how many a token streams through, from its config.json. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from edgespec.core.errors import BundleError, InputError
from edgespec.core.families import FULL, LONGROPE, SLIDING, family_named


@dataclass(frozen=True)
class ModelShape:
    """A Llama-style decoder: grouped-query attention, gated FFN with three matrices, RMS norms.

    rope_border: most tokens of a text with the short RoPE factors, where the model has a second set for longer ones (LongRoPE).
    joins: it is a head. Its first matrix [H, 2 H] joins the token's embedding with the target's state, and each has a norm. Its
    table is its output rows.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab_size: int
    tied: bool
    context_length: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    head_norms: bool = False
    rope_border: int | None = None
    joins: bool = False

    @property
    def one_rope_length(self) -> int:
        """Most tokens of texts that all have the same RoPE factors. In torch a batch has those of its longest row."""
        return self.rope_border or self.context_length

    def told_length(self) -> str:
        """`one_rope_length` in words, with the reason where it is not the whole context."""
        if self.rope_border is None:
            return f"{self.context_length} tokens"
        reason = "longer texts take other RoPE factors, and a batch has one set"
        return f"{self.rope_border} tokens (of {self.context_length}: {reason})"

    @property
    def layer_parameters(self) -> int:
        return sum(map(prod, self.layer_tensors().values()))

    @property
    def joining_parameters(self) -> int:
        """Of a matrix before the layers that joins a token with the target's state: a head has one, a model none."""
        return 2 * self.hidden**2 * self.joins

    @property
    def embedding_parameters(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def parameters(self) -> int:
        """All weights; a tied embedding counts once."""
        tables = self.embedding_parameters * (1 if self.tied else 2)
        norms = self.hidden * (3 if self.joins else 1)  # beside those of the layers
        return tables + self.joining_parameters + self.layers * self.layer_parameters + norms

    @property
    def row_lengths(self) -> list[int]:
        """How many numbers a row of its matrices has, shortest first: blocks of a quantised file must fit in."""
        return sorted({self.hidden, self.intermediate, self.heads * self.head_dim})

    @property
    def streamed_parameters(self) -> int:
        """Weights read for one token: everything, but of the input embedding one row only (the output head is read whole)."""
        input_table = 0 if self.tied else self.embedding_parameters
        return self.parameters - input_table + self.hidden

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of a layer's weights by their Hugging Face names within the layer, in the order in which a token meets them."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {}
        for part, rows in (("q", query), ("k", key), ("v", key)):
            found[f"self_attn.{part}_proj.weight"] = (rows, self.hidden)
            if self.attention_bias:
                found[f"self_attn.{part}_proj.bias"] = (rows,)
        if self.head_norms:
            found |= {f"self_attn.{part}_norm.weight": (self.head_dim,) for part in "qk"}
        return found | {
            "self_attn.o_proj.weight": (self.hidden, query),
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights by their Hugging Face names, in the order in which a token meets them."""
        table = (self.vocab_size, self.hidden)
        layers = {
            f"model.layers.{layer}.{name}": size
            for layer in range(self.layers)
            for name, size in self.layer_tensors().items()
        }
        head = {} if self.tied else {"lm_head.weight": table}
        return {"model.embed_tokens.weight": table, **layers, "model.norm.weight": (self.hidden,), **head}

    def to_config(self) -> dict[str, Any]:
        """Its numbers as config.json names them."""
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied,
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a Hugging Face config.json. Raises InputError that names a missing field."""
        if config.get("is_encoder_decoder"):
            raise InputError(
                f"the target is an encoder-decoder model ({config.get('model_type')}); speculative decoding here needs a "
                "decoder-only (causal) model"
            )

        def need(name: str) -> int:
            if config.get(name) is None:
                hint = "a Llama-style decoder config is needed"
                if "text_config" in config:
                    hint = "it reads more than text: save only its text model (such as Gemma3ForCausalLM) and give that"
                raise InputError(f"config.json ({config.get('model_type')}) has no {name!r}; {hint}")
            return int(config[name])

        hidden, heads = need("hidden_size"), need("num_attention_heads")
        family = family_named(config.get("model_type", ""))
        bias = family.attention_bias
        # transformers 5 goes by the first, 4 knows the second
        theta = rope_of(config)[0].get("rope_theta") or config.get("rope_theta")
        return cls(
            hidden=hidden,
            layers=need("num_hidden_layers"),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or family.head_dim or hidden // heads),
            intermediate=need("intermediate_size"),
            vocab_size=need("vocab_size"),
            tied=bool(config.get("tie_word_embeddings", family.tied)),
            context_length=int(config.get("max_position_embeddings") or 2048),
            rope_theta=float(theta or family.rope_theta),
            rms_norm_eps=float(config.get("rms_norm_eps") or family.rms_norm_eps),
            attention_bias=bool(config.get("attention_bias")) if bias is None else bias,
            head_norms=family.head_norms,
            rope_border=_rope_border(config),
        )


_KINDS = {field.name: str(field.type) for field in fields(ModelShape)}
MOST = (
    2**24
)  # of a whole number in a shape that a stranger's file tells; a GGUF file's longest context and vocabulary too
MOST_FLOAT = 2.0**40


def told_shape(values: Mapping[str, Any], role: str) -> ModelShape:
    """The shape that a bundle's manifest tells of a model; fields of later versions are left out.

    Raises BundleError where one is missing or is no number of its kind.
    """
    found = {name: value for name, value in values.items() if name in _KINDS}
    if wrong := impossible(found):
        raise BundleError(f"the manifest's shape of the {role} has {wrong}: build the bundle again")
    try:
        return ModelShape(**found)
    except TypeError as error:
        raise BundleError(
            f"the manifest's shape of the {role} is not one: {error}; build the bundle again"
        ) from error


def impossible(values: Mapping[str, Any]) -> str:
    """Which of a shape's fields is no number of its kind, and what is wanted; '' where all are."""
    for name, value in values.items():
        kind = _KINDS[name]
        if kind == "float":
            right = type(value) in (int, float) and 0 < value < MOST_FLOAT
        elif kind == "bool":
            right = isinstance(value, bool)
        else:
            right = (type(value) is int and 0 < value <= MOST) or (value is None and kind.endswith("None"))
        if not right:
            bound = "" if kind == "bool" else f" between 0 and {MOST_FLOAT if kind == 'float' else MOST:.0f}"
            return f"the {name} {str(value)[:80]}; a value of the kind {kind}{bound} is wanted"
    return ""


def rope_of(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """RoPE parameters of the layers that attend in full, and of those that slide where a config.json says these apart.

    Read in the old spelling (rope_scaling) and the new one (rope_parameters); `rope_type` is always there, as it is spelt. So is
    the original context of a scaling that has one. Where config.json says it twice, what stands outside the RoPE parameters
    counts, as in transformers.
    """
    new = config.get("rope_parameters") or {}
    apart = isinstance(new.get(FULL), Mapping)  # Gemma 3 has one for each kind of layer
    full = new[FULL] if apart else config.get("rope_scaling") or new
    sliding = new.get(SLIDING) if apart else None
    return _filled(full, config), None if sliding is None else _filled(sliding, config)


def _filled(rope: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    found = {**rope, "rope_type": kind}
    if kind in (*LONGROPE, "llama3", "yarn"):
        name = "original_max_position_embeddings"
        usual = family_named(config.get("model_type", "")).original_context
        context = config.get("max_position_embeddings") or 2048
        found[name] = int(config.get(name) or usual or rope.get(name) or context)
    return found


def _rope_border(config: Mapping[str, Any]) -> int | None:
    """LongRoPE's original context; None where it is no shorter than the context, or the model has one set."""
    rope, _ = rope_of(config)
    if rope["rope_type"] not in LONGROPE:
        return None
    original: int = rope["original_max_position_embeddings"]
    return original if original < int(config.get("max_position_embeddings") or 2048) else None
