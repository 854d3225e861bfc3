"""A model folder as optimum-onnx writes it: a plain graph, past and present as inputs and outputs, for ORTModelForCausalLM.

Runs in an environment of its own (`python3 make.py optimum`): optimum-onnx 0.1.0 needs transformers 4.57, the rest of edgespec is
tested with 5. Every graph is loaded again and held against torch before it gets its name. Knows nothing of bundles; edgespec's
own engine runs the other graph (to_onnx.py), which updates its cache in place.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgespec.core.errors import CheckFailed, EdgespecError, InputError
from edgespec.core.families import family_named
from edgespec.core.files import read_json, whole_folder
from edgespec.core.folder_lock import refuse_other
from edgespec.core.options import from_mapping, knob
from edgespec.core.output import json_knob, write_result
from edgespec.core.progress import progress
from edgespec.model_folder.chat_template import copy_tokenizer

TASK = "text-generation-with-past"
LOGITS_BOUND = 1e-4  # largest difference of a logit to torch, both float32


@dataclass(frozen=True, kw_only=True)
class Options:
    model: str = knob(
        help="model folder in Hugging Face layout, the target's or the drafter's", positional=True
    )
    out: str = knob(help="folder to write", positional=True)
    new_tokens: int = knob(32, "tokens of greedy text compared with torch", at_least=1)
    json: str = json_knob()


@dataclass(frozen=True)
class Checked:
    """What the check saw: the largest difference of a logit, prefill and cached steps, and how many greedy tokens agree."""

    largest: float
    same_tokens: int
    tokens: int


def run(given: dict[str, Any]) -> int:
    options = from_mapping(Options, given)
    model, out = (Path(name).expanduser() for name in (options.model, options.out))
    checked = export_optimum(model, out.absolute(), options.new_tokens)
    print(
        f"{options.out}: largest logit difference to torch {checked.largest:.1e}, "
        f"greedy tokens {checked.same_tokens} of {checked.tokens} equal"
    )
    write_result(options.json, {"folder": options.out, **asdict(checked)})
    return 0


def export_optimum(model: Path, out: Path, new_tokens: int = 32) -> Checked:
    """Write `out` (whole or not at all): model.onnx, config.json, generation_config.json, tokenizer.

    Raises InputError where `model` is no model folder or `out` is one of something else or of the model, EdgespecError outside
    the environment, CheckFailed where the graph and torch part by more than LOGITS_BOUND or in a greedy token.
    """
    if not (model / "config.json").is_file():
        raise InputError(f"{model} has no config.json; give a model folder in Hugging Face layout")
    if not any(model.glob("*.safetensors")):
        raise InputError(f"{model} has no *.safetensors file; only safetensors weights are read")
    check_heads(read_json(model / "config.json"), model)
    refuse_other(out, "model.onnx", "OUT")  # it is replaced
    if model.resolve().is_relative_to(out.resolve()):
        raise InputError(
            f"{out} is or holds the model's folder {model}, and would be replaced; give another folder to write"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tracer, about Python values in transformers' own code
        try:
            from optimum.exporters.onnx import main_export
        except ImportError as error:
            raise EdgespecError(
                f"export-optimum needs optimum-onnx, which cannot be imported here ({error}); it takes transformers 4.57, and "
                "the rest of edgespec is tested with 5, so it runs in an environment of its own: in the checkout of edgespec, "
                "python3 make.py optimum MODEL OUT"
            ) from error
        logging.getLogger("optimum").setLevel(logging.ERROR)
        with progress("export with optimum", 2, "steps") as bar, whole_folder(out) as folder:
            bar.set_postfix_str("write the graph")
            main_export(
                str(model),
                folder,
                task=TASK,
                dtype="fp32",
                local_files_only=True,
                trust_remote_code=False,
                do_validation=False,  # check() does more: cached steps and greedy text
            )
            copy_tokenizer(model, folder)
            bar.update(1)
            bar.set_postfix_str("compare it with torch")
            return check(model, folder, new_tokens)


def check_heads(config: Mapping[str, Any], model: Path) -> None:
    """Refuse heads for which ORTModelForCausalLM would make a cache of another size: of most families it does not read head_dim.

    Raises InputError.
    """
    usual = int(config.get("hidden_size") or 0) // int(config.get("num_attention_heads") or 1)
    given = config.get("head_dim") or usual
    if given != usual and not family_named(config.get("model_type", "")).optimum_head_dim:
        raise InputError(
            f"{model} has heads of {given}, and optimum-onnx 0.1.0 takes hidden size / heads = {usual} for a "
            f"{config.get('model_type')!r} model; use edgespec's own ONNX export"
        )


def check(model: Path, graph: Path, new_tokens: int) -> Checked:
    """Hold a written graph, loaded by ORTModelForCausalLM, against torch on fixed token ids. Raises CheckFailed."""
    import torch
    from optimum.onnxruntime import ORTModelForCausalLM
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(
        model, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()
    other = ORTModelForCausalLM.from_pretrained(graph, local_files_only=True, use_cache=True)
    size = int(read_json(model / "config.json")["vocab_size"])
    ids = (torch.arange(24)[None] * 7919 + 11) % size
    how = {"attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        whole = reference(ids, **how).logits
        prefill = other(ids[:, :16], attention_mask=how["attention_mask"][:, :16], use_cache=True)
        # several tokens at once on a past: what verifying a draft is
        block = other(ids[:, 16:], past_key_values=prefill.past_key_values, **how)
    seen = torch.cat([prefill.logits, block.logits], 1)
    largest = float((seen - whole).abs().max())
    for one in (reference, other):
        one.generation_config.eos_token_id = None  # an early end of turn would leave little to compare
    tokens = [
        one.generate(ids, **how, max_new_tokens=new_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        for one in (reference, other)
    ]
    same = sum(a == b for a, b in zip(*tokens, strict=False))
    checked = Checked(largest, same, max(map(len, tokens)))
    if largest > LOGITS_BOUND or same < checked.tokens:
        raise CheckFailed(
            f"optimum's graph of {model} differs from torch: largest logit difference {largest:.1e} (bound {LOGITS_BOUND:.0e}), "
            f"greedy tokens {same} of {checked.tokens} equal"
        )
    return checked
