from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from attn_shared._model_values import ConfigValues, read_json
from attn_shared.errors import InvalidInputError


def values(**record: Any) -> ConfigValues:
    return ConfigValues(record, "a config")


def test_the_first_name_that_is_there_counts_and_null_is_missing() -> None:
    found = values(a=None, b=3, c=4)
    assert (found.count("a", "b", "c"), found.count("a", default=7)) == (3, 7)
    assert found.optional_count("a", "z") is None


@pytest.mark.parametrize("value", [0, -1, 1.0, "8", True, [8]])
def test_a_count_that_is_none_is_named_with_what_is_allowed(value: object) -> None:
    words = re.escape(f"heads in a config is {value!r}; allowed: an integer >= 1.")
    with pytest.raises(InvalidInputError, match=words):
        values(heads=value).count("heads", default=1)


def test_a_missing_key_is_named_with_its_synonyms() -> None:
    words = "n_head or num_heads in a config is missing; allowed: an integer >= 1"
    with pytest.raises(InvalidInputError, match=words):
        values().count("n_head", "num_heads")


def test_zero_is_a_count_where_it_may_be() -> None:
    assert values(a=0).optional_count("a", least=0) == 0


@pytest.mark.parametrize("value", [1, "true", []])
def test_a_flag_is_true_or_false(value: object) -> None:
    assert values(a=True).flag("a")
    assert values(a=None).flag("a", default=True)
    with pytest.raises(InvalidInputError, match="allowed: true or false"):
        values(a=value).flag("a")


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), "50", True, 10**400])
def test_a_cap_is_a_positive_number(value: object) -> None:
    assert (values(a=50).cap("a"), values(a=None).cap("a", 50.0)) == (50.0, None)
    assert values().cap("a", 30.0) == 30.0
    with pytest.raises(InvalidInputError, match="a finite number > 0, or null"):
        values(a=value).cap("a")


def test_a_word_is_a_text() -> None:
    assert (values(a="b").word("a"), values().word("a", "c")) == ("b", "c")
    with pytest.raises(InvalidInputError, match="a in a config is missing"):
        values().word("a")
    with pytest.raises(InvalidInputError, match="a in a config is 3"):
        values(a=3).word("a")


@pytest.mark.parametrize("value", [3, [4], [-1], ["0"], [True], {"0": 1}])
def test_layer_numbers_are_in_the_model(value: object) -> None:
    assert values(a=[0, 3]).indices("a", 4) == {0, 3}
    assert values().indices("a", 4) is None
    with pytest.raises(InvalidInputError, match="layer numbers from 0 to 3"):
        values(a=value).indices("a", 4)


def test_names_are_one_for_each_layer() -> None:
    assert values(a=["x", "y"]).names("a", 2) == ["x", "y"]
    assert values().names("a", 2) is None
    with pytest.raises(InvalidInputError, match="of length 1; allowed: one entry for each of 2"):
        values(a=["x"]).names("a", 2)
    with pytest.raises(InvalidInputError, match="a list of texts"):
        values(a=[1, 2]).names("a", 2)


def test_a_layers_own_values_are_over_the_models() -> None:
    own = values(head_dim=256, heads=8, layers={"05": {"head_dim": 512}}).overrides("layers", 6)
    assert list(own) == [5]
    assert (own[5].count("head_dim"), own[5].count("heads")) == (512, 8)
    assert values().overrides("layers", 6) == {}


@pytest.mark.parametrize("listed", [[1], {"6": {}}, {"x": {}}, {"0": 3}, {"²": {}}])
def test_odd_values_of_layers_are_named(listed: object) -> None:
    with pytest.raises(InvalidInputError, match="by layer numbers from 0 to 5"):
        values(layers=listed).overrides("layers", 6)


def test_a_file_or_its_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_json(tmp_path) == read_json(tmp_path / "config.json") == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "No such file"),
        ("{", "no JSON"),
        ("[1]", "a JSON list"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_what_is_no_config_is_said_in_words(
    text: str | bytes | None, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    if isinstance(text, str):
        file.write_text(text)
    elif text is not None:
        file.write_bytes(text)
    with pytest.raises(InvalidInputError, match=words) as caught:
        read_json(file)
    assert str(file) in caught.value.message


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"num_hidden_layers": ' + "9" * 5000 + "}"],
    ids=["nested too deep", "a number of 5000 digits"],
)
def test_json_that_cannot_be_read_is_refused_in_words(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"config\.json' \(no JSON: .*allowed: a config"):
        read_json(tmp_path)


def test_a_name_longer_than_the_system_takes_is_refused_in_words() -> None:
    with pytest.raises(
        InvalidInputError, match=r"File name too long.*a config\.json, or the folder"
    ):
        read_json(Path("x" * 300))
