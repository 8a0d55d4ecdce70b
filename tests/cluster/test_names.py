"""Names by application: no two applications share one."""

from __future__ import annotations

import pytest

from cluster.names import TAG_LENGTH, controller_actor, file_tag, is_of, transfer_actor

NODE = "0123456789abcdef0123456789abcdef"


def test_each_application_has_its_own_actors() -> None:
    assert controller_actor("a") != controller_actor("b")
    assert transfer_actor("a", NODE) != transfer_actor("b", NODE)
    for name in (controller_actor("a"), transfer_actor("a", NODE)):
        assert is_of("a", name) and not is_of("b", name) and not is_of("a:controller", name)


@pytest.mark.parametrize("application", ["default", "pageferry", "x" * 200, "a b", "a/b", "a.b", "ä", ""])
def test_a_file_tag_is_short_and_harmless(application: str) -> None:
    tag = file_tag(application)
    assert len(tag) <= TAG_LENGTH and all(c.isascii() and (c.isalnum() or c == "_") for c in tag)


def test_file_tags_differ_as_the_names_do() -> None:
    names = ["a b", "a/b", "a_b", "x" * 30, "x" * 31]
    assert len({file_tag(name) for name in names}) == len(names)
