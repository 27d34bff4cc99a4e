"""What the demo does, whatever shows it: convert, load, generate, compare."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from attn_shared.device import DeviceFacts
from attn_shared.errors import InvalidInputError
from attn_shared.selection import Selection
from attn_shared.selector import DEFAULT_SELECTOR
from attn_shared.settings import from_environ
from attn_transformers.demo_check import Check, Run, compare, generate_greedily
from attn_transformers.demo_model import (
    ConvertedModel,
    OnProgress,
    cache_folder,
    ensure_model,
    find_gguf,
    load_model,
    load_tokenizer,
)
from attn_transformers.paged_cache import CacheUsage, PagedCache
from attn_transformers.registration import register

__all__ = ["BATCH_PROMPTS", "Answer", "DemoRequest", "DemoResult", "Screen", "Setting", "run_demo"]

BATCH_PROMPTS = (
    "What is the capital of France?",
    "Name three animals that live in the sea, and say in one sentence what each of them eats.",
)
"""Two prompts of different length, so that the shorter one is padded."""

_BATCH_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoRequest:
    """What is asked of the demo.

    Attributes:
        prompt: what the model is asked.
        max_new_tokens: most tokens to generate.
        backend: name of the backend; "auto" overrides ATTN_BACKEND, None leaves it to it.
        device: a torch device of this machine.
        dtype: of the weights that generate the text.
    """

    prompt: str
    max_new_tokens: int
    backend: str | None
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What runs where.

    Attributes:
        model: the converted model.
        device: its device.
        dtype: of its weights.
        selection: which backend runs it, and why.
        notes: what was read from the environment.
    """

    model: ConvertedModel
    device: DeviceFacts
    dtype: torch.dtype
    selection: Selection
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The generated text.

    Attributes:
        prompt: what was asked.
        prompt_tokens: its tokens, the chat template's included.
        text: the answer.
        run: its tokens and times.
        usage: memory of its cache.
    """

    prompt: str
    prompt_tokens: int
    text: str
    run: Run
    usage: CacheUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """All that the demo found.

    Attributes:
        setting: what ran where.
        answer: the generated text.
        stock: the same prompt in float32 through transformers' sdpa attention and cache.
        check: float32 tokens of the backend against `stock`.
        batch_check: the same for two prompts in one padded batch.
        decode: turns a token into text.
    """

    setting: Setting
    answer: Answer
    stock: Run
    check: Check
    batch_check: Check
    decode: Callable[[int], str]

    @property
    def is_equal(self) -> bool:
        """Whether both checks found equal tokens."""
        return self.check.is_equal and self.batch_check.is_equal


class Screen(Protocol):
    """Who watches."""

    def progress(self, title: str) -> AbstractContextManager[OnProgress]:
        """Return what to tell of the progress of something."""

    def selected(self, setting: Setting) -> None:
        """Take what runs where."""

    def answered(self, answer: Answer) -> None:
        """Take the generated text."""


class _Subject:
    """The model in one dtype, on attn or on transformers' own attention."""

    def __init__(
        self, converted: ConvertedModel, implementation: str, request: DemoRequest, dtype: Any
    ) -> None:
        self.tokenizer = load_tokenizer(converted.folder)
        self.dtype = dtype
        self._implementation = implementation
        self._model = load_model(
            converted.folder,
            attn_implementation=implementation,
            dtype=dtype,
            device=str(request.device),
        )

    def ask(self, prompts: list[str], max_new_tokens: int) -> dict[str, torch.Tensor]:
        """Return the padded tokens of prompts in the chat template."""
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        inputs = self.tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        length, limit = inputs["input_ids"].shape[1], self._model.config.max_position_embeddings
        if length + max_new_tokens > limit:
            raise InvalidInputError.for_argument(
                "prompt and new tokens", f"{length} + {max_new_tokens}", f"{limit} in all"
            )
        names = ("input_ids", "attention_mask")
        return {name: inputs[name].to(self._model.device) for name in names}

    def selection(self, inputs: dict[str, torch.Tensor]) -> Selection:
        """Return which backend runs the layers: those of a first token, as all are alike."""
        cache = PagedCache()
        with torch.inference_mode():
            self._model(inputs["input_ids"][:, :1], cache=cache)
        return cache.selections()[0]

    def ours(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, on_progress: OnProgress
    ) -> tuple[Run, CacheUsage]:
        """Generate over a paged cache."""
        self._model.set_attn_implementation(self._implementation)
        cache = PagedCache()
        run = generate_greedily(self._model, inputs, max_new_tokens, cache, on_progress)
        return run, cache.usage()

    def stock(
        self, inputs: dict[str, torch.Tensor], max_new_tokens: int, on_progress: OnProgress
    ) -> Run:
        """Generate with transformers' sdpa attention and its own cache."""
        self._model.set_attn_implementation("sdpa")
        return generate_greedily(self._model, inputs, max_new_tokens, None, on_progress)


def run_demo(request: DemoRequest, screen: Screen) -> DemoResult:
    """Run the demo.

    Raises:
        AttnError: as `demo.main`.
    """
    settings = from_environ()
    implementation = register(request.backend)[0]
    device = DEFAULT_SELECTOR.device_facts(request.device)
    with screen.progress("converting the model, once") as on_progress:
        converted = ensure_model(find_gguf(), cache_folder(settings), on_progress)
    subject = _Subject(converted, implementation, request, request.dtype)
    inputs = subject.ask([request.prompt], request.max_new_tokens)
    setting = Setting(
        model=converted,
        device=device,
        dtype=request.dtype,
        selection=subject.selection(inputs),
        notes=settings.notes(),
    )
    screen.selected(setting)
    answer = _answer(subject, request, inputs, screen)
    screen.answered(answer)
    exact = subject
    if request.dtype is not torch.float32:
        exact = _Subject(converted, implementation, request, torch.float32)
    return _checked(exact, request, setting, answer, screen)


def _answer(
    subject: _Subject, request: DemoRequest, inputs: dict[str, torch.Tensor], screen: Screen
) -> Answer:
    with screen.progress("generating") as on_progress:
        run, usage = subject.ours(inputs, request.max_new_tokens, on_progress)
    return Answer(
        prompt=request.prompt,
        prompt_tokens=inputs["input_ids"].shape[1],
        text=subject.tokenizer.decode(run.tokens[0], skip_special_tokens=True).strip(),
        run=run,
        usage=usage,
    )


def _checked(
    exact: _Subject, request: DemoRequest, setting: Setting, answer: Answer, screen: Screen
) -> DemoResult:
    """Compare in float32; what was generated in it already is not generated again."""
    steps = request.max_new_tokens
    inputs = exact.ask([request.prompt], steps)
    batch = exact.ask(list(BATCH_PROMPTS), _BATCH_TOKENS)
    run = answer.run
    if setting.dtype is not torch.float32:
        with screen.progress("generating in float32") as on_progress:
            run, _ = exact.ours(inputs, steps, on_progress)
    with screen.progress("comparing with transformers' sdpa") as on_progress:
        stock = exact.stock(inputs, steps, on_progress)
    with screen.progress("comparing a padded batch") as on_progress:
        batch_run, _ = exact.ours(batch, _BATCH_TOKENS, on_progress)
        batch_stock = exact.stock(batch, _BATCH_TOKENS, on_progress)
    return DemoResult(
        setting=setting,
        answer=answer,
        stock=stock,
        check=compare(run, stock),
        batch_check=compare(batch_run, batch_stock),
        decode=lambda token: str(exact.tokenizer.decode([token])),
    )
