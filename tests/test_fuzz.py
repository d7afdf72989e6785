"""Wrong values of every option of every choice: a sentence that names the option, or a training that means it."""

from pathlib import Path

import pytest

from tests.fuzz import all_of, choices, options_of


@pytest.mark.exhaustive
@pytest.mark.parametrize("choice", choices())
def test_wrong_values_of_every_option(choice: str, tmp_path: Path) -> None:
    overrides = [choice] if choice else []
    counts, others = all_of(overrides, options_of(choice), tmp_path)
    print(choice or "of every configuration", dict(counts))
    assert not others, "\n".join(others)
    assert counts["refused"] > counts["trained"]
