"""What a recipe costs before it runs: tokens, FLOPs, memory and disk of every stage. Arithmetic only, nothing is read or made but
the target's config.

At most: every response is taken to have its full length, every position of a row to be compared, no draft token to be accepted.
Prompts are not read; their length is assumed. One process; of a step only as much is in memory as goes through in one pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from edgespec.core.options import from_mapping
from edgespec.core.shapes import ModelShape
from edgespec.model_folder.head import THREE
from edgespec.planning import costs, export_costs
from edgespec.planning.export_costs import files_bytes, largest_passing, rounding_bytes, stages_bytes
from edgespec.recipe.devices import LLAMACPP
from edgespec.recipe.read import own_instructions, own_prompts, read_tokens, reference_options
from edgespec.recipe.sampling import SAMPLINGS
from edgespec.recipe.schema import (
    DOCUMENT_TOKENS,
    INSTRUCTION_TOKENS,
    READ,
    ROUNDED,
    SELF,
    SELF_INSTRUCTIONS,
    SELF_PROMPTS,
    SELF_TEXT,
    STATES,
    DistillOptions,
    InferenceOptions,
    Recipe,
    TrainingOptions,
)
from edgespec.recipe.shipped import made_target
from edgespec.recipe.targets import TINY_CHAT, shape_of_target

PROMPT_TOKENS = costs.PROMPT_TOKENS
LOGITS, GPU_LOGITS = 2**21, 2**26
"""Logits that exist at once in a loss, on a processor and on a GPU."""
LOGIT_COPIES = 11
"""Float32 tensors of that size that JSD and its gradient hold; the others hold fewer, cross-entropy 5."""
STORED_AT_ONCE = 4096
"""Tokens of one pass of the target whose distributions are stored."""
CHECKPOINTS = 3
"""Two are kept while the next one is written."""
ROW_BYTES = 10
"""Of a token in a shard of responses, its id and its part of the text as JSON."""
EVALUATED = 2
"""Drafters measured: pretrained, distilled."""


@dataclass(frozen=True)
class StageCost:
    """One stage: tokens that go through a model, FLOPs, bytes at the peak of memory, and on the disk.

    `disk`: what it leaves there at its largest. `passing`: what lies beside that at most, and is deleted before the stage ends.
    `reading`: bytes of weights and caches that each of its processes reads for one token after another. `on_gpu`: bytes of memory
    that a GPU takes beside `memory`. `on_host`: it runs on the processor, whatever trains.
    """

    stage: str
    tokens: int
    flops: float
    memory: int
    disk: int
    passing: int = 0
    reading: float = 0.0
    on_gpu: int = 0
    on_host: bool = False

    @property
    def folder(self) -> str:
        """The stage's folder in a build: the first word of its name."""
        return self.stage.split()[0]


def disk_peak(stages: Iterable[StageCost]) -> int:
    """The most bytes that stages have on the disk while they run one after another."""
    kept = most = 0
    for stage in stages:
        kept += stage.disk
        most = max(most, kept + stage.passing)
    return most


def _steps_tokens(options: TrainingOptions) -> int:
    return options.steps * options.batch_size * options.context


def _pass_tokens(options: TrainingOptions) -> int:
    return min(options.micro_batch_size or options.batch_size, options.batch_size) * options.context


def _id_bytes(shape: ModelShape) -> int:
    return 2 if shape.vocab_size <= 2**16 else 4


def _loss_bytes(shape: ModelShape, tokens: int, most: int = LOGITS) -> int:
    """Logits a chunk at a time, `most` of them, and the output layer's gradient while it is summed up."""
    logits = LOGIT_COPIES * min(most, shape.vocab_size * tokens)
    return costs.FLOAT * (logits + shape.vocab_size * shape.hidden)


def _training(
    stage: str,
    options: TrainingOptions,
    trained: ModelShape,
    *,
    flops: float = 0.0,
    judges: Sequence[ModelShape] = (),
    masked: bool = True,
    memory: int = 0,
    disk: int = 0,
    passes: int = 1,
) -> StageCost:
    """A training of `trained`, with `judges` that run forward only; `flops`, `memory` and `disk` are what comes on top.

    `passes`: over every token, in one step.
    """
    tokens, at_once = _steps_tokens(options), passes * _pass_tokens(options)
    passing = [costs.passing_activation_bytes(judge, at_once, options.context) for judge in judges]
    needed = (
        costs.training_bytes(trained)
        + costs.saved_activation_bytes(trained, at_once, options.context, masked=masked)
        + _loss_bytes(trained, at_once)
        + sum(costs.weight_bytes(judge) for judge in judges)
        + max(passing, default=0)
    )
    kept = CHECKPOINTS * costs.checkpoint_bytes(trained) + costs.weight_bytes(trained)
    total = flops + costs.training_flops(trained, passes * tokens, options.context)
    more = _loss_bytes(trained, at_once, GPU_LOGITS) - _loss_bytes(trained, at_once)
    return StageCost(stage, tokens, total, needed + memory, kept + disk, on_gpu=more)


def bytes_a_weight(how: InferenceOptions, target: ModelShape) -> float:
    """Of the target where it only runs. A file is taken to be Q4_0 unless its precision is given; a server has its own memory."""
    if how.source == "server":
        return 0.0
    if how.source == "file":
        precision = how.precision if how.precision in costs.EXPORTED_BYTES else "q4_0"
        return costs.exported_bytes(target, precision) / target.parameters
    if how.bits is not None:
        return how.bits / 8
    return costs.FLOAT if how.dtype == "float32" else 2


def inference_bytes(how: InferenceOptions, target: ModelShape) -> int:
    """Memory of the target's weights where it only runs. Spread over devices (max_memory), what cannot be spread: its tables."""
    spread = how.source == "torch" and how.bits is None and how.max_memory
    weights = 2 * target.embedding_parameters if spread else target.parameters
    return round(bytes_a_weight(how, target) * weights)


def in_torch(recipe: Recipe) -> Recipe:
    """The recipe for stages that run the target in torch, whatever it writes from."""
    return replace(recipe, inference=replace(recipe.inference, source="torch"))


def _here(cost: StageCost, how: InferenceOptions) -> StageCost:
    """What the target's run costs on this hardware: a server computes on its own."""
    return replace(cost, flops=0.0, memory=0, reading=0.0) if how.source == "server" else cost


def _made_target() -> StageCost:
    made = made_target(TINY_CHAT)
    known = {name: made[name] for name in TrainingOptions.__dataclass_fields__ if name in made}
    options = from_mapping(TrainingOptions, known)
    return _training(f"target {TINY_CHAT}, once", options, shape_of_target(TINY_CHAT))


def _tune(recipe: Recipe, target: ModelShape) -> StageCost:
    options = recipe.tune
    teachers = [shape_of_target(options.teacher)] if options.teacher else []
    flops = sum(costs.forward_flops(teacher, _steps_tokens(options), options.context) for teacher in teachers)
    return _training("tune", options, target, flops=flops, judges=teachers)


@dataclass(frozen=True)
class Writing:
    """A stage in which the target writes: so many texts, of so many new tokens each."""

    stage: str
    texts: int
    new: int


def writings(recipe: Recipe) -> list[Writing]:
    """The stages in which the target writes, in order. Of its own data every sample is taken to be usable."""
    generate, pretrain, found = recipe.generate, recipe.pretrain, []
    if SELF in pretrain.text and recipe.drafter.kind == "model":
        found.append(Writing(SELF_TEXT, -(-pretrain.self_tokens // DOCUMENT_TOKENS), DOCUMENT_TOKENS))
    if SELF in generate.instructions:
        found.append(Writing(SELF_INSTRUCTIONS, own_instructions(generate), INSTRUCTION_TOKENS))
    if recipe.evaluate.prompts_file == SELF:
        found.append(Writing(SELF_PROMPTS, own_prompts(recipe), INSTRUCTION_TOKENS))
    return [*found, Writing("generate", generate.prompts, generate.max_new_tokens)]


def _written(recipe: Recipe, writing: Writing, target: ModelShape, processes: int) -> StageCost:
    how, new, length = recipe.inference, writing.new, PROMPT_TOKENS + writing.new
    rows = min(recipe.generate.batch_size, writing.texts)
    cache_bytes = costs.file_cache_bytes if how.source == "file" else costs.cache_bytes
    at_once = costs.file_rows(target, rows, length) if how.source == "file" else rows
    batches = math.ceil(writing.texts / (at_once * processes))
    cost = StageCost(
        writing.stage,
        writing.texts * length,
        costs.decoding_flops(target, writing.texts, PROMPT_TOKENS, new),
        inference_bytes(how, target)
        + cache_bytes(target, rows, length)
        + costs.sampling_bytes(target, rows)
        + costs.passing_activation_bytes(target, rows * PROMPT_TOKENS, PROMPT_TOKENS),
        ROW_BYTES * writing.texts * length,
        reading=batches * costs.decoding_bytes(target, bytes_a_weight(how, target), at_once, new),
    )
    return _here(cost, how)


def _states_bytes(recipe: Recipe, target: ModelShape) -> int:
    """Of one token: what a head reads of it in float16, and its distribution."""
    states = 3 if recipe.drafter.features == THREE else 1
    return 2 * states * target.hidden + stored_position_bytes(target, recipe.distill.stored_top_k)


def stored_position_bytes(target: ModelShape, top_k: int) -> int:
    """An id and a float16 for each of the top k tokens, and a float16 for the rest."""
    return top_k * (_id_bytes(target) + 2) + 2


def _read(
    recipe: Recipe, target: ModelShape, name: str, tokens: int, kept: int, logits: int | None = None
) -> StageCost:
    """One pass of the target over finished text, of which `kept` bytes stay; `logits`: positions that have them (all)."""
    context = recipe.distill.context
    cost = StageCost(
        name,
        tokens,
        costs.forward_flops(target, tokens, context, logits),
        inference_bytes(recipe.inference, target)
        + costs.passing_activation_bytes(target, STORED_AT_ONCE, context)
        + costs.FLOAT * target.vocab_size * STORED_AT_ONCE,
        kept,
    )
    return _here(cost, recipe.inference)


def _distill(
    stage: str,
    options: DistillOptions,
    recipe: Recipe,
    target: ModelShape,
    drafter: ModelShape,
    processes: int,
) -> StageCost:
    """The drafter's training, and what it is held against.

    The target runs over every row that is not stored, and is there where some are not. For a head all are, and of the target only
    the embedding is there; each of its own steps is a pass over all tokens. TVD++'s mean reward and the selection look at all
    logits once before the gradient; the selection runs the reference too. In micro-batches that look takes another pass of the
    drafter over all of them but the first, and the target's hidden states wait for the gradient. Rows of the drafter's own are
    decoded token by token first.
    """
    passes = options.unrolled_steps if drafter.joins else 1
    tokens, at_once = passes * _steps_tokens(options), passes * _pass_tokens(options)
    context = options.context
    rest = (1 - options.text_fraction) * (1 - options.fixed_fraction)
    student = rest * options.student_fraction
    stored = 1.0 if drafter.joins else 0.0 if options.target_side == "live" else rest - student
    live = 1.0 - stored
    runs = [target] if live else []
    soft, selects = options.labels == "soft", options.select_fraction < 1
    looks = soft and (
        selects or ("tvd++" in (options.divergence, options.finish) and options.tvdpp_scope != "token")
    )
    share = passes * options.batch_size // processes * context  # of one process, a step
    later = max(0, share - at_once) * looks  # tokens of it that are looked at ahead
    flops = looks * costs.output_flops(drafter, tokens)
    flops += costs.forward_flops(drafter, options.steps * processes * later, context, logits=0)
    if soft:
        heads = 1 + looks + selects
        flops += live * costs.forward_flops(target, tokens, context, logits=0)
        flops += live * heads * costs.output_flops(target, tokens)
    if selects:
        flops += costs.forward_flops(drafter, tokens, context)
    if options.watch_steps:
        watched = passes * (options.steps // options.watch_steps) * options.watch_rows * context
        flops += sum(costs.forward_flops(model, watched, context) for model in (*runs, drafter))
    memory = inference_bytes(recipe.inference, target) - costs.weight_bytes(target)
    if not runs:
        memory = costs.FLOAT * target.embedding_parameters if drafter.joins else 0
    memory += round(live * later) * target.hidden * costs.FLOAT
    if student:
        length = PROMPT_TOKENS + options.student_max_new_tokens
        rows = max(1, at_once // length)
        flops += costs.forward_flops(drafter, student * tokens, length)
        memory += costs.cache_bytes(drafter, rows, length) + costs.sampling_bytes(drafter, rows)
    own_text = stage == "distill" and not recipe.pretrain.steps
    disk = _id_bytes(drafter) * options.text_fraction * tokens if own_text else 0.0
    if options.keep_steps:
        disk += options.steps // options.keep_steps * costs.weight_bytes(drafter)
    judges = [*runs, *([drafter] if selects else [])]
    return _training(
        stage, options, drafter, flops=flops, judges=judges, memory=memory, disk=round(disk), passes=passes
    )


def _evaluate(recipe: Recipe, target: ModelShape, drafter: ModelShape, own: int | None) -> StageCost:
    """Plain decoding, teacher forcing, and speculation at every draft length γ: γ draft steps and γ + 1 positions a token."""
    options, how = recipe.evaluate, in_torch(recipe).inference
    weights, each = inference_bytes(how, target), bytes_a_weight(how, target)
    at_once, drafters = options.batch_size, EVALUATED
    if drafter.joins:  # alone, prompt by prompt, on the first of the exported files
        file, at_once, drafters = export_costs.files_of(recipe.export)[0], 1, 1
        weights = export_costs.opened_bytes(target, [file])
        each = costs.file_bytes(target, *file, streamed=True) / target.streamed_parameters
        if own is not None and file[0] == LLAMACPP:
            weights, each = own, own / target.parameters
    longest, prompts = options.max_new_tokens, options.prompts
    length, new = PROMPT_TOKENS + longest, prompts * longest
    flops, tokens = costs.decoding_flops(target, prompts, PROMPT_TOKENS, longest), prompts * length
    for model, extra in ((target, 1), (drafter, 0)):
        checked = new * sum(gamma + extra for gamma in options.draft_lengths)
        read = prompts * (length + len(options.draft_lengths) * PROMPT_TOKENS)
        flops += drafters * costs.forward_flops(model, checked + read, length)
        tokens += drafters * (checked + read)
    rows, memory = min(at_once, prompts), weights + costs.weight_bytes(drafter)
    memory += sum(costs.cache_bytes(model, rows, length) for model in (target, drafter))
    memory += costs.sampling_bytes(target, 2 * rows * (max(options.draft_lengths) + 1))
    plain = costs.decoding_bytes(target, each, at_once, longest)
    drafted = costs.decoding_bytes(drafter, costs.FLOAT, at_once, longest)
    speculative = sum(plain + (gamma + 1) * drafted for gamma in options.draft_lengths)
    reading = math.ceil(prompts / at_once) * (plain + drafters * speculative)
    times, host = len(SAMPLINGS), drafter.joins
    return StageCost("evaluate", times * tokens, times * flops, memory, 0, 0, times * reading, on_host=host)


def estimate(
    recipe: Recipe,
    target: ModelShape,
    drafter: ModelShape,
    processes: int = 1,
    own: int | None = None,
    *,
    alike: bool = True,
) -> list[StageCost]:
    """Every stage that costs something, in order: FLOPs of all processes, memory of one.

    `recipe` is what one of the processes meets (plan_stages.for_processes); `own` as of `files_bytes`, `alike` as of
    `costs.building_bytes`. Raises InputError where a teacher's shape is not known here.
    """
    distill, head = recipe.distill, recipe.drafter.kind == "head"
    positions = recipe.generate.prompts * recipe.generate.max_new_tokens
    stored, position = distill.target_side == "stored", stored_position_bytes(target, distill.stored_top_k)
    stages = [_made_target()] if recipe.target == TINY_CHAT else []
    if recipe.tune.steps:
        stages.append(_tune(recipe, target))
    *first, answers = (_written(recipe, writing, target, processes) for writing in writings(recipe))
    stages += first
    if recipe.pretrain.steps and not head:
        text = _id_bytes(drafter) * _steps_tokens(recipe.pretrain)
        cost = _training("pretrain", recipe.pretrain, drafter, masked=False, disk=text)
        if recipe.drafter.init == "subclone":
            cost = replace(cost, memory=max(cost.memory, costs.cutting_bytes(target, drafter)))
        stages.append(cost)
    states = _states_bytes(recipe, target)
    again = head and recipe.drafter.features == THREE
    if head and not again:  # kept while the target writes
        answers = replace(answers, disk=answers.disk + states * answers.tokens)
    elif stored and not head and recipe.inference.source == "file":  # its distributions too
        answers = replace(answers, disk=answers.disk + position * positions)
    stages.append(answers)
    if again:
        stages.append(_read(in_torch(recipe), target, STATES, answers.tokens, states * answers.tokens))
    if head and distill.fixed_fraction:
        tokens = read_tokens(distill)
        stages.append(_read(in_torch(recipe), target, READ, tokens, states * tokens))
    if distill.against:
        # the file is made, and the folder has the weights once more
        rounding, beside = rounding_bytes(target, distill.against, alike=alike)
        stages.append(StageCost(ROUNDED, 0, 0.0, rounding, costs.weight_bytes(target), beside))
    if stored and not head:
        stages.append(_read(recipe, target, "store", answers.tokens, position * positions, logits=positions))
    if distill.select_fraction < 1 and recipe.reference.steps:
        options = reference_options(recipe)
        stages.append(_distill("reference", options, recipe, target, drafter, processes))
    if distill.steps:
        stages.append(_distill("distill", distill, recipe, target, drafter, processes))
    export, files = recipe.export, files_bytes(recipe.export, (target, drafter), own)
    memory, passing = stages_bytes(export, target, own, alike=alike), largest_passing(export, target, own)
    checkpoint = 0 if recipe.device else costs.weight_bytes(drafter)
    return [
        *stages,
        _evaluate(recipe, target, drafter, own),
        StageCost("export", 0, 0.0, memory["export"], files, passing),
        StageCost("verify", 0, 0.0, memory["verify"], 0),
        StageCost("pack", 0, 0.0, 0, files + checkpoint),  # the bundle's copies
    ]
