"""Small random model folders in Hugging Face layout, made in a second: for tests of export and engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TRAINING_TEXT = Path(__file__).with_name("tokenizer_text.txt")
TEXTS = [
    "Hello world",
    " leading and  double   spaces \n\n new lines\t tabs",
    "naïve café, Zürich, 日本語のテキスト, Привет, שלום, 🙂👩‍🚀",
    "def f(x):\n    return x ** 2 + 12345.678  # it's we'll they've I'M",
    "1 22 333 4444 55555 1,234,567",
    "UPPER CamelCase snake_case --flags=/a/path?q=1&b=2",
    "",
]


def byte_level_tokenizer(vocab_size: int = 512) -> Tokenizer:
    """A byte-level BPE with four special tokens, trained on a few lines of text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        Path(models.__file__ or __file__).read_text(errors="ignore"),
        *TEXTS,
        TRAINING_TEXT.read_text(),  # fixed: an edit of this file must not change every model's tokens
    ] * 2
    corpus.append(Path(json.__file__ or "").read_text())
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIALS[0], eos_token=SPECIALS[2], pad_token=SPECIALS[3]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.update(tokenizer_class="PreTrainedTokenizerFast", chat_template=TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def tokenizer_folder(
    folder: Path, tokenizer: Tokenizer, template: str | None = TEMPLATE, **config: object
) -> Path:
    """What a chat needs of a tokenizer, and no more."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **config}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def make_model_folder(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    intermediate: int = 160,
    theta: float = 10000.0,
    tied: bool = True,
    context: int = 256,
    vocab_size: int = 512,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """A random model whose logits spread like a trained one's (weights wider than the default initialisation).

    `settings` are the family's own, as its config class names them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer(vocab_size)
    if "rope_parameters" not in settings:
        settings["rope_theta"] = theta
    config = AutoConfig.for_model(
        family,
        **settings,
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=3,
        initializer_range=0.12,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases away from their trivial values
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    saved = json.loads((folder / "config.json").read_text())
    if "rope_parameters" not in settings or "rope_theta" in settings["rope_parameters"]:
        saved["rope_theta"] = theta  # as folders of transformers before 5 have it
    (folder / "config.json").write_text(json.dumps(saved, indent=2))
    save_tokenizer(folder, tokenizer)
    return folder


def torch_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """[n, V] float32 logits of the reference."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits
