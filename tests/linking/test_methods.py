"""Which tokens each method computes, for documents and for compositions with arguments."""

from __future__ import annotations

import pytest

from foreword.errors import InvalidRequestError
from foreword.linking import Method, link_parts
from foreword.pml.composition import Composition, Part, Source, Span, concatenated
from foreword.pml.documents import compose_documents

HEAD, FIRST, SECOND, QUESTION = (1, 2), tuple(range(10, 16)), tuple(range(20, 30)), (40, 41)


def shelf() -> Composition:
    sources = [Source(HEAD + document, len(HEAD)) for document in (FIRST, SECOND, FIRST)]
    return concatenated([HEAD, *sources, QUESTION])


def runs(composition: Composition, method: str | Method) -> list[tuple[int, int, int]]:
    links = link_parts(composition, Method.parse(method))
    for run in links.runs:
        wanted = composition.token_ids[run.begin : run.end]
        assert run.source[run.first : run.source_end].tolist() == wanted.tolist()
    return [(run.begin, run.end, run.first) for run in links.runs]


def test_the_first_document_is_exact_and_the_others_are_copied() -> None:
    assert runs(shelf(), "none") == [(8, 18, 2), (18, 24, 2)]
    assert runs(shelf(), "first-4") == [(12, 18, 6), (22, 24, 6)]
    assert runs(shelf(), "first-6") == [(14, 18, 8)]
    assert runs(shelf(), "all") == runs(shelf(), "first-10") == []
    assert link_parts(shelf(), Method.parse("all")).spans == ((8, 18), (18, 24))


def test_the_last_token_is_computed() -> None:
    ends_with_a_document = concatenated([HEAD, Source(FIRST), Source(SECOND)])
    assert runs(ends_with_a_document, "none") == [(2, 8, 0), (8, 17, 0)]


def with_argument(num_after: int, *, first_k: int | None = None) -> Composition:
    """A module of text, an argument of two of its three reserved tokens, text, and a question."""
    source = Source((*range(10, 15), 0, 0, 0, *range(20, 28)), 0, "m")
    early = Part(tuple(range(10, 15)), 3, "module", "m", Span(source, 0, 5), 0, first_k)
    argument = Part((91, 92), 8, "argument", "m:a")
    late = Part(tuple(range(20, 28)), 11, "module", "m", Span(source, 8, 16), num_after, first_k)
    return Composition((early, argument, late, Part(QUESTION, 19, "text")))


def test_the_text_after_an_argument_is_computed() -> None:
    assert runs(with_argument(3), "none") == [(0, 5, 0), (10, 15, 11)]
    assert runs(with_argument(8), "none") == [(0, 5, 0)]
    assert runs(with_argument(3), Method("none", 0, after_arguments=False)) == [(0, 5, 0), (7, 15, 8)]


def test_the_first_tokens_of_a_module_are_counted_through_its_parts() -> None:
    assert runs(with_argument(0), "first-2") == [(2, 5, 2), (7, 15, 8)]
    assert runs(with_argument(0), "first-10") == [(9, 15, 10)]
    assert runs(with_argument(1), "first-10") == [(9, 15, 10)]


def test_a_module_may_have_a_number_of_its_own() -> None:
    assert runs(with_argument(0, first_k=0), "first-2") == [(0, 5, 0), (7, 15, 8)]
    assert runs(with_argument(0, first_k=1), "none") == [(1, 5, 1), (7, 15, 8)]
    assert runs(with_argument(0, first_k=0), "all") == []


def test_positions_are_the_composition_s() -> None:
    links = link_parts(with_argument(0), Method.parse("none"))
    assert links.has_gaps
    assert links.positions.tolist() == [3, 4, 5, 6, 7, 8, 9, *range(11, 21)]
    assert [links.shift(run) for run in links.runs] == [3, 3]


def test_an_empty_composition_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="empty"):
        link_parts(Composition(()), Method.parse("none"))


def test_token_ids_need_no_tokenizer_and_texts_do() -> None:
    composed = compose_documents({"documents": [FIRST, SECOND], "question": QUESTION, "instructions": HEAD}, None)
    assert composed.token_ids.tolist() == [*HEAD, *FIRST, *SECOND, *QUESTION]
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        compose_documents({"documents": ["text"], "question": QUESTION}, None)
    for token_id in (-1, 2**31, 2**70):
        with pytest.raises(InvalidRequestError, match=f"document 0 has the token id {token_id}; give ids from 0"):
            compose_documents({"documents": [[token_id]], "question": QUESTION}, None)
