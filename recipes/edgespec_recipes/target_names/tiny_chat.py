"""tiny-chat, the offline target: a chat model of a few million parameters that edgespec trains itself, once.

Its recipe is configs/target-tiny-chat.yaml, its text the offline corpus's training part. It lies in the cache folder under a name
that carries a hash of recipe and corpus, so that a changed recipe is never answered with an old model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from edgespec.core.files import read_jsonl, write_json, write_text
from edgespec.core.folder_lock import held
from edgespec.core.options import from_mapping, to_mapping
from edgespec.core.progress import progress
from edgespec.recipe.schema import TrainingOptions
from edgespec.recipe.shipped import made_target
from edgespec.recipe.targets import TINY_CHAT, made_shape
from edgespec.shell.environment import cache_folder
from edgespec.stages.stage import STAGE_FILE, run_stage
from edgespec_recipes.data.corpus import BEST_KNOWN, SMALL_TALK, corpus_folder, stdlib_corpus
from edgespec_recipes.data.prompts import plain_ids
from edgespec_recipes.data.token_rows import PADDING, Batch, Rows, inputs_of, pack_conversations, tokenise
from edgespec_recipes.models.loading import load_tokenizer
from edgespec_recipes.training.trainer import save_whole, train

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
START, TURN_END, PADDING_ID = 0, 2, 3
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Answer briefly.")


@dataclass(frozen=True)
class TinyChatOptions(TrainingOptions):
    vocab_size: int = 4096  # byte-level BPE tokens, special ones included
    hidden: int = 256
    layers: int = 3
    intermediate: int = 768
    heads: int = 4
    kv_heads: int = 2
    context_length: int = 1024
    initializer_range: float = 0.08
    other_weight: float = 0.1  # questions about a less known fact for one about a core fact
    small_talk_weight: float = 4.0  # greetings and the like, for one too
    system_share: float = 0.2  # of chats with a system prompt
    long_chat_share: float = 0.5  # of the rows: those whose chats follow one another as turns of one
    text_share: float = 0.05  # of the rows: source text
    seed: int = 0


def tiny_chat_options() -> TinyChatOptions:
    """The shipped recipe."""
    return from_mapping(TinyChatOptions, made_target(TINY_CHAT))


def tiny_chat_folder(options: TinyChatOptions) -> Path:
    """Where the model of this recipe lies, made or not."""
    key = json.dumps([to_mapping(options), corpus_folder().name], sort_keys=True).encode()
    return cache_folder() / "targets" / f"{TINY_CHAT}-{hashlib.sha256(key).hexdigest()[:8]}"


def build_tiny_chat(options: TinyChatOptions | None = None) -> Path:
    """The model folder; trained on first use (minutes), resumed where a run was killed, by one process at a time."""
    options = options or tiny_chat_options()
    out = tiny_chat_folder(options)
    if not (out / STAGE_FILE).exists():
        with held(out, "making tiny-chat", wait=True):
            run_stage(out, to_mapping(options), lambda folder: _build(folder, options))
    return out / "model"


def _build(out: Path, options: TinyChatOptions) -> dict[str, Any]:
    corpus = stdlib_corpus()
    chats = read_jsonl(corpus / "train_chats.jsonl")
    tokenizer_folder = out / "tokenizer"
    if not (tokenizer_folder / "tokenizer_config.json").is_file():
        make_tokenizer(tokenizer_folder, chats, corpus, options)
    tokenizer = load_tokenizer(tokenizer_folder)
    data = training_rows(chats, corpus, tokenizer, options)
    model = new_model(options)
    label = "train tiny-chat"
    counts = train(model, data, chat_losses, out, options, seed=options.seed, label=label)
    save_whole(model, tokenizer_folder, out / "model")
    return {"parameters": model.num_parameters(), **counts}


def trained_bpe(texts: Iterable[str], vocab_size: int, specials: Sequence[str]) -> Any:
    """A byte-level BPE with GPT-2's pre-tokenizer, the one llama.cpp knows as 'gpt-2', of at most `vocab_size` tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def make_tokenizer(folder: Path, chats: list[dict[str, Any]], corpus: Path, options: TinyChatOptions) -> None:
    """Train tiny-chat's tokenizer and write its files."""
    contents = (message["content"] for row in chats for message in row["messages"])
    texts = chain(contents, (row["text"] for row in read_jsonl(corpus / "text.jsonl")[::8]))
    with progress("learn the vocabulary", total=1, unit="tokenizers") as bar:
        tokenizer = trained_bpe(texts, options.vocab_size, SPECIALS)
        bar.update(1)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIALS[START],
        "eos_token": SPECIALS[TURN_END],
        "pad_token": SPECIALS[PADDING_ID],
        "model_max_length": options.context_length,
        "clean_up_tokenization_spaces": False,
    }
    write_settings(folder, settings, TEMPLATE)


def write_settings(folder: Path, settings: dict[str, Any], template: str) -> None:
    """tokenizer_config.json, and the chat template there and in a file of its own."""
    write_text(folder / "chat_template.jinja", template)
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template})


def weight_of(row: dict[str, Any], options: TinyChatOptions) -> float:
    """How often a fact is asked for in an epoch, on average.

    The core is what people ask first: the language, the best-known packages, the built-in types with their methods.
    """
    if row["kind"] == SMALL_TALK:
        return options.small_talk_weight
    core = row["package"] in BEST_KNOWN and (row["kind"] != "method" or row["package"] == "builtins")
    return 1.0 if core or row["kind"] == "topic" else options.other_weight


def training_rows(
    chats: list[dict[str, Any]], corpus: Path, tokenizer: Any, options: TinyChatOptions
) -> Rows:
    """steps x batch_size packed rows in training order: epochs of chats, each asked anew, and source text in between."""
    generator = np.random.default_rng(options.seed)
    total = options.steps * options.batch_size
    facts: dict[str, list[int]] = {}
    for index, row in enumerate(chats):
        facts.setdefault(row["name"], []).append(index)
    asked = list(facts.values())
    weights = np.asarray([weight_of(chats[group[0]], options) for group in asked])
    encoded = encoded_chats(chats, tokenizer)
    systems = [plain_ids(tokenizer, f"<|im_start|>system\n{text}<|im_end|>\n") for text in SYSTEM_PROMPTS]

    def asked_anew(fact: int) -> tuple[list[int], list[int]]:
        prompt, response = encoded[int(generator.choice(asked[fact]))]
        if generator.random() < options.system_share:
            prompt = systems[generator.integers(len(systems))] + prompt
        return prompt, response

    epochs: list[dict[str, np.ndarray]] = []
    wanted = total - round(total * options.text_share)
    with progress("prepare chats", total=wanted, unit="rows") as bar:
        while bar.n < wanted:
            times = np.floor(weights + generator.random(len(weights))).astype(int)
            order = generator.permutation(np.repeat(np.arange(len(asked)), times))
            packed = pack_conversations([asked_anew(fact) for fact in order], options.context, PADDING_ID)
            _join_turns(packed, generator.random(len(packed["input_ids"])) < options.long_chat_share)
            shuffled = generator.permutation(len(packed["input_ids"]))
            epochs.append({name: array[shuffled] for name, array in packed.items()})
            bar.update(min(len(shuffled), wanted - bar.n))
    merged = {name: np.concatenate([epoch[name] for epoch in epochs])[:wanted] for name in epochs[0]}
    if count := total - wanted:
        blocks = _text_blocks(corpus, tokenizer, count, options)
        text = pack_conversations([([], block) for block in blocks.tolist()], options.context)
        # spread evenly among the rows of chats
        place = np.concatenate([np.linspace(0, total, wanted), np.linspace(0, total, count)])
        order = np.argsort(place, kind="stable")
        merged = {name: np.concatenate([merged[name], text[name]])[order] for name in merged}
    return Rows(merged)


def _join_turns(packed: dict[str, np.ndarray], rows: np.ndarray) -> None:
    """Make the conversations of these rows [n] (bool) turns of one: each may then look at those before it."""
    real = rows[:, None] & (packed["document_ids"] != PADDING)
    packed["document_ids"][real] = 0
    packed["position_ids"][real] = np.broadcast_to(np.arange(real.shape[1]), real.shape)[real]


def _text_blocks(corpus: Path, tokenizer: Any, count: int, options: TinyChatOptions) -> np.ndarray:
    """[count, context] tokens of source text from documents drawn at random (over again where there are too few)."""
    documents = read_jsonl(corpus / "text.jsonl")
    order = np.random.default_rng(options.seed).permutation(len(documents))
    ids = chain.from_iterable(tokenise((documents[index]["text"] for index in order), tokenizer))
    return np.resize(np.asarray([*islice(ids, count * options.context)], np.int64), (count, options.context))


def encoded_chats(chats: list[dict[str, Any]], tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) ids of chats as the template renders them: its pieces are special tokens and whole lines."""
    texts = [message["content"] for row in chats for message in row["messages"]]
    ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    pieces = ("<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n")
    user, assistant, end = (plain_ids(tokenizer, piece) for piece in pieces)
    return [
        ([*user, *question, *end, *assistant], [*answer, *end])
        for question, answer in zip(ids[::2], ids[1::2], strict=True)
    ]


def new_model(options: TinyChatOptions) -> Any:
    """A Llama with random weights from the recipe's seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(options.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            **made_shape(vars(options)).to_config(),
            initializer_range=options.initializer_range,
            bos_token_id=START,
            eos_token_id=TURN_END,
            pad_token_id=PADDING_ID,
        )
    )


def chat_losses(model: Any, batches: Sequence[Batch]) -> Iterator[torch.Tensor]:
    """Mean next-token cross-entropy over the tokens in loss_mask, a micro-batch at a time, in one process.

    Logits are computed for those tokens only.
    """
    count = sum(int(batch["loss_mask"][:, 1:].sum()) for batch in batches)
    for batch in batches:
        hidden = model.model(**inputs_of(batch), use_cache=False).last_hidden_state
        learnt = batch["loss_mask"][:, 1:]
        logits = model.lm_head(hidden[:, :-1][learnt]).float()
        yield functional.cross_entropy(logits, batch["input_ids"][:, 1:][learnt], reduction="sum") / count
