"""Caption templates with slots: every combination has one text, and every text leads back to its combination."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from straightdp.data.captions import LIMIT, Template
from straightdp.errors import BadInput

CLASSES = ("cat", "dog", "hen")
SLOTS = {"size": ("big", "small"), "place": ("at sea", "on land", "in the air")}
TEXT = "a {size} {label} {place}"

WORD = st.text("aAbB {}", max_size=3)
WORDS = st.lists(WORD, min_size=1, max_size=3, unique=True)


@st.composite
def pieces(draw):
    """A template as a list of literals and field names in turn, each field at least once, and the words of each."""
    names = ("label", *draw(st.permutations(["one", "two"]))[: draw(st.integers(0, 2))])
    fields = draw(st.permutations([*names, *draw(st.lists(st.sampled_from(names), max_size=2))]))
    literals = draw(st.lists(st.text("aX ,{}", max_size=3), min_size=len(fields) + 1, max_size=len(fields) + 1))
    return literals, fields, {name: tuple(draw(WORDS)) for name in names}


def written(literals, fields):
    escaped = [literal.replace("{", "{{").replace("}", "}}") for literal in literals]
    return "".join(a + f"{{{f}}}" for a, f in zip(escaped, fields, strict=False)) + escaped[-1]


def filled(literals, fields, words):
    return "".join(a + words[f] for a, f in zip(literals, fields, strict=False)) + literals[-1]


def squeezed(text):
    while "  " in text:
        text = text.replace("  ", " ")
    return text.strip(" ")


@settings(max_examples=300)
@given(pieces(), st.randoms(use_true_random=False))
def test_captions_combinations_and_index_agree_with_filling_in_by_hand(template, random):
    literals, fields, slots = template
    text, classes = written(literals, fields), slots["label"]
    others = {name: words for name, words in slots.items() if name != "label"}
    rows = list(itertools.product(*(range(len(words)) for words in slots.values())))
    expected = [filled(literals, fields, {n: slots[n][i] for n, i in zip(slots, row, strict=True)}) for row in rows]
    plain = [squeezed(caption) for caption in expected]
    if len(set(plain)) < len(plain):
        with pytest.raises(BadInput, match="would stand for more than one"):
            Template.read(text, classes, others)
        return
    made = Template.read(text, classes, others)
    assert list(made.slots.items()) == list(slots.items())
    assert list(made.captions()) == expected
    assert made.combinations().dtype == np.int64
    assert made.combinations().tolist() == [list(row) for row in rows]
    for i, caption in enumerate(plain):
        assert made.index(caption) == made.index(expected[i]) == i
        spaced = "\t " + caption.replace(" ", " \n ") + "  "
        assert made.index(spaced) == i
        other_case = "".join(random.choice((str.upper, str.lower))(letter) for letter in spaced)
        alike = [j for j, known in enumerate(plain) if known.lower() == caption.lower()]
        exact = [j for j in alike if known_as(other_case) == plain[j]]
        assert made.index(other_case) == (i if len(alike) == 1 else exact[0] if exact else None)


def known_as(text):
    return squeezed(text.replace("\t", " ").replace("\n", " "))


@given(st.text(max_size=12))
def test_a_text_that_is_no_caption_has_no_index(text):
    made = Template.read(TEXT, CLASSES, SLOTS)
    assert made.index(text) is None
    assert made.index(made.captions()[0] + text) == (None if text.strip() else 0)


def test_the_label_varies_slowest_and_the_last_slot_fastest_wherever_they_stand_in_the_text():
    made = Template.read(TEXT, CLASSES, SLOTS)
    assert list(made.slots) == ["label", "size", "place"]
    assert made.captions()[:4] == (
        "a big cat at sea", "a big cat on land", "a big cat in the air", "a small cat at sea",
    )  # fmt: skip
    assert made.combinations()[[0, 1, 3, 6, 17]].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [2, 1, 2]]
    assert made.index("  A small HEN\n in the air ") == 17
    turned = Template.read(TEXT, CLASSES, {"place": SLOTS["place"], "size": SLOTS["size"]})
    assert list(turned.slots) == ["label", "place", "size"]
    assert turned.captions()[1] == "a small cat at sea"
    assert set(turned.captions()) == set(made.captions())


def test_case_counts_only_where_nothing_else_tells_captions_apart():
    made = Template.read("a {label}", ("ha", "HA", "mu"))
    assert [made.index(text) for text in ("a ha", "a HA", "a Ha", "A ha", "A MU")] == [0, 1, None, None, 2]


def test_a_template_may_have_no_slots_and_no_classes():
    bare = Template.read("{label}", CLASSES)
    assert bare.captions() == CLASSES
    assert bare.combinations().tolist() == [[0], [1], [2]]
    empty = Template.read(TEXT, (), SLOTS)
    assert empty.captions() == ()
    assert empty.combinations().shape == (0, 3)
    assert empty.index("a big cat at sea") is None


@pytest.mark.parametrize(
    ("text", "slots", "expected"),
    [
        ("{label} {place}", {}, ("{label} (", "'place'", "or list the words of 'place' in slots")),
        ("{label} {place} {x}", {"place": ("a",)}, ("{label}, {place} (", "'x'", "in slots")),
        ("{label} {text}", {}, ("field other than", "'text'")),
        ("{label} {place!r}", {"place": ("a",)}, ("field other than", "'placer'")),
        ("{label} {place:>3}", {"place": ("a",)}, ("field other than", "'place>3'")),
        ("{label} {place.x}", {"place.x": ("a",)}, ("field other than", "'place.x'")),
        ("{label} {0}", {"0": ("a",)}, ("field other than", "'0'")),
        ("{label} {}", {"": ("a",)}, ("field other than", "''")),
        ("{label} {place", {"place": ("a",)}, ("not well formed",)),
        ("a {place}", {"place": ("a",)}, ("has no {label}",)),
        ("a {label}", {"place": ("a",)}, ("slot 'place' has words but", "has no {place}", "take the slot out")),
        ("a {label} {{place}}", {"place": ("a",)}, ("slot 'place' has words but",)),
        ("a {label} {place}", {"place": ()}, ("slot 'place' has no words", "list at least one")),
        ("a {label} {place}", {"place": "sea"}, ("slot 'place' should be a list of words", "['sea']")),
        ("a {label} {place}", {"place": ("x", "y", "x")}, ("slot 'place' lists the word 'x' twice",)),
        ("a {label}", {"label": ("x",)}, ("slot 'label'", "kept for the class")),
        ("a {label} {text}", {"text": ("x",)}, ("slot 'text'", "kept for a record's own text")),
    ],
)
def test_a_bad_template_or_slot_is_refused_in_one_line_with_a_cure(text, slots, expected):
    with pytest.raises(BadInput) as caught:
        Template.read(text, CLASSES, slots)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message
    for part in expected:
        assert part in message, message


def test_the_hint_at_slots_is_for_names_that_could_be_one():
    for text in ("{label} {text}", "{label} {label!r}", "{label} {0}"):
        with pytest.raises(BadInput, match="field other than") as caught:
            Template.read(text, CLASSES)
        assert "in slots" not in str(caught.value)


def test_two_combinations_that_read_alike_are_refused_by_name():
    with pytest.raises(BadInput) as caught:
        Template.read("{label}{x}", ("a", "ab"), {"x": ("bc", "c")})
    assert "'abc' would stand for more than one combination, ('a', 'bc') and ('ab', 'c');" in str(caught.value)
    with pytest.raises(BadInput, match="'cat big' would stand for more than one class; give each class its own name"):
        Template.read("{label} {size}", ("cat", "dog", "cat"), {"size": ("big",)})
    with pytest.raises(BadInput, match="would stand for more than one class"):
        Template.read("{label}", ("tom cat", "tom  cat"))
    with pytest.raises(BadInput, match="would stand for more than one combination"):
        Template.read("{x} {y} {label}", ("c",), {"x": ("a", "a b"), "y": ("b", "")})


def test_ten_thousand_combinations_are_taken_and_one_more_is_not():
    words = [str(i) for i in range(LIMIT)]
    assert LIMIT == 10_000
    assert len(Template.read("{x} {label}", words[:100], {"x": words[:100]}).captions()) == 10_000
    with pytest.raises(BadInput, match=r"at most 10,000 combinations .* but has 10,001; shorten"):
        Template.read("{x} {label}", words[:73], {"x": words[:137]})
    many = dict.fromkeys("abcdef", words)
    with pytest.raises(BadInput, match="at most 10,000"):
        Template.read("{label} {a} {b} {c} {d} {e} {f}", words, many)
