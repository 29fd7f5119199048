"""What earlier releases stored or handed out stays readable: bytes, tokens and digests are fixed.

The values below were made by the first release that had them. None of them may ever change; a new
form needs a new version beside the old one.
"""

import pytest

from coatcheck.core.deferred import DeferredToken, decode_token, encode_token
from coatcheck.core.fingerprint import fingerprint_of_call
from coatcheck.core.progress import (
    NOT_KEPT,
    Note,
    Progress,
    Report,
    Resolution,
    Step,
    encoded,
    progress_of,
)
from coatcheck.core.record import COMPLETED, RUNNING, Record, completed, failed, in_doubt, renewed
from coatcheck.core.saga.actions import (
    Ended,
    Failure,
    decode_ended,
    derived_key,
    encode_ended,
)
from coatcheck.errors import Unreadable
from coatcheck.server.polling import token_of

ID = bytes(range(16))
NOW_MS = 1_700_000_000_000
# 63 bits, of which earlier releases used the last 20 for a digest of the policy.
OLD_NONCE = 0x1234_5678_90AB_CDEF
RECORD = Record(
    ID,
    NOW_MS + 5,
    RUNNING,
    1,
    bytes(range(16, 32)),
    NOW_MS,
    NOW_MS + 20_000,
    NOW_MS + 86_400_000,
    NOW_MS + 90_000_000,
    OLD_NONCE,
    "POST /orders",
    "caller",
    "key",
    None,
    None,
)


@pytest.mark.parametrize(
    ("args", "kwargs", "digest"),
    [
        ((), {}, "62259fc08593bb1e3e4c84a441331b73"),
        (
            (1, "ä", 2.5, None, [True, {"b": 1, "a": b"x"}]),
            {"when": "now"},
            "177c67a52eed24958eaaee2d84678c30",
        ),
    ],
)
def test_the_fingerprint_of_a_call_is_what_it_was(args, kwargs, digest):
    """F1: a retry after an upgrade is still the same call."""
    assert fingerprint_of_call(args, kwargs).hex() == digest


PROGRESS = Progress(
    steps=(
        Step("reserve", 1, b'\x02{"id":7}', ("audit",)),
        Step("charge", 2, None),
        Step("big", 1, NOT_KEPT),
    ),
    notes=(Note(NOW_MS, 1, {"to": "psp"}),),
    report=Report(0.5, "half"),
    resolutions=(Resolution(NOW_MS + 1, "happened", "ann", "seen at the bank"),),
    handed=("reserve",),
)
STORED_PROGRESS = (
    b'{"steps":[["reserve",1,"0(&B9WFk5@eE",["audit"]],["charge",2,null,[]],["big",1,"",[]]],'
    b'"notes":[[1700000000000,1,{"to":"psp"}]],"report":[0.5,"half"],'
    b'"resolutions":[[1700000000001,"happened","ann","seen at the bank"]],"handed":["reserve"]}'
)


def test_steps_and_notes_are_stored_as_they_were():
    """L7: what an earlier release wrote down is read by this one, and the other way round."""
    assert encoded(PROGRESS) == STORED_PROGRESS
    assert _read(STORED_PROGRESS) == PROGRESS


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_the_trace_context_of_an_answer_is_stored_beside_them():
    """O3: an earlier release reads the rest, and passes over this member."""
    stored = STORED_PROGRESS[:-1] + b',"trace":"%s"}' % TRACE.encode()
    assert encoded(PROGRESS._replace(trace=TRACE)) == stored
    assert _read(stored) == PROGRESS._replace(trace=TRACE)


LONG = Progress(steps=(Step("report", 1, b"\x02" + b"7" * 511),), input=b"\x02" + b"1" * 511)


def test_long_results_and_inputs_are_stored_beside_the_older_form():
    """L7, E3: only those of 512 bytes and more; shorter ones stay in base 85."""
    value, given = b"Ajc3" + b"Nzc3" * 169 + b"Nzc=", b"AjEx" + b"MTEx" * 169 + b"MTE="
    stored = b'{"steps":[["report",1,":%s",[]]],"input":":%s"}' % (value, given)
    assert encoded(LONG) == stored
    assert _read(stored) == LONG
    with pytest.raises(Unreadable):
        _read(stored.replace(b"Nzc3", b"Nz:3"))


REMEMBERED = Progress(steps=(Step("charge", 2, None, (), NOW_MS), Step("ship", 2, b"\x021")))


def test_a_step_that_may_run_again_is_stored_beside_the_older_form():
    """L7, E3: only such a step has one member more."""
    stored = b'{"steps":[["charge",2,null,[],1700000000000],["ship",2,"0x<",[]]]}'
    assert encoded(REMEMBERED) == stored
    assert _read(stored) == REMEMBERED


SAGA_STEPS = [
    (b"R\x01\x8b\xcf\xe5h\x00\x0242", Ended(NOW_MS, b"\x0242")),
    (
        b'F\x01\x8b\xcf\xe5h\x00["charge", "Declined", "no money", false]',
        Ended(NOW_MS, failure=Failure("charge", "Declined", "no money")),
    ),
]


@pytest.mark.parametrize(("stored", "end"), SAGA_STEPS)
def test_the_steps_of_a_saga_are_stored_as_they_were(stored, end):
    """E3: a saga may take days, through an upgrade."""
    assert encode_ended(end) == stored
    assert decode_ended(stored) == end


def test_the_key_of_a_step_of_a_saga_is_what_it_was():
    """E3: the service that it is sent to remembers it."""
    assert derived_key("checkout", "42", "charge:undo") == "checkout:42:charge:undo"
    digest = "checkout:b1cf13ad412cba45f10eb7077f0eae21:charge"
    assert derived_key("checkout", "x" * 255, "charge") == digest


def _read(stored: bytes) -> Progress:
    found = progress_of(RECORD._replace(progress=stored))
    return found._replace(notes=tuple(Note(*note) for note in found.notes))


TOKEN = "AAECAwQFBgcICQoLDA0ODwAAAYvP5WgAEjRWeJCrze9OVpFD6amTSlU1Kxd2kGew"


def test_the_token_of_deferred_work_is_what_it_was():
    """L10: a queue may hold a token for days, through an upgrade."""
    deferred = DeferredToken(ID, NOW_MS, OLD_NONCE)
    assert encode_token(deferred, b"secret") == TOKEN
    assert decode_token(TOKEN, b"secret") == deferred


def test_the_address_for_polling_is_what_it_was():
    """L10, X3: a client may poll an address that an earlier release gave it."""
    token = "000102030405060708090a0b0c0d0e0fc14a3c27418e70c690b2e3df757ab3bc"
    assert token_of(RECORD, b"who", b"secret") == token


def test_a_nonce_of_an_earlier_release_is_carried_through_every_change():
    """L5: whatever its bits meant once, it names the attempt and nothing else."""
    changed = (renewed(RECORD, NOW_MS), completed(RECORD, b""), failed(RECORD), in_doubt(RECORD))
    assert [record.nonce for record in changed] == [OLD_NONCE] * 4
    assert changed[1].state == COMPLETED
