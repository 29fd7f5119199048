"""Identity: ids of operations, digests of callers and derived keys."""

import re
import uuid

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coatcheck.core.identity import (
    LABEL_CHARS_MAX,
    SCOPE_CHARS,
    caller_digest,
    derive,
    digest_key,
    label_of,
    operation_id,
)

ID = bytes(range(16))
SECRET = b"a deployment's secret"

# Few letters, so that moving one from a part to its neighbour is likely to be tried.
texts = st.text("a1,;: \ud800é", max_size=4)
ids = st.binary(min_size=16, max_size=16)


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
@example(("a", "POST /orders", "k"), ("a", "PATCH /orders", "k"))
@example(("a", "POST /orders", "k"), ("a", "POST /orders", "K"))
@example(("ab", "c", ""), ("a", "bc", ""))
@example(("", "1,0;", ""), ("1,0;", "", ""))
@example(("\ud800\udc00", "", ""), ("\U00010000", "", ""))
def test_an_id_belongs_to_one_caller_one_route_and_one_key(one, other):
    """S1, S-21: however the same characters are divided."""
    ids_of = [operation_id(caller=c, route=r, key=k) for c, r, k in (one, other)]
    assert (ids_of[0] == ids_of[1]) == (one == other)


def test_an_id_is_16_bytes_and_the_same_on_every_machine():
    """S1: records outlive the process and the Python version that wrote them."""
    whole = {"caller": "c0ffee", "route": "POST /orders", "key": "k-1"}
    assert operation_id(**whole).hex() == "970f442c6069b09673fd89c9f139d53e"
    assert operation_id(**whole, secret=SECRET).hex() == "577c77b4178294e9a0d6d780434c2a32"


@pytest.mark.parametrize(
    ("length", "expected"),
    [(64, "4010ccc80e332b75e00f0b273c598f6e"), (65, "e2193b4d3cda28bf8e5077c4c198cc48")],
)
def test_a_long_secret_counts_as_a_whole(length, expected):
    """S1: up to 64 bytes it is used as it is, a longer one is digested, never cut off."""
    secret = digest_key(bytes(range(length)))
    assert operation_id(caller="a", route="r", key="k", secret=secret).hex() == expected


@given(
    st.lists(st.one_of(texts, st.binary(max_size=4)), max_size=4),
    st.lists(st.one_of(texts, st.binary(max_size=4)), max_size=4),
)
@example(["bearer", "x"], ["bearerx"])
@example([""], [])
@example(["a", "b"], [b"a1:b"])
def test_callers_are_equal_only_if_all_their_parts_are(one, other):
    """S1, S2: a text and its UTF-8 bytes are the same part."""

    def in_bytes(parts):
        return [p if isinstance(p, bytes) else p.encode("utf-8", "surrogatepass") for p in parts]

    same = in_bytes(one) == in_bytes(other)
    assert (caller_digest(*one) == caller_digest(*other)) == same


def test_a_caller_is_compared_by_128_bits_and_shown_by_64():
    """S2."""
    caller = caller_digest("bearer", "sk_live_1234")
    assert re.fullmatch("[0-9a-f]{32}", caller)
    assert len(caller[:SCOPE_CHARS]) == 16
    assert "sk_live" not in caller
    assert caller == "b2d9c910da684cc0173ecf4458f196ea"


def test_every_secret_gives_other_digests():
    """S2: without one, short credentials could be guessed from a stolen store."""
    whole = {"caller": "a", "route": "POST /orders", "key": "k"}
    for digest in (
        lambda secret: operation_id(**whole, secret=secret),
        lambda secret: caller_digest("bearer", "1234", secret=secret),
        lambda secret: derive(ID, "charge", generation=1, secret=secret),
    ):
        secrets = [b"", b"one", b"two", b"x" * 64, b"x" * 65, b"x" * 64 + b"y", b"x" * 1000]
        assert len({digest(digest_key(secret)) for secret in secrets}) == len(secrets)


def test_a_label_has_a_limit_and_belongs_to_one_route():
    """O1, X2: a path that matches no route may have any length."""
    longest = "POST /" + "o" * (LABEL_CHARS_MAX - 6)
    assert label_of(longest) == longest
    one, other = label_of(longest + "/1"), label_of(longest + "/2\udcff")
    assert len(one) == len(other) == LABEL_CHARS_MAX
    assert one != other
    assert one.startswith("POST /ooo")
    assert label_of(one) == one


def test_digests_for_different_uses_are_never_equal():
    """S1: an id cannot be used as a caller."""
    as_id = operation_id(caller="", route="", key="")
    as_caller = bytes.fromhex(caller_digest("0,0;"))
    assert as_id != as_caller


# --------------------------------------------------------------------------------- derived keys


def test_a_derived_key_is_a_valid_uuid_and_never_changes():
    """L8: a provider stores it for longer than our process runs."""
    derived = derive(ID, "charge", generation=1_700_000_000_000)
    parsed = uuid.UUID(derived)
    assert str(parsed) == derived
    assert parsed.version == 5
    assert parsed.variant == uuid.RFC_4122
    assert derived == "f846fc92-aa0b-52fe-ae7e-9a2b42223295"
    assert (
        derive(ID, "charge", generation=1, secret=SECRET) == "3fab518a-103c-50c5-b016-69f55074d916"
    )


@given(ids, st.text("abé", max_size=3), st.integers(0, 2**48))
def test_a_derived_key_is_stable_for_every_attempt_of_one_generation(id, name, generation):
    """L8, S-46."""
    assert derive(id, name, generation=generation) == derive(id, name, generation=generation)
    assert uuid.UUID(derive(id, name, generation=generation)).version == 5


places = st.tuples(ids, st.text("abé", max_size=3), st.integers(0, 2**48))


@given(places, places)
def test_every_step_of_every_operation_derives_its_own_key(one, other):
    """L8: of two steps with one key, the provider would ignore the second."""
    derived = [derive(id, name, generation=generation) for id, name, generation in (one, other)]
    assert (derived[0] == derived[1]) == (one == other)


def test_another_request_derives_other_downstream_keys():
    """L8, F1: the one before it was rejected, in the same generation."""
    derived = [derive(ID, "charge", generation=1, request=r) for r in (b"", b"a" * 16, b"b" * 16)]
    assert len(set(derived)) == len(derived)


def test_a_new_generation_derives_new_downstream_keys():
    """L8, T2: otherwise the provider would replay the charge of the generation before."""
    assert derive(ID, "charge", generation=1) != derive(ID, "charge", generation=2)


def test_a_derived_key_does_not_reveal_the_key_it_comes_from():
    """S-46: downstream sees a key of ours, not the caller's own."""
    id = operation_id(caller="a", route="POST /orders", key="k")
    assert id.hex() not in derive(id, "charge", generation=1).replace("-", "")
