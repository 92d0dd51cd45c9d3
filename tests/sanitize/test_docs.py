"""docs/sanitize.md lists the passes that there are."""

from sanitize.docs import PAGE, updated


def test_the_table_of_passes_is_current() -> None:
    assert PAGE.read_text() == updated(PAGE.read_text()), "run python -m sanitize.docs"
