"""What is asked of the sampler: refused with the value, or read as it was meant."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from sampling_testing import sampler_of

from attn_shared.errors import InvalidInputError, InvalidRequestError, UnknownNameError
from attn_shared.sampling import Returns, Sampler, SamplingParams


class _Elsewhere(torch.Generator):
    """A generator of a device that this machine may not have."""

    device = torch.device("cuda:0")


ELSEWHERE = _Elsewhere()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0; allowed: a finite number >= 0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": [1.0, math.nan]}, r"temperature\[1\] is nan"),
        ({"top_k": -2}, "top_k is -2; allowed: an int >= 1"),
        ({"top_k": 2.0}, "top_k is 2.0"),
        ({"top_k": True}, "top_k is True"),
        ({"top_k": [3, "all"]}, r"top_k\[1\] is 'all'"),
        ({"top_p": 1.5}, "top_p is 1.5; allowed: a number from 0 to 1"),
        ({"top_p": [0.5, math.nan]}, r"top_p\[1\] is nan"),
        ({"top_p": torch.tensor([0.5, -0.5])}, r"top_p\[1\] is -0.5"),
        ({"top_k": torch.ones(3)}, "top_k is of dtype torch.float32; allowed: an int dtype"),
        ({"min_p": torch.ones(3, dtype=torch.int32)}, "min_p is of dtype torch.int32"),
        ({"top_p": torch.zeros(2, 2)}, r"top_p is a tensor of shape \(2, 2\)"),
        ({"min_p": 2}, "min_p is 2"),
        ({"seeds": 1}, "steps is None; allowed: with seeds"),
        ({"steps": 1}, "steps is given without seeds"),
        ({"seeds": 1, "steps": 0, "generators": {0: torch.Generator()}}, "generators is given"),
        ({"seeds": 1.5, "steps": 0}, "seeds is 1.5; allowed: an int of 64 bits"),
        ({"seeds": [1, None, "x"], "steps": 0}, r"seeds\[2\] is 'x'; .* of 64 bits, or None"),
        ({"seeds": 1, "steps": 1.5}, "steps is 1.5; allowed: an int of 64 bits"),
        ({"seeds": 1, "steps": [0, 2**65]}, r"steps\[1\] is 36893488147419103232"),
        ({"seeds": [1, 2, 3], "steps": "abc"}, "steps is 'abc'"),
        ({"temperature": 0, "seeds": True, "steps": 0}, "seeds is True"),
    ],
)
def test_odd_numbers_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        SamplingParams(**asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"top_k": [1, 2]}, "top_k is of 2 rows; allowed: 3"),
        ({"top_p": torch.ones(4)}, "top_p is of 4 rows"),
        ({"seeds": [1, 2], "steps": 0}, "seeds is of 2 rows"),
        ({"seeds": [1, 2, 2**64], "steps": 0}, r"seeds\[2\] is 18446744073709551616"),
        ({"seeds": [1, 2, 3], "steps": [0, None, 0]}, r"steps\[1\] is None"),
        ({"seeds": torch.ones(3), "steps": 0}, "seeds is of shape"),
        ({"generators": {3: torch.Generator()}}, "generators is given for row 3"),
        ({"generator": ELSEWHERE}, "generator is a generator of cuda:0; allowed: one of the log"),
        ({"generators": {1: ELSEWHERE}}, r"generators\[1\] is a generator of cuda:0"),
        ({"generators": {"a": torch.Generator()}}, "generators is given for row 'a'"),
        ({"generators": {0: None}}, r"generators\[0\] is None; allowed: a torch.Generator"),
        ({"generators": [torch.Generator()]}, "generators is a list; allowed: a mapping"),
        ({"generator": 5}, "generator is 5; allowed: a torch.Generator"),
    ],
)
def test_rows_that_do_not_fit_the_logits_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        sampler_of().sample(torch.zeros(3, 5), SamplingParams(**asked))


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (torch.zeros(5), r"logits is of shape \(5,\)"),
        (torch.zeros(2, 0), "a vocabulary of 1 to"),
        (torch.zeros(2, 5, dtype=torch.int64), "dtype torch.int64"),
        (torch.zeros(2, 5, device="meta"), "logits is on meta"),
        (torch.zeros(2, 5).to(torch.float8_e4m3fn), "allowed: .* of 16 bits or more"),
        (torch.zeros(2, 5).to_sparse(), r"torch.sparse_coo; allowed: \(B, V\), dense"),
        ([[0.0, 1.0]], "logits is a list; allowed: a Tensor"),
    ],
)
def test_logits_that_are_none_are_refused(logits: Any, words: str) -> None:
    with pytest.raises(InvalidInputError, match=words):
        sampler_of().sample(logits)


def test_params_of_another_kind_are_refused() -> None:
    params: Any = {"top_k": 3}
    with pytest.raises(InvalidInputError, match="params is a dict; allowed: a SamplingParams"):
        sampler_of().sample(torch.zeros(2, 5), params)


@pytest.mark.parametrize("device", ["foo", 5])
def test_a_sampler_for_no_torch_device_is_refused(device: Any) -> None:
    with pytest.raises(InvalidRequestError, match=f"device={device!r} is not allowed"):
        Sampler(device)


def test_an_unknown_return_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="processed_logits"):
        sampler_of().sample(torch.zeros(2, 5), returns="logits")


def test_what_is_off_is_not_asked() -> None:
    asked = SamplingParams(top_k=[0, -1, None], top_p=1.0, min_p=0).request()
    assert (asked.top_k, asked.top_p, asked.min_p) == (False, False, False)
    asked = SamplingParams(top_k=[0, 3], top_p=torch.tensor([1.0, 0.4]), min_p=0.1).request("ids")
    assert (asked.top_k, asked.top_p, asked.min_p) == (True, True, True)
    assert asked.returns is Returns.IDS


def test_seeds_beside_rows_without_one() -> None:
    logits, steps = torch.zeros(3, 1000), [4, 4, 4]
    sampler = sampler_of()
    first = sampler.sample(logits, SamplingParams(seeds=[9, None, 9], steps=steps)).ids
    again = sampler.sample(logits, SamplingParams(seeds=[9, None, 9], steps=steps)).ids
    assert first[0] == first[2] == again[0]
    assert first[1] != again[1]


def test_seeds_are_64_bits_signed_or_not() -> None:
    logits = torch.zeros(2, 1000)
    found = sampler_of().sample(logits, SamplingParams(seeds=[-1, 2**64 - 1], steps=0)).ids
    assert found[0] == found[1]
