"""The recipe of `edgespec build-drafter`: every knob of the way from a target to a bundle, with its type, default and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.core.options import knob, section, with_default
from edgespec.model_folder.head import LAST, THREE
from edgespec.recipe.precisions import PRECISIONS, WHOLE_PRECISIONS, precision_names
from edgespec.recipe.shipped import device_entries

PYTHON_STDLIB = "python-stdlib"
SELF = "self"
"""The source that the target writes itself."""
SELF_TEXT, SELF_INSTRUCTIONS, SELF_PROMPTS = "self-text", "self-instructions", "self-prompts"
"""The stages that write it."""
READ = "read"  # the stage in which the target reads the fixed data for a head
STATES = "states"  # the one in which it reads its own replies, for a head that reads three layers
ROUNDED = "rounded-target"  # the stage that gives the target the weights of one of its files
DOCUMENT_TOKENS = 256
"""Longest document of running text: a row of a pretraining has several."""
MOST_SEED = 2**32 - 1  # numpy's generator takes no more
INSTRUCTION_TOKENS = 128
"""Longest instruction: beyond that most samples have lost their end."""


@dataclass(frozen=True)
class InferenceOptions:
    """How the target runs where it writes responses and distributions: for targets that do not fit as float32 weights.

    The word before a colon in a help text is the `source` that the option is for.
    """

    source: str = knob(
        "torch",
        "the target's weights in torch, an exported file through the runtime's engine, or an OpenAI-compatible server",
        choices=("torch", "file", "server"),
    )
    dtype: str = knob(
        "float32", "torch: type of the target's weights in memory", choices=("float32", "bfloat16", "float16")
    )
    max_memory: tuple[str, ...] = knob(
        (),
        "torch: spread the target over devices, whole layers at a time: auto (what is free, half of it on a GPU that cannot "
        "hold all), or a budget for each (0=20GiB,cpu=8GiB); layers beyond stay on the disk (accelerate)",
    )
    bits: int | None = knob(
        None,
        "torch: round the target's matrices to this many bits; needs a GPU and bitsandbytes",
        choices=(4, 8),
    )
    file: str = knob("", "file: a bundle, an ONNX model folder or a .gguf file of the target")
    precision: str = knob(
        "", "file: which of a bundle's precisions: {names} (default: the bundle's)", names=precision_names
    )
    context: int | None = knob(
        None,
        "file: length of the context in tokens (default: the model's); its cache takes memory",
        at_least=2,
    )
    threads: int | None = knob(None, "file: compute threads (default: all processors)", at_least=1)
    url: str = knob("", "server: its address up to and without /v1, as http://127.0.0.1:8000")
    model: str = knob("", "server: the model's name there (default: the only one it has)")
    prompts: str = knob(
        "auto",
        "server: send prompts as token ids, as text, or as ids where it takes them (auto)",
        choices=("auto", "ids", "text"),
    )
    parallel: int = knob(8, "server: requests at once", at_least=1, at_most=256)
    # at most: a socket counts its milliseconds in 31 bits
    timeout: float = knob(600.0, "server: seconds to wait for an answer", at_least=0.1, at_most=2e6)
    retries: int = knob(5, "server: retries after a temporary failure, after 1, 2, 4 ... seconds", at_least=0)


@dataclass(frozen=True)
class DataOptions:
    strict: bool = knob(
        False, "refuse a file of conversations with turns of tools, instead of skipping those rows"
    )


@dataclass(frozen=True)
class DrafterOptions:
    kind: str = knob(
        "model",
        "a model of its own, or a head: a layer or two that read the target's hidden states (EAGLE)",
        choices=("model", "head"),
    )
    features: str = knob(
        LAST,
        "what a head reads of the target: its last hidden state, or those of three layers (EAGLE-3), only for ONNX files",
        choices=(LAST, THREE),
    )
    size_fraction: float = knob(
        0.0164,
        "the drafter's size as a share of the target's: parameters; where the target has a hidden size below 1,024 and more "
        "than 32,768 tokens: cost of a step",
        at_least=1e-6,
        at_most=1.0,
    )
    layers: int | None = knob(None, "number of layers instead of the rule's", at_least=1)
    hidden: int | None = knob(None, "hidden size instead of the rule's", at_least=64)
    vocabulary: int | None = knob(
        None,
        "keep this many of the target's tokens, the most frequent ones; it never proposes the others (default: all. A head: "
        "those that cover 98 % of the target's text. A model for a target with a hidden size below 1,024 and more than 32,768 "
        "tokens: those that cover 98 %, a quarter at most)",
        at_least=16,
    )
    init: str = knob(
        "random",
        "first weights: random, cut out of the target (weight subcloning), random except for token tables made from the "
        "target's (principal components), or a local checkpoint",
        choices=("random", "subclone", "components", "checkpoint"),
    )
    checkpoint: str = knob(
        "", "model folder or head to start from, made for the target, where init is checkpoint"
    )


@dataclass(frozen=True)
class TrainingOptions:
    """What every training has: AdamW under WarmupDecayLR."""

    steps: int = knob(1000, "optimizer steps; 0 leaves the stage out", at_least=0)
    batch_size: int = knob(16, "sequences in a step, over all processes", at_least=1)
    micro_batch_size: int | None = knob(
        None, "sequences in one pass, where a step's share of one process does not fit in memory", at_least=1
    )
    context: int = knob(512, "tokens in a sequence", at_least=64)
    learning_rate: float = knob(1e-3, "peak learning rate", at_least=0.0)
    min_learning_rate: float = knob(1e-6, "learning rate at the last step, the peak at most", at_least=0.0)
    warmup_steps: int = knob(100, "linear warm-up steps", at_least=0)
    weight_decay: float = knob(0.1, "AdamW weight decay", at_least=0.0)
    save_steps: int = knob(200, "optimizer steps between resumable checkpoints", at_least=1)


@dataclass(frozen=True)
class TuneOptions(TrainingOptions):
    """Tuning the target to a task, or a target from a larger one, before anything else (AdaSPEC, section 4)."""

    steps: int = with_default(TrainingOptions, "steps", 0)
    learning_rate: float = with_default(TrainingOptions, "learning_rate", 1e-5)
    weight_decay: float = with_default(TrainingOptions, "weight_decay", 0.0)
    conversations: str = knob("", "conversations with responses to learn; any instruction format")
    teacher: str = knob(
        "", "a larger target (alias, hub id, folder) to distil from; without one the responses are the labels"
    )


@dataclass(frozen=True)
class PretrainOptions(TrainingOptions):
    text: tuple[str, ...] = knob(
        (PYTHON_STDLIB,),
        "plain text: .txt and .jsonl ('text') (gz too), .parquet, a folder of such, hub:NAME[:SPLIT[:FIELD]], python-stdlib, or "
        "self: the target's own; several sources are read in turn, one document each",
    )
    self_tokens: int = knob(
        200_000, "tokens of running text that the target writes, where text names self", at_least=1
    )


@dataclass(frozen=True)
class GenerateOptions:
    instructions: tuple[str, ...] = knob(
        (PYTHON_STDLIB,),
        "seed instructions: .jsonl, .json or .parquet in any known format (alpaca, dolly, ...), python-stdlib, or self: the "
        "target's own; several sources are read in turn, one instruction each",
    )
    prompts: int = knob(
        2000, "how many seed instructions the target answers (reused in turn if there are fewer)", at_least=1
    )
    self_instructions: int | None = knob(
        None,
        "instructions that the target writes, where they are its own (default: one for each prompt)",
        at_least=1,
    )
    self_openings: tuple[str, ...] = knob(
        (), "first words of the instructions it writes, used in turn (default: it begins freely)", prose=True
    )
    temperatures: tuple[float, ...] = knob(
        (0.0, 0.3, 0.7, 1.0), "sampling temperatures, used in turn", at_least=0.0
    )
    top_p: float = knob(0.95, "nucleus mass", at_least=1e-6, at_most=1.0)
    min_p: float = knob(
        0.0, "least probability of a token, as a share of the highest one", at_least=0.0, at_most=1.0
    )
    system_prompts: tuple[str, ...] = knob(
        ("", "You are a helpful assistant.", "Answer briefly."),
        "system prompts, used in turn ('' for none)",
        prose=True,
    )
    max_new_tokens: int = knob(128, "longest response in tokens", at_least=1)
    batch_size: int = knob(64, "responses sampled together", at_least=1)
    shard_size: int = knob(256, "responses in one resumable shard", at_least=1)
    features: bool = knob(
        False,
        "keep the last hidden state of every token beside the responses, for a head (in torch or from a GGUF file)",
    )


@dataclass(frozen=True)
class ReferenceOptions(TrainingOptions):
    """AdaSPEC's reference: a copy of the drafter, distilled with forward KL on the target's responses."""

    steps: int = with_default(TrainingOptions, "steps", 500)
    learning_rate: float = with_default(TrainingOptions, "learning_rate", 3e-4)
    weight_decay: float = with_default(TrainingOptions, "weight_decay", 0.0)


DIVERGENCES = ("fkl", "rkl", "jsd", "tvd", "tvd++", "lk")
_EQ_2: dict[str, Any] = {"mean": "sequences"}
PRESETS: dict[str, dict[str, Any]] = {
    "seqkd": {**_EQ_2, "labels": "hard", "divergence": "fkl", "fixed_fraction": 0.0, "student_fraction": 0.0},
    "supervised-kd": {**_EQ_2, "divergence": "fkl", "fixed_fraction": 1.0, "student_fraction": 0.0},
    "imitkd": {**_EQ_2, "divergence": "fkl", "fixed_fraction": 0.5, "student_fraction": 1.0},
    "f-distill": {**_EQ_2, "divergence": "tvd", "fixed_fraction": 0.0, "student_fraction": 0.5},
    "gkd": {**_EQ_2, "divergence": "jsd", "fixed_fraction": 0.0, "student_fraction": 1.0},
}
"""DistillSpec's named points in the space of loss and data (its Eq. 2, Table 1 and Algorithm A.2); text_fraction is apart."""


@dataclass(frozen=True)
class DistillOptions(TrainingOptions):
    preset: str = knob(
        "", "a named choice of loss and data mix; options that you give override it", choices=("", *PRESETS)
    )
    divergence: str = knob(
        "fkl",
        "loss between target p and draft q: forward KL, reverse KL, Jensen-Shannon, total variation distance, TVD++, or LK",
        choices=DIVERGENCES,
    )
    finish: str = knob(
        "",
        "another divergence for the last fifth of the steps (default: the same)",
        choices=("", *DIVERGENCES),
    )
    jsd_beta: float = knob(0.5, "weight of p in the mixture of jsd", at_least=1e-3, at_most=0.999)
    tvdpp_estimator: str = knob(
        "exact", "how tvd++ takes its expectation under q", choices=("exact", "sampled", "uniform")
    )
    tvdpp_scope: str = knob(
        "batch",
        "what tvd++ normalises its rewards over: one token's position, a sequence, or the whole batch",
        choices=("batch", "sequence", "token"),
    )
    mean: str = knob(
        "tokens",
        "how a batch is averaged: all its tokens alike, or over each sequence's tokens and then over the sequences, which "
        "DistillSpec's presets do",
        choices=("tokens", "sequences"),
    )
    labels: str = knob(
        "soft",
        "learn the target's distributions (soft) or the written tokens (hard)",
        choices=("soft", "hard"),
    )
    batch_size: int = with_default(TrainingOptions, "batch_size", 40)
    text_fraction: float = knob(
        0.1, "share of every batch that is pretraining text", at_least=0.0, at_most=1.0
    )
    fixed: str = knob(
        "", "conversations with responses of other models or of people (DistillSpec's fixed data)"
    )
    fixed_fraction: float = knob(
        0.0, "λ1: of the rows that are not text, the share of fixed data", at_least=0.0, at_most=1.0
    )
    student_fraction: float = knob(
        0.0,
        "λ2: of the rows that are neither text nor fixed data, the share that the drafter writes while it trains; the target "
        "wrote the others",
        at_least=0.0,
        at_most=1.0,
    )
    student_temperature: float = knob(
        1.0, "sampling temperature of the drafter's own responses", at_least=0.0
    )
    student_max_new_tokens: int = knob(64, "longest response of the drafter's own in tokens", at_least=1)
    target_side: str = knob(
        "live",
        "the target's distributions: computed live, or read from a stored top-k-plus-remainder cache",
        choices=("live", "stored"),
    )
    against: str = knob(
        "",
        "learn from the target with its weights rounded as in this ONNX or GGUF precision (default: not rounded)",
        choices=("", *WHOLE_PRECISIONS),
    )
    stored_top_k: int = knob(64, "tokens stored for a position; the rest share the remainder", at_least=1)
    select_fraction: float = knob(
        1.0, "AdaSPEC's k: learn from this share of a batch's tokens only", at_least=1e-6, at_most=1.0
    )
    unrolled_steps: int = knob(
        3,
        "head: draft steps in a row that are trained, each on the hidden states of the step before (EAGLE-3)",
        at_least=1,
    )
    scale_learning_rate: bool = knob(True, "multiply the learning rate by k (AdaSPEC's linear scaling rule)")
    learning_rate: float = with_default(TrainingOptions, "learning_rate", 3e-4)
    weight_decay: float = with_default(TrainingOptions, "weight_decay", 0.0)
    watch_steps: int = knob(
        50, "steps between measurements of the acceptance rate on held-out responses; 0 for none", at_least=0
    )
    watch_rows: int = knob(4, "held-out rows on which watch_steps measures", at_least=1)
    keep_steps: int = knob(
        0, "steps between drafters kept as models of their own; 0 keeps the last", at_least=0
    )

    @property
    def losses(self) -> str:
        """The divergence, and the one that finishes, in words; with hard labels the likelihood of the written tokens."""
        if self.labels == "hard":
            return "nll"
        return f"{self.divergence}, then {self.finish}" if self.finish else self.divergence


@dataclass(frozen=True)
class EvaluateOptions:
    prompts_file: str = knob(
        PYTHON_STDLIB,
        "held-out prompts: .jsonl, .json or .parquet in any known format, python-stdlib, or self: the target's own",
    )
    prompts: int = knob(48, "held-out prompts", at_least=2)
    max_new_tokens: int = knob(64, "tokens generated for a prompt", at_least=2)
    draft_lengths: tuple[int, ...] = knob((3, 5), "draft lengths γ", at_least=1)
    batch_size: int = knob(48, "prompts decoded together", at_least=1)


@dataclass(frozen=True)
class ExportOptions:
    onnx: tuple[str, ...] = knob(("fp32", "int4"), "ONNX precisions", choices=PRECISIONS["onnx"])
    gguf: tuple[str, ...] = knob(("f16", "q8_0"), "GGUF precisions", choices=PRECISIONS["gguf"])
    bits: float | None = knob(
        None, "mixed files: bits of a weight on average, all tables counted", at_least=2.0, at_most=16.0
    )
    size: str = knob(
        "", "mixed files: size of the target's file at most, as 90MB; the drafter's follows quality"
    )
    quality: float | None = knob(
        None,
        "mixed files: the smallest that keeps this share of the target's most likely tokens on text held out (default 0.95, "
        "where neither bits nor size is given)",
        at_least=0.0,
        at_most=1.0,
    )
    npu: tuple[str, ...] = knob((), "precisions of static graphs for NPUs", choices=PRECISIONS["npu"])
    npu_length: int = knob(
        1024,
        "static graphs: tokens of the KV cache, the longest text (at most the model's context)",
        at_least=2,
    )
    npu_prefill: int = knob(
        64, "static graphs: tokens of the graph that reads a prompt", at_least=2, at_most=4096
    )
    npu_gamma: int = knob(
        3,
        "static graphs: draft tokens of the graph that verifies, besides the token before them",
        at_least=1,
        at_most=64,
    )
    context: int | None = knob(
        None, "tokens of context that a device's memory is planned for (default: its profile's)", at_least=2
    )
    verify_prompts: int = knob(8, "held-out prompts on which every file is compared with torch", at_least=1)
    answer_replies: int = knob(16, "replies that each file reads for its verdict; 0: none", at_least=0)
    acceptance_prompts: int = knob(16, "prompts that the exported pairs decode; 0 for none", at_least=0)
    bundle_prompts: int = knob(64, "held-out prompts that travel in the bundle, for bench", at_least=1)


@dataclass(frozen=True)
class Recipe:
    target: str = knob(
        help="alias (edgespec targets list), hub id, local folder in Hugging Face layout, or GGUF file"
    )
    seed: int = knob(0, "seed of every random choice", at_least=0, at_most=MOST_SEED)
    device: str = knob(
        "",
        "device profile (edgespec plan --devices): which files are exported, and how chat and bench run them: {names}",
        names=device_entries,
    )
    inference: InferenceOptions = section(
        InferenceOptions, "how the target runs where it writes responses and distributions"
    )
    data: DataOptions = section(DataOptions, "how instructions, prompts and conversations are read")
    drafter: DrafterOptions = section(DrafterOptions, "shape of the drafter")
    tune: TuneOptions = section(
        TuneOptions, "tune the target before anything else (off unless steps are given)"
    )
    pretrain: PretrainOptions = section(PretrainOptions, "next-token training of the drafter on plain text")
    generate: GenerateOptions = section(GenerateOptions, "the target writes responses to seed instructions")
    reference: ReferenceOptions = section(
        ReferenceOptions, "AdaSPEC's reference model, made where distill.select_fraction is below 1"
    )
    distill: DistillOptions = section(DistillOptions, "white-box distillation on those responses")
    evaluate: EvaluateOptions = section(
        EvaluateOptions, "acceptance and block efficiency in torch on held-out prompts"
    )
    export: ExportOptions = section(ExportOptions, "files for the device")
