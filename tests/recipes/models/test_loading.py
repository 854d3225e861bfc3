"""Targets by name, folders into memory and back, and every way a target can be unusable."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from edgespec_recipes.models import loading
from edgespec_recipes.target_names import resolve
from edgespec_runtime.text.tokenizer import ChatTokenizer
from family_cases import LLAMA3
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from small_files import files_of_at_most
from tiny_models import make_model_folder
from tiny_sentencepiece import LLAMA_2, sentencepiece_like
from tokenizers import Tokenizer

from edgespec.core.errors import InputError, NoRoom
from edgespec.core.files import read_json, write_json
from edgespec.recipe.targets import TARGETS


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"), theta=50000.0)


@pytest.fixture
def spoilt(model_folder: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(model_folder, tmp_path / "copy"))


def test_local_folder_is_taken_as_it_is(model_folder: Path) -> None:
    resolved = resolve.resolve_target(str(model_folder))
    assert (resolved.folder, resolved.source) == (model_folder.resolve(), "local folder")


def test_saved_folder_gives_the_same_logits_and_both_forms(model_folder: Path, tmp_path: Path) -> None:
    model = loading.load_model(model_folder)
    loading.save_model(model, model_folder, tmp_path / "saved")
    again = loading.load_model(tmp_path / "saved")
    ids = torch.tensor([[5, 6, 7, 300]])
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, again(ids).logits)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    about = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert about["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert about["chat_template"] == (tmp_path / "saved" / "chat_template.jinja").read_text()
    assert again.dtype == torch.float32


def test_saved_folder_has_the_scaling_of_rope_in_both_forms(tmp_path: Path) -> None:
    """transformers 4.57 reads rope_scaling and has never heard of rope_parameters."""
    folder = make_model_folder(tmp_path / "model", rope_parameters=LLAMA3)
    model = loading.load_model(folder)
    loading.save_model(model, folder, tmp_path / "saved")
    config = read_json(tmp_path / "saved" / "config.json")
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    assert (config["rope_theta"], config["rope_scaling"]) == (LLAMA3["rope_theta"], scaling)
    ids = torch.arange(5, 205)[None]
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, loading.load_model(tmp_path / "saved")(ids).logits)


def test_both_bases_of_a_gemma_3_are_kept(tmp_path: Path) -> None:
    """transformers 4.57 has the base of the layers that attend in full in rope_theta."""
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    both = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 2e4}}
    write_json(tmp_path / "config.json", {"model_type": "gemma3_text", "rope_parameters": both})
    loading.write_both_forms(tmp_path)
    config = read_json(tmp_path / "config.json")
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 2e4)
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert config["rope_parameters"] == both


def test_full_disk_leaves_no_half_model(model_folder: Path, tmp_path: Path) -> None:
    model = loading.load_model(model_folder)
    with files_of_at_most(10_000), pytest.raises(NoRoom):
        loading.save_model(model, model_folder, tmp_path / "saved")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama-2-7b-chta", "unknown target 'llama-2-7b-chta'.*did you mean 'llama-2-7b-chat'"),
        ("nothing-like-it", "neither an alias nor a folder here; known: llama-2-13b-chat"),
        ("./no/such/folder", "unknown target './no/such/folder': there is no folder of that name"),
        ("/no/such/folder", "there is no folder of that name"),
    ],
)
def test_unknown_target(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve.resolve_target(name)


def test_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config.json; give a model folder"):
        resolve.resolve_target(str(tmp_path))


def test_folder_without_safetensors(spoilt: Path) -> None:
    (spoilt / "model.safetensors").rename(spoilt / "pytorch_model.bin")
    with pytest.raises(InputError, match="only safetensors weights are read"):
        resolve.resolve_target(str(spoilt))


def test_tokenizer_without_chat_template(spoilt: Path) -> None:
    (spoilt / "chat_template.jinja").unlink()
    config = json.loads((spoilt / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (spoilt / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="has no chat template"):
        resolve.resolve_target(str(spoilt))


def test_folder_without_tokenizer(spoilt: Path) -> None:
    (spoilt / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer"):
        resolve.resolve_target(str(spoilt))


def test_encoder_decoder_model(spoilt: Path) -> None:
    (spoilt / "config.json").write_text(json.dumps({"model_type": "t5", "is_encoder_decoder": True}))
    with pytest.raises(InputError, match=r"encoder-decoder model \(t5\)"):
        resolve.resolve_target(str(spoilt))


def test_damaged_weights(spoilt: Path) -> None:
    weights = spoilt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be loaded"):
        loading.load_model(spoilt)


def test_a_full_gpu_is_no_fault_of_the_folder(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        loading.load_model(model_folder)


def test_code_in_a_model_folder_never_runs(spoilt: Path) -> None:
    config = json.loads((spoilt / "config.json").read_text())
    config.update(
        model_type="mine", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    )
    (spoilt / "config.json").write_text(json.dumps(config))
    (spoilt / "evil.py").write_text("raise SystemExit('ran')")
    with pytest.raises(InputError, match="cannot be loaded"):
        loading.load_model(spoilt)


@pytest.mark.parametrize(
    ("offline", "message"),
    [
        (False, "cannot be reached: check the network, or give a local folder"),
        (True, "HF_HUB_OFFLINE is set: fetch it once without that variable, or give a local folder"),
    ],
)
def test_no_network_says_what_to_do(offline: bool, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(InputError, match=message):
        resolve.resolve_target("tinyllama-1.1b-chat")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            errors.GatedRepoError,
            "gated: accept its licence at https://huggingface.co/meta-llama/.*`hf auth login`.*local folder",
        ),
        (errors.RepositoryNotFoundError, "the hub has no model"),
        (errors.HfHubHTTPError, "could not be downloaded"),
        (RuntimeError, "could not be downloaded"),  # hf_xet's, where a download breaks off
    ],
)
def test_what_the_hub_answers(kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> str:
        raise kind.__new__(
            kind
        )  # its __init__ wants a response of whichever HTTP library the hub's client uses

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(InputError, match=message):
        resolve.resolve_target("llama-2-7b-chat")


def test_a_hub_that_refuses_is_not_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has one error for both, with the cause behind it."""
    refused = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    refused.args = ("429 Too Many Requests\n\nRetry after 60 seconds",)

    def answer(*_: object, **__: object) -> str:
        raise errors.LocalEntryNotFoundError("no snapshot") from refused

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    words = r"the hub refused it \(429 Too Many Requests\): run again later, log in with .*local folder"
    with pytest.raises(InputError, match=words):
        resolve.resolve_target("tinyllama-1.1b-chat")


def test_a_token_that_is_not_taken_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one that has ended, the hub refuses what is open to all, too."""
    refused = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    refused.response = SimpleNamespace(status_code=401)

    def answer(*_: object, **__: object) -> str:
        raise refused

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(InputError, match=r"token is not taken: log in .*or correct HF_TOKEN"):
        resolve.resolve_target("tinyllama-1.1b-chat")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Data processing error: No space left on device (os error 28)"),  # hf_xet's
    ],
)
def test_a_download_that_finds_no_room(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(NoRoom, match=r"cannot write .*no space left on the disk .*; make room"):
        resolve.resolve_target("tinyllama-1.1b-chat")


def test_other_models_of_a_repository_are_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter, or the weights in another layout, in a folder beside the model's files."""
    asked: list[dict[str, list[str]]] = []

    def answer(_: str, **patterns: list[str]) -> str:
        asked.append(patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    with pytest.raises(InputError, match=r"has no config.json"):
        resolve.resolve_target("acme/model")
    own = ["config.json", "model-00001-of-00002.safetensors", "additional_chat_templates/tools.jinja"]
    others = ["consolidated.safetensors", "original/model.safetensors", "lora/adapter_model.safetensors"]
    assert list(filter_repo_objects([*own, *others], **asked[-1])) == own


def test_every_alias_has_a_repository_or_is_made_here() -> None:
    assert [alias for alias, target in TARGETS.items() if target.repo is None] == ["tiny-chat"]


def test_shared_model_resolves(shared: Path) -> None:
    resolved = resolve.resolve_target(str(shared / "models" / "concierge"))
    assert loading.load_model(resolved.folder).num_parameters() == 13_899_264


def test_text_is_split_as_tokenizer_json_says(tmp_path: Path) -> None:
    """Whatever class a folder names: transformers builds Llama 2's anew, without the blank that the file has behind <s>."""
    sentencepiece_like("normalizer").save(str(tmp_path / "tokenizer.json"))
    roles = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    other = {"model_max_length": 77, "padding_side": "left", "chat_template": LLAMA_2}
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer", **roles, **other})
    write_json(tmp_path / "config.json", {"model_type": "llama"})
    tokenizer, talk = loading.load_tokenizer(tmp_path), [{"role": "user", "content": "a inst"}]
    text = tokenizer.apply_chat_template(talk, tokenize=False)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ChatTokenizer(tmp_path).encode_chat(talk)
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert {name: getattr(tokenizer, name) for name in other} == other


def test_a_length_that_training_left_in_a_tokenizer_is_not_kept(spoilt: Path) -> None:
    left = Tokenizer.from_file(str(spoilt / "tokenizer.json"))
    wanted = left.encode("a text of more than four tokens").ids
    left.enable_truncation(4)
    left.enable_padding(length=64)
    left.save(str(spoilt / "tokenizer.json"))
    found = loading.load_tokenizer(spoilt).backend_tokenizer.encode("a text of more than four tokens")
    assert found.ids == wanted


def test_the_first_difference_of_two_vocabularies_is_named(tmp_path: Path) -> None:
    one, same = make_model_folder(tmp_path / "one"), make_model_folder(tmp_path / "same", seed=1, layers=1)
    loading.check_same_vocabulary(one, same, "the teacher and the target")
    content = json.loads((same / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    tokens = {number: token for token, number in vocabulary.items()}
    vocabulary[tokens[7]], vocabulary[tokens[9]] = 9, 7
    (same / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(
        InputError, match="the teacher and the target must have one tokenizer: token 7 is "
    ) as told:
        loading.check_same_vocabulary(one, same, "the teacher and the target")
    assert f"{tokens[7]!r} in {one}" in str(told.value)
    assert f"{tokens[9]!r} in {same}" in str(told.value)


def test_a_shorter_vocabulary(tmp_path: Path) -> None:
    one, short = make_model_folder(tmp_path / "one"), make_model_folder(tmp_path / "short", vocab_size=400)
    with pytest.raises(InputError, match=r"token \d+ is .*512 tokens.*400 tokens"):
        loading.check_same_vocabulary(one, short, "both")
