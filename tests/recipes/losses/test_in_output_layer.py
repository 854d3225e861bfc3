"""The loss inside a whole model's output layer: the same gradients, also wrapped by DDP and FSDP, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from edgespec_recipes.losses.losses import fkl, jsd
from edgespec_recipes.losses.output_loss import in_output_layer, output_loss
from edgespec_recipes.models.kept_positions import logits_at
from edgespec_recipes.models.vocabulary import restrict
from edgespec_runtime.engines.vocabulary import Vocabulary
from loss_cases import logits
from small_llama import small_llama
from torch import Tensor, nn
from transformers import Gemma2Config, Gemma2ForCausalLM

from edgespec.core.errors import InputError

TOKENS = torch.randint(60, (3, 10), generator=torch.Generator().manual_seed(0))
KEEP = torch.rand(3, 10, generator=torch.Generator().manual_seed(1)) < 0.5
TARGET = logits(int(KEEP.sum()), 60)
INPUTS = {"input_ids": TOKENS}


def loss_in(hidden: Tensor, head: Any) -> Tensor:
    return output_loss(jsd, hidden, head, lambda rows: TARGET[rows], chunk=60 * 4)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient  # of FSDP
    return found


def llama(tied: bool) -> Any:
    model = small_llama(0)
    if tied:
        model.config.tie_word_embeddings = True
        model.tie_weights()
    return model


def plain_gradients(tied: bool) -> tuple[Tensor, dict[str, Tensor]]:
    model = llama(tied)
    loss = jsd(logits_at(model, KEEP, **INPUTS), TARGET).sum()
    loss.backward()
    return loss.detach(), gradients(model)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_whole_model_learns_the_same(tied: bool) -> None:
    model = llama(tied)
    loss = in_output_layer(model, KEEP, INPUTS, loss_in)
    loss.backward()
    wanted, its = plain_gradients(tied)
    torch.testing.assert_close(loss.detach(), wanted)
    torch.testing.assert_close(gradients(model), its, atol=1e-5, rtol=1e-4)


def test_the_head_is_itself_again() -> None:
    model = llama(False)
    before = model(**INPUTS).logits

    def broken(hidden: Tensor, head: Any) -> Tensor:
        assert hidden.shape == (int(KEEP.sum()), 32)
        assert head is model.lm_head
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_output_layer(model, KEEP, INPUTS, broken)
    torch.testing.assert_close(model(**INPUTS).logits, before)
    assert "forward" not in vars(model.lm_head)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_inside_ddp(one_process: None) -> None:
    model = llama(True)
    wrapped = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # DDP notices in the second pass what the first left unreduced
        model.zero_grad()
        in_output_layer(wrapped, KEEP, INPUTS, loss_in).backward()
    torch.testing.assert_close(gradients(model), plain_gradients(True)[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head_apart", [False, True])
def test_inside_fsdp(one_process: None, head_apart: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = llama(False), init_device_mesh("cpu", (1,))
    for layer in [*model.model.layers, *([model.lm_head] if head_apart else [])]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model.zero_grad()
        in_output_layer(model, KEEP, INPUTS, loss_in).backward()
    torch.testing.assert_close(gradients(model), plain_gradients(False)[1], atol=1e-5, rtol=1e-4)


def test_a_head_of_some_tokens_only() -> None:
    """Its columns against the same columns of the target, without one tensor of the whole vocabulary."""
    ids = torch.tensor([0, 1, 2, 5, 9, 17, 40, 58])
    vocabulary = Vocabulary(60, ids.numpy())
    models = [restrict(llama(True), vocabulary, torch.ones(60).numpy()) for _ in range(2)]

    def restricted(hidden: Tensor, head: Any) -> Tensor:
        return output_loss(fkl, hidden, head, lambda rows: TARGET[rows][:, head.ids], chunk=len(ids) * 4)

    loss = in_output_layer(models[0], KEEP, INPUTS, restricted)
    loss.backward()
    whole = logits_at(models[1], KEEP, **INPUTS)
    assert whole.shape[1] == 60
    assert whole.isneginf().sum() == len(whole) * (60 - len(ids))
    wanted = fkl(whole[:, ids], TARGET[:, ids]).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients(models[0]), gradients(models[1]), atol=1e-5, rtol=1e-4)


def test_a_model_that_bends_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=2.0, pad_token_id=0,
    )  # fmt: skip
    model = Gemma2ForCausalLM(config)
    with pytest.raises(InputError, match=r"Gemma2ForCausalLM changes its logits .*: --tune\.steps 0$"):
        in_output_layer(model, KEEP, INPUTS, loss_in)
    with torch.no_grad():  # as a target it is welcome: its hidden states are what is asked for
        in_output_layer(model, KEEP, INPUTS, lambda hidden, _: hidden.sum())
